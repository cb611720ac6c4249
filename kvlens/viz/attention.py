"""Attention patterns in circuitsvis' view of heads, including the tokens of the converted prompt.

circuitsvis only draws square patterns. After a conversion the queries are those of the text, and the keys those of prompt and
text: the prompt's tokens, now in the bias, come first as virtual rows and columns. Their rows are those of the prompt's own
forward pass if they are given, and empty otherwise. :func:`attention_under_bias` runs the model and draws what it attends to.
"""

import functools
import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, analyses
from kvlens.arguments import numbers_of
from kvlens.checks import Within, checked
from kvlens.errors import KVLensError, brief
from kvlens.viz._blocks import strongest_positions
from kvlens.viz._color import FULL, NEGATIVE, POSITIVE, beyond, diverging_map, strongest
from kvlens.viz._quantized import quantized
from kvlens.viz._text import data_script, html_text, label, number, rounded
from kvlens.viz.piece import Piece

MAX_HEADS = 64
MAX_CELLS = 64_000
"""The number of cells, over all heads, that circuitsvis draws in about a second."""


@checked
def attention_view(
    tokens: Sequence[str],
    pattern: Any,
    *,
    queries: Any = None,
    n_prompt: int = 0,
    head_names: Sequence[str] | None = None,
    max_tokens: Annotated[int, Within(4)] | None = None,
    positions: Sequence[int] | None = None,
    n_left_out: int = 0,
    title: str = "attention patterns",
    axes: Any = None,
) -> Piece | Any:
    """Attention patterns drawn by circuitsvis: a small map per head and one enlarged; hover to enlarge, click to keep.

    Args:
        tokens: tokens of all keys, those of the prompt first.
        pattern: [head, query, key]; negative entries are red. Values that are not finite are drawn as 0, with a note.
        queries: positions of the rows among the keys, ascending; None takes the last ones.
        n_prompt: number of tokens of the prompt, which are marked.
        head_names: a name for each head; None numbers them.
        max_tokens: rows and columns of the view; None takes what a browser draws without delay. For a longer sequence the last
            queries are shown, and the earlier tokens that these attend to most.
        positions: position of each token in its prompt or text, if the tokens are chosen from longer ones; None counts them.
        n_left_out: number of tokens left out by that choice, for the caption.
        title: title above the view.
        axes: draw the patterns into these matplotlib axes instead, one for each head, and return them.

    Returns:
        A `Piece`; ``axes`` where they were given.

    Raises:
        KVLensError: inconsistent sizes, more than 64 heads, ``max_tokens`` below 4.
    """
    values, rows, names = _checked(tokens, pattern, queries, n_prompt, head_names)
    if positions is not None and len(positions) != len(tokens):
        raise KVLensError(f"attention_view: {len(tokens)} tokens and {len(positions)} positions; give one per token")
    limit = max(16, math.isqrt(MAX_CELLS // (len(values) + 1))) if max_tokens is None else max_tokens
    n_broken = int((~values.isfinite()).sum())
    numbers = [*range(n_prompt), *range(len(tokens) - n_prompt)] if positions is None else positions
    marked = [f"{'p' * (i < n_prompt)}{numbers[i]}:{label(token)}" for i, token in enumerate(tokens)]
    square, labels, n_too_many = _square(values.nan_to_num(0.0, 0.0, 0.0), rows, marked, n_prompt, limit)
    top = rounded(strongest(square.flatten().tolist(), FULL)) or 1.0
    if axes is not None:
        _draw(list(np.ravel(axes))[: len(names)], square, labels, names, top)
        return axes
    notes = [f"full color at {number(top)}"]
    if n_prompt:
        own = "; their rows are from the prompt's own forward pass" if int(rows[0]) < n_prompt else ""
        notes.append(f"p0, p1, ... are the prompt's tokens, stored in the bias{own}")
    if n_too_many + n_left_out:
        n_all = len(tokens) + n_left_out
        notes.append(f"{n_too_many + n_left_out:,} of {n_all:,} tokens are left out, those with the least attention")
    if n_broken:
        notes.append(f"{n_broken:,} values are not finite and drawn as 0")
    props = {
        "tokens": labels,
        "attention": quantized(square, full=top, levels=255),  # as many as a canvas has
        "attentionHeadNames": names,
        "maxValue": top,
        "minValue": -top,
        "positiveColor": POSITIVE,
        "negativeColor": NEGATIVE,
        "maskUpperTri": True,
    }
    body = (
        f'<figure class="piece"><figcaption>{html_text(title)} <span class="unit">{html_text("; ".join(notes))}</span>'
        f'</figcaption><div class="paper" data-kvlens="attention">'
        f"{data_script(props)}"
        '<button type="button" class="draw">Draw with circuitsvis</button><div></div></div></figure>'
    )
    return Piece(title, body, circuitsvis=True, figure=functools.partial(_figure, square, labels, names, top, title))


@checked
def attention_under_bias(
    model: KVModel,
    prompt: Any,
    text: Any,
    layer: Annotated[int, Within(0)],
    *,
    bias: KVBias | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
    max_tokens: Annotated[int, Within(4)] | None = None,
    axes: Any = None,
) -> Piece | Any:
    """The attention of one layer's heads under a bias, to the prompt's tokens and the text's, drawn by circuitsvis.

    ``hook_pattern`` under a bias lacks the columns of the bias, which are nearly all of it, so that circuitsvis draws it blank.

    >>> from kvlens import load
    >>> model = load("facts-gpt2")
    >>> attention_under_bias(model, "Mira keeps a goat.", " Mira keeps a", layer=1).save_html("attention.html")

    Args:
        model, prompt, text, layer, bias: as of :func:`kvlens.analyses.attention_under_bias`, which gives the numbers.
        heads: which heads are drawn; None draws all.
        title: title above the view; None says what it shows.
        max_tokens, axes: as of :func:`attention_view`.

    Returns:
        As :func:`attention_view`.

    Raises:
        KVLensError: a head that the layer does not have; as both functions.
    """
    found = analyses.attention_under_bias(model, prompt, text, layer, bias=bias)
    n_heads = len(found.pattern)
    chosen = list(range(n_heads) if heads is None else heads)
    if not chosen or not {*chosen} <= {*range(n_heads)}:
        raise KVLensError(f"attention_under_bias: heads: layer {layer} has heads 0 to {n_heads - 1}, got {brief(heads)}")
    return attention_view(
        found.tokens,
        found.pattern[chosen],
        n_prompt=found.n_prompt,
        head_names=[f"L{layer} H{head}" for head in chosen],
        title=f"layer {layer}: the text's attention under the bias" if title is None else title,
        max_tokens=max_tokens,
        axes=axes,
    )


def _checked(
    tokens: Sequence[str], pattern: Any, queries: Any, n_prompt: int, head_names: Sequence[str] | None
) -> tuple[Float[Tensor, "head query key"], Int[Tensor, " query"], list[str]]:
    values, n_keys = numbers_of(pattern).float(), len(tokens)
    if values.dim() != 3 or not values.numel() or values.shape[1] > n_keys or values.shape[2] != n_keys:
        raise KVLensError(
            f"attention_view: expected a pattern [head, query, key] with query <= key = {n_keys} tokens, "
            f"got shape {list(values.shape)}"
        )
    last = torch.arange(n_keys)[n_keys - values.shape[1] :]
    positions = last if queries is None else numbers_of(queries).long()
    ascending = positions.dim() == 1 and bool((positions.diff() > 0).all())
    if not ascending or len(positions) != values.shape[1] or not 0 <= int(positions[0]) <= int(positions[-1]) < n_keys:
        raise KVLensError(
            f"attention_view: expected {values.shape[1]} ascending query positions in 0..{n_keys - 1}, "
            f"got {brief(positions) if positions.dim() != 1 else positions.tolist()[:8]}"
        )
    if not 0 <= n_prompt <= n_keys:
        raise KVLensError(f"attention_view: n_prompt must lie in 0..{n_keys}, the number of tokens, got {n_prompt}")
    names = [f"Head {i}" for i in range(len(values))] if head_names is None else [str(name) for name in head_names]
    if len(names) != len(values) or len(names) > MAX_HEADS:
        raise KVLensError(f"attention_view: {len(values)} heads and {len(names)} names; give one per head, at most {MAX_HEADS}")
    return values, positions, names


def _square(
    values: Float[Tensor, "head query key"], queries: Int[Tensor, " query"], labels: list[str], n_prompt: int, limit: int
) -> tuple[Float[Tensor, "head pos pos"], list[str], int]:
    """The square pattern over the tokens that are kept, their labels, and the number of tokens left out."""
    kept, left_out = strongest_positions(values, queries, n_prompt, limit)
    square, shown = _with_empty_rows(values[..., kept], queries, len(labels))[:, kept], [labels[i] for i in kept.tolist()]
    return square, shown, len(left_out)


def _with_empty_rows(
    values: Float[Tensor, "head query column"], queries: Int[Tensor, " query"], n_rows: int
) -> Float[Tensor, "head pos column"]:
    rows = values.new_zeros(len(values), n_rows, values.shape[-1])
    rows[:, queries] = values
    return rows


def _figure(square: Tensor, labels: list[str], names: list[str], top: float, title: str) -> Any:
    from matplotlib.figure import Figure

    columns = min(6, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(2.4 * columns + 1, 2.5 * rows + 0.6), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat[len(names) :]:
        ax.axis("off")
    image = _draw(list(axes.flat)[: len(names)], square, labels, names, top)
    figure.suptitle(title, fontsize=10, parse_math=False)
    extend = beyond(square.flatten().tolist(), -top, top)
    figure.colorbar(image, ax=axes, fraction=0.02, label="share of attention", extend=extend)
    return figure


def _draw(axes: Sequence[Any], square: Tensor, labels: list[str], names: list[str], top: float) -> Any:
    """Draw a map for each head; return the last image, whose color scale all of them share."""
    for ax, head, name in zip(axes, square, names, strict=True):
        image = ax.imshow(head, cmap=diverging_map(), vmin=-top, vmax=top, interpolation="nearest")
        ax.set_title(name, fontsize=9, parse_math=False)
        if len(labels) <= 24:
            ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5, parse_math=False)
            ax.set_yticks(range(len(labels)), labels, fontsize=5, parse_math=False)
    return image
