"""DUAL's figures: attention as a gradient step, the attention variants it suggests, and the heads of trained models."""
