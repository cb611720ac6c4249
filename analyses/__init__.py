"""Analyses of kvlens models: each a function that returns a tidy DataFrame, built on kvlens' public names only."""
