"""The batch size of analyses that run many rows."""

from kvlens.checks import Count, ensure

MEMORY_PER_PASS = 2**28
"""Approximate bytes that a forward pass may take if no batch size is given."""


def check_batch_size(analysis: str, batch_size: int | None) -> None:
    """Raise KVLensError unless a batch size is a whole number of at least 1, or None."""
    if batch_size is not None:
        ensure(f"{analysis}: batch_size", Count, batch_size)
