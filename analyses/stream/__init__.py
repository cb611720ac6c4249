"""Who wrote what into the residual stream, down to the logits."""
