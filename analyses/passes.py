"""How many rows share a forward pass, where an analysis runs many."""

from kvlens.checks import Count, ensure

MEMORY_PER_PASS = 2**28
"""Bytes that one forward pass may roughly take when the batch size is left open."""


def check_batch_size(analysis: str, batch_size: int | None) -> None:
    """Raise KVLensError unless a batch size is a whole number of at least 1, or None."""
    if batch_size is not None:
        ensure(f"{analysis}: batch_size", Count, batch_size)
