"""DUAL's figures: attention as a step of learning, the attentions that this suggests, and what the heads of models do."""
