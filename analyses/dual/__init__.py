"""Heads as one step of representation learning: how much each step lowers its loss, and what each demonstration gives to it."""
