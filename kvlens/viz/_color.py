"""The color scale of all pictures: white to blue for positive values, white to red for negative ones, as in circuitsvis.

A page mixes the colors itself (``--x`` in ``static/kvlens.css``), so that it can follow a light or dark theme; this module
computes the intensity of each value, and the same scale for matplotlib.
"""

import math
from collections.abc import Iterable
from typing import Any

POSITIVE, NEGATIVE = "#1d5fa8", "#c0392b"


FULL = 0.98
"""The quantile of magnitudes that gets full color if many values share a scale: otherwise a single token, often the first, that
attracts most of a head's attention would leave all others white. ``static/base.js`` has the same number."""


def strongest(values: Iterable[float], quantile: float = 1.0) -> float:
    """The magnitude that gets full color: a quantile of the finite nonzero magnitudes; 0 if there are none."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value)
    return sizes[math.ceil(quantile * len(sizes)) - 1] if sizes else 0.0


def scale_of(values: Iterable[float], *, without_zero: bool = False) -> tuple[float, float]:
    """The value without color and the one with full color: 0 and the largest magnitude, or the lowest and the highest value.

    Args:
        values: the colored values; values that are not finite are ignored.
        without_zero: whether their 0 is not meaningful, as for logarithms, so that the scale runs from lowest to highest.
    """
    finite = [value for value in values if math.isfinite(value)]
    if without_zero and finite:
        return min(finite), max(finite)
    return 0.0, strongest(finite)


def strength_style(value: float, low: float, top: float) -> str:
    """The ``class`` and ``style`` attributes of an element that shows ``value`` on a scale from ``low`` to ``top``."""
    return style(value, top) if low == 0 else style(value - low, top - low)


def style(value: float, top: float) -> str:
    """The ``class`` and ``style`` attributes of an element that shows ``value``, with full color at ``top``."""
    if not math.isfinite(value):
        return 'class="none"'
    strength = min(1.0, abs(value) / top) if top > 0 else 0.0
    kind = ("negative" if value < 0 else "positive") + (" clipped" if abs(value) > 1.0005 * top > 0 else "")
    return f'class="{kind}" style="--x:{100 * strength:.1f}%"'


def beyond(values: Iterable[float], low: float, top: float) -> str:
    """Which ends of a color bar from ``low`` to ``top`` are pointed, as matplotlib's ``extend``: those that values exceed."""
    finite = [value for value in values if math.isfinite(value)]
    slack = 5e-4 * (top - low)
    under, over = min(finite, default=low) < low - slack, max(finite, default=top) > top + slack
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[under, over]


def diverging_map() -> Any:
    """The scale as a matplotlib color map, for values in -top..top."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kvlens", [NEGATIVE, "white", POSITIVE])
