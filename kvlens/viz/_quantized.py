"""Compact numbers for a page: one character each, and their unit."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvlens.viz._text import rounded

NO_VALUE, ZERO = "!", ord("#")
"""The characters of a value that is not finite and of 0; neither these nor those after them are spaces or quotes."""
LARGEST = 20_000
"""The most units of a value, so that none of the characters is half of a surrogate pair."""


def quantized(values: Float[Tensor, "..."], *, full: float | None = None, levels: int = 999) -> dict[str, Any]:
    """Values in row order as whole numbers q of a unit: q >= 0 is the character with the number `ZERO` + 2q, q < 0 that with
    `ZERO` - 2q - 1.

    Args:
        values: of any shape.
        full: the value of ``levels`` units; the largest magnitude if None.
        levels: how many units that is.
    """
    finite = values.isfinite()
    largest = float(values[finite].abs().max()) if bool(finite.any()) else 0.0
    unit = rounded(max((largest if full is None else full) / levels, largest / LARGEST), digits=4) or 1.0
    q = (values.nan_to_num(0.0, 0.0, 0.0) / unit).round().int()
    numbers = (2 * q.abs() - (q < 0).int() + ZERO).flatten().tolist()
    signs = (chr(number) if real else NO_VALUE for number, real in zip(numbers, finite.flatten().tolist(), strict=True))
    return {"unit": unit, "cells": "".join(signs)}
