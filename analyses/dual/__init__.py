"""Heads as one step of representation learning: how much each step lowers its loss, and the part of each demonstration."""
