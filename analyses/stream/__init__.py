"""Analyses of the contributions to the residual stream and the logits."""
