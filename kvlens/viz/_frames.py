"""Checks of a frame before it is drawn."""

from collections.abc import Iterable

import pandas as pd

from kvlens.errors import KVLensError, nearest


def check_columns(piece: str, table: pd.DataFrame, columns: Iterable[str]) -> None:
    """Raise KVLensError unless ``table`` has rows and all of ``columns``; the nearest name is proposed."""
    for column in columns:
        if column not in table.columns:
            there = [str(name) for name in table.columns]
            raise KVLensError(f"{piece}: the table has no column {column!r}{nearest(column, there)}; it has {', '.join(there)}")
    if table.empty:
        raise KVLensError(f"{piece}: the table has no rows; give at least one")


def check_numbers(piece: str, table: pd.DataFrame, column: str) -> None:
    """Raise KVLensError unless ``column`` holds numbers."""
    if not pd.api.types.is_numeric_dtype(table[column]):
        raise KVLensError(f"{piece}: column {column!r} holds {table[column].dtype}, expected numbers")
