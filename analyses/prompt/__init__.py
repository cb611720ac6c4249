"""Analyses of the effect of a prompt on the predictions on a text, and of the exactness of its conversion."""
