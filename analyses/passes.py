"""The batch size of analyses that run many rows."""

MEMORY_PER_PASS = 2**28
"""Approximate bytes that a forward pass may take if no batch size is given."""
