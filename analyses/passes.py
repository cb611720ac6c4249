"""How many rows share a forward pass, where an analysis runs many."""

from kvlens import KVLensError

MEMORY_A_PASS = 2**28
"""Bytes that one forward pass may roughly take when the batch size is left open."""


def check_batch_size(analysis: str, batch_size: int | None) -> None:
    """Raise KVLensError for a batch size below 1."""
    if batch_size is not None and batch_size < 1:
        raise KVLensError(f"{analysis}: batch_size must be at least 1, got {batch_size}")
