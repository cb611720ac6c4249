"""Experiments of ICLCA: prompts converted to biases, exactly and approximately, and biases that are trained."""
