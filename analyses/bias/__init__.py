"""Analyses of a converted prompt's bias: its composition, which heads read it, and the effect of removing it."""
