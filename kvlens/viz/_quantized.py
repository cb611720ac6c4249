"""Compact numbers for a page: integers of at most three digits and their unit."""

from typing import Any

from jaxtyping import Float
from torch import Tensor

from kvlens.viz._text import rounded


def quantized(values: Float[Tensor, "..."]) -> dict[str, Any]:
    """Quantize values to a list in row order; None for values that are not finite. A value is its cell times the unit."""
    finite = values.isfinite()
    largest = float(values[finite].abs().max()) if bool(finite.any()) else 0.0
    unit = rounded(largest / 999, digits=4) or 1.0
    cells = (values.nan_to_num(0.0, 0.0, 0.0) / unit).round().int().flatten().tolist()
    if not bool(finite.all()):
        cells = [cell if real else None for cell, real in zip(cells, finite.flatten().tolist(), strict=True)]
    return {"unit": unit, "cells": cells}
