"""What all figures share: the color scale, and blocks for long axes.

The scale is white to blue for positive values and white to red for negative ones, as in circuitsvis. A page mixes the colors
itself (``--x`` in ``static/kvlens.css``), so that it can follow a light or dark theme; here are the intensity of each value and
the same scale for matplotlib. Long axes are shown in blocks of neighbors, long token lists by their most relevant tokens: a
4,096-token prompt has 4,096 columns per head and query, and a picture a few hundred. Sums over neighbors preserve the order and
the total.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.texts import joined

if TYPE_CHECKING:
    from matplotlib.colors import Colormap

POSITIVE_COLOR, NEGATIVE_COLOR = "#1d5fa8", "#c0392b"


FULL_COLOR = 0.98
"""The quantile of magnitudes that gets full color if many values share a scale: otherwise a single token, often the first, that
attracts most of a head's attention would leave all others white. ``static/base.js`` has the same number."""


def strongest(values: Iterable[float], quantile: float = 1.0) -> float:
    """The magnitude that gets full color: a quantile of the finite nonzero magnitudes; 0 if there are none."""
    sizes = sorted(abs(value) for value in values if math.isfinite(value) and value)
    return sizes[math.ceil(quantile * len(sizes)) - 1] if sizes else 0.0


def style(value: float, top: float) -> str:
    """The ``class`` and ``style`` attributes of an element that shows ``value``, with full color at ``top``."""
    if not math.isfinite(value):
        return 'class="none"'
    strength = min(1.0, abs(value) / top) if top > 0 else 0.0
    kind = ("negative" if value < 0 else "positive") + (" clipped" if abs(value) > 1.0005 * top > 0 else "")
    return f'class="{kind}" style="--x:{100 * strength:.1f}%"'


def beyond(values: Iterable[float], low: float, top: float) -> str:
    """Choose the pointed ends of a color bar from ``low`` to ``top`` (matplotlib's ``extend``): those that values exceed."""
    finite = [value for value in values if math.isfinite(value)]
    slack = 5e-4 * (top - low)
    under, over = min(finite, default=low) < low - slack, max(finite, default=top) > top + slack
    return {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}[under, over]


def diverging_map() -> "Colormap":
    """The scale as a matplotlib color map, for values in -top..top."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kvlens", [NEGATIVE_COLOR, "white", POSITIVE_COLOR])


MAX_TEXT = 40
"""The most characters of a block's text."""


def block_size(n: int, limit: int) -> int:
    """The number of neighbors per block for which ``n`` positions make at most ``limit`` blocks."""
    return max(1, math.ceil(n / max(1, limit)))


def token_blocks(tokens: Sequence[str], size: int) -> list[dict[str, str]]:
    """Tokens in blocks of ``size`` neighbors: the position of each block, and its text, shortened in the middle."""
    return [_block(tokens, start, size) for start in range(0, len(tokens), size)]


def _block(tokens: Sequence[str], start: int, size: int) -> dict[str, str]:
    last = min(start + size, len(tokens)) - 1
    text = joined(tokens[start : last + 1])
    if last > start and len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} … {text[-MAX_TEXT // 2 :]}"
    return {"place": str(start) if last == start else f"{start}–{last}", "text": text}


def block_means(
    sums: Float[Tensor, "*rest column"], size: int, *, per_column: int = 1, n: int | None = None
) -> Float[Tensor, "*rest block"]:
    """Means per token over blocks of neighbors.

    Args:
        sums: one column per ``per_column`` neighboring tokens; the last one may have fewer.
        size: columns per block; the last block may have fewer.
        per_column: tokens per column.
        n: total number of tokens; None if the last column is full.
    """
    n = sums.shape[-1] * per_column if n is None else n
    blocks = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % size)).unflatten(-1, (-1, size)).sum(dim=-1)
    n_tokens = torch.full((blocks.shape[-1],), size * per_column)
    n_tokens[-1] = n - (len(n_tokens) - 1) * size * per_column
    return blocks / n_tokens
