"""Analyses of single heads: where they attend, what they copy, which heads they read."""
