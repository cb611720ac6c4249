"""One scale for all pictures: white to blue for positive values, white to red for negative ones, as circuitsvis has them.

A page mixes the colors itself (``--x`` in ``static/kvlens.css``), so that it can follow a light or dark reader; here is how
strong each value is, and the same scale for matplotlib.
"""

import math
from collections.abc import Iterable
from typing import Any

POSITIVE, NEGATIVE = "#1d5fa8", "#c0392b"


FULL = 0.98
"""Where many values share a scale, this quantile of their magnitudes gets full color: one token, often the first, that draws
most of a head's attention would leave all others white. ``static/base.js`` has the same number."""


def strongest(values: Iterable[float], quantile: float = 1.0) -> float:
    """The magnitude that gets full color: a quantile of the finite ones that are not 0; 0 where there is none."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value)
    return sizes[math.ceil(quantile * len(sizes)) - 1] if sizes else 0.0


def scale_of(values: Iterable[float], *, without_zero: bool = False) -> tuple[float, float]:
    """The value without color and the one with full color: 0 and the largest magnitude, or the lowest and the highest value.

    Args:
        values: what is colored; what is not finite does not count.
        without_zero: their 0 means nothing, as that of a logarithm, and the scale runs from lowest to highest.
    """
    finite = [value for value in values if math.isfinite(value)]
    if without_zero and finite:
        return min(finite), max(finite)
    return 0.0, strongest(finite)


def strength_style(value: float, low: float, top: float) -> str:
    """The ``class`` and ``style`` attributes of an element that shows ``value`` on a scale from ``low`` to ``top``."""
    return style(value, top) if low == 0 else style(value - low, top - low)


def style(value: float, top: float) -> str:
    """The ``class`` and ``style`` attributes of an element that shows ``value`` where ``top`` has full color."""
    if not math.isfinite(value):
        return 'class="none"'
    strength = min(1.0, abs(value) / top) if top > 0 else 0.0
    kind = ("negative" if value < 0 else "positive") + (" clipped" if abs(value) > 1.0005 * top > 0 else "")
    return f'class="{kind}" style="--x:{100 * strength:.1f}%"'


def diverging_map() -> Any:
    """The scale as a matplotlib color map, for values in -top..top."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kvlens", [NEGATIVE, "white", POSITIVE])
