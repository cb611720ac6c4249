"""Attention between prompt and text: circuitsvis' view of heads, arcs of induction, and three linked panels.

circuitsvis only draws square patterns. After a conversion the queries are those of the text, and the keys those of prompt and
text: the prompt's tokens, now in the bias, come first as virtual rows and columns. Their rows are those of the prompt's own
forward pass if they are given, and empty otherwise. :func:`attention_view_under_bias` runs the model and draws its attention.
"""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, analyses
from kvlens.analyses import LinkedShares
from kvlens.arguments import numbers_of
from kvlens.checks import Within, checked
from kvlens.errors import KVLensError, brief
from kvlens.viz._figures import (
    FULL_COLOR,
    NEGATIVE_COLOR,
    POSITIVE_COLOR,
    beyond,
    block_means,
    block_size,
    diverging_map,
    strongest,
    token_blocks,
)
from kvlens.viz._text import data_script, html_text, label, number, part_note, percent, printable, quantized, rounded
from kvlens.viz.page import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MAX_HEADS = 64
MAX_CELLS = 64_000
"""The number of cells, over all heads, that circuitsvis draws in about a second."""


@checked
def attention_view(
    tokens: Sequence[str],
    pattern: object,
    *,
    queries: object = None,
    n_prompt: int = 0,
    head_names: Sequence[str] | None = None,
    max_tokens: Annotated[int, Within(4)] | None = None,
    positions: Sequence[int] | None = None,
    n_left_out: int = 0,
    title: str = "attention patterns",
    axes: "Sequence[Axes] | np.ndarray | None" = None,
) -> Piece | Any:
    """Draw attention patterns by circuitsvis: a small map per head and one enlarged; hover to enlarge, click to keep.

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
    top = rounded(strongest(square.flatten().tolist(), FULL_COLOR)) or 1.0
    if axes is not None:
        _draw(list(np.asarray(axes).ravel())[: len(names)], square, labels, names, top)
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
        "positiveColor": POSITIVE_COLOR,
        "negativeColor": NEGATIVE_COLOR,
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
def attention_view_under_bias(
    model: KVModel,
    prompt: object,
    text: object,
    layer: Annotated[int, Within(0)],
    *,
    bias: KVBias | None = None,
    heads: Sequence[int] | None = None,
    title: str | None = None,
    max_tokens: Annotated[int, Within(4)] | None = None,
    axes: "Sequence[Axes] | np.ndarray | None" = None,
) -> Piece | Any:
    """Draw the attention of one layer's heads under a bias, to the prompt's tokens and the text's, by circuitsvis.

    ``hook_pattern`` under a bias lacks the columns of the bias, which are nearly all of it, so that circuitsvis draws it blank.

    >>> from kvlens import load
    >>> model = load("facts-gpt2")
    >>> attention_view_under_bias(model, "Mira keeps a goat.", " Mira keeps a", layer=1).save_html("attention.html")

    Args:
        model, prompt, text, layer, bias: as of :func:`kvlens.analyses.attention_under_bias`, which gives the numbers.
        heads: which heads are drawn; None draws all.
        title: title above the view; None says what it shows.
        max_tokens, axes: as of :func:`attention_view`.

    Returns:
        As :func:`attention_view`.

    Raises:
        KVLensError: as both functions.
    """
    found = analyses.attention_under_bias(model, prompt, text, layer, bias=bias)
    n_heads = len(found.pattern)
    chosen = list(range(n_heads) if heads is None else heads)
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
    tokens: Sequence[str], pattern: object, queries: object, n_prompt: int, head_names: Sequence[str] | None
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


def _figure(square: Tensor, labels: list[str], names: list[str], top: float, title: str) -> "Figure":
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


def _draw(axes: "Sequence[Axes]", square: Tensor, labels: list[str], names: list[str], top: float) -> "AxesImage":
    """Draw a map for each head; return the last image, whose color scale all of them share."""
    for ax, head, name in zip(axes, square, names, strict=True):
        image = ax.imshow(head, cmap=diverging_map(), vmin=-top, vmax=top, interpolation="nearest")
        ax.set_title(name, fontsize=9, parse_math=False)
        if len(labels) <= 24:
            ax.set_xticks(range(len(labels)), labels, rotation=90, fontsize=5, parse_math=False)
            ax.set_yticks(range(len(labels)), labels, fontsize=5, parse_math=False)
    return image


# Induction over prompt and text: an arc from each text token to the prompt token that follows its earlier occurrence.


MAX_ARCS, MAX_ARC_TOKENS = 4000, 1024
MAX_TOUCHED = 256
"""The number of tokens shown of more than ``MAX_ARC_TOKENS``: those at the strongest arcs of each head."""


@checked
def induction_arcs(
    tokens: Sequence[str],
    n_prompt: int,
    arcs: pd.DataFrame,
    scores: pd.DataFrame,
    *,
    title: str = "induction arcs",
    ax: "Axes | None" = None,
) -> Piece | Any:
    """Draw arcs of all heads, filtered by a strip of induction scores; dashed if the head matches by its key shift.

    Args:
        tokens: tokens of prompt and text, in order.
        n_prompt: number of tokens of the prompt.
        arcs: the table of ``prompt_copies``, one row per head and pair of tokens: ``layer``, ``head``, ``position`` (in the
            text), ``prompt_position``, ``attention`` (from the one to the other: the width of the arc), ``shifted`` (True if
            the head matches by its key shift).
        scores: one row per head: ``layer``, ``head``, ``score``, shown in the strip that filters the arcs.
        title: title above the picture.
        ax: draw the static picture into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: positions outside the tokens.
    """
    for column, n in (("position", len(tokens) - n_prompt), ("prompt_position", n_prompt)):
        if len(arcs) and not 0 <= arcs[column].min() <= arcs[column].max() < n:
            raise KVLensError(f"induction_arcs: {column} must lie in 0..{n - 1}")
    arcs = arcs.assign(query=arcs["position"] + n_prompt)
    strongest, positions = _shown(arcs, len(tokens))
    at = {position: i for i, position in enumerate(positions)}
    data = {
        "tokens": [str(tokens[i]) for i in positions],
        "places": [i if i < n_prompt else i - n_prompt for i in positions],
        "n_prompt": sum(i < n_prompt for i in positions),
        "scores": [[int(r.layer), int(r.head), rounded(float(r.score))] for r in scores.itertuples()],
        "arcs": [
            [int(r.layer), int(r.head), at[r.query], at[r.prompt_position], rounded(float(r.attention)), int(bool(r.shifted))]
            for r in strongest.itertuples()
        ],
    }
    if ax is not None:
        return _draw_arcs(ax, data, title)
    left_out = ""
    if len(strongest) < len(arcs):
        left_out += f" {len(strongest):,} of {len(arcs):,} arcs are shown, each head's strongest."
    if len(positions) < len(tokens):
        left_out += f" Of {len(tokens):,} tokens the {len(positions):,} under them are shown; ⋯ marks where some are left out."
    note = (
        "From a text token to the token after its earlier occurrence; as wide as the head's share of attention. Dashed: "
        f"the head reaches it by its key shift. Choose heads in the strip.{left_out}"
    )
    if not len(arcs):
        note = "No token of the text occurs earlier, so there is nothing for induction to copy."
    body = (
        f'<figure class="piece" data-kvlens="arcs"><figcaption>{html_text(title)}</figcaption>'
        f'<p class="note">{html_text(note)}</p><div class="arcs"></div>'
        f"{data_script(data)}</figure>"
    )
    return Piece(title, body, figure=functools.partial(_arcs_figure, data, title))


def _shown(arcs: pd.DataFrame, n_tokens: int) -> tuple[pd.DataFrame, list[int]]:
    """The arcs that are drawn, each head's strongest first, and the positions of the tokens under them."""
    size = arcs["attention"].abs()
    rank = size.groupby([arcs["layer"], arcs["head"]]).rank(method="first", ascending=False)
    best = arcs.loc[rank.sort_values(kind="stable").index[:MAX_ARCS]]
    if n_tokens <= MAX_ARC_TOKENS:
        return best, list(range(n_tokens))
    positions: set[int] = set()
    n_drawn = 0
    for query, key in zip(best["query"].tolist(), best["prompt_position"].tolist(), strict=True):
        touched = positions | {query, key, max(0, key - 1)}  # the repeated token precedes the key
        if len(touched) > MAX_TOUCHED:
            break
        positions, n_drawn = touched, n_drawn + 1
    return best.iloc[:n_drawn], sorted(positions)


def _arcs_figure(data: dict[str, Any], title: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5, 0.17 * len(data["tokens"])), 3.2))
    _draw_arcs(figure.add_axes((0.02, 0.02, 0.96, 0.9)), data, title)
    return figure


def _draw_arcs(ax: "Axes", data: dict[str, Any], title: str) -> "Axes":
    from matplotlib.patches import Arc

    n = len(data["tokens"])
    for _, _, query, key, share, shifted in data["arcs"]:
        width, style = 0.3 + 3 * abs(share or 0.0), "--" if shifted else "-"
        color = NEGATIVE_COLOR if (share or 0.0) < 0 else POSITIVE_COLOR
        middle, span = (query + key) / 2, query - key
        ax.add_patch(Arc((middle, 0), span, span, theta1=0, theta2=180, linewidth=width, linestyle=style, color=color))
    for i, token in enumerate(data["tokens"]):
        gray = "black" if i >= data["n_prompt"] else "dimgrey"
        name = printable(label(token))[:14]
        ax.text(i, -0.6, name, rotation=90, ha="center", va="top", fontsize=6, color=gray, parse_math=False)
    sizes = [(f"{share:g}", 0.3 + 3 * share, "-") for share in (0.1, 0.5, 1.0)]
    if any(shifted for *_, shifted in data["arcs"]):
        sizes.append(("by the key shift", 1.0, "--"))
    for words, width, style in sizes:
        ax.plot([], [], color=POSITIVE_COLOR, label=words, linewidth=width, linestyle=style)
    ax.legend(title="share of attention", frameon=False, fontsize=6, title_fontsize=6, loc="upper left")  # no arc is there
    ax.set(xlim=(-1, n), ylim=(-n / 5, n / 2), title=printable(title))
    ax.axis("off")
    return ax


# Prompt, heads and text side by side: choosing a token or a head in one panel recolors the other two.
#
# All three panels show one quantity, the share of prompt token j, through head (l, h), in the attention output at text token i:
#
#     w[l, h, i, j] = <c, o> / (|o| sum over all heads of |o|)       c = A_ij v_j W_O,  o = z_i W_O of that head
#
# At one text token the shares of all heads and all positions, including those of the text, sum to 1. A panel only needs sums of
# w over one or two axes, so a page contains just three matrices.


MAX_LINKED_CELLS = 60_000
"""The most numbers in each of the three matrices; each takes about three bytes."""


@checked
def linked_view(data: LinkedShares, *, title: str = "prompt, heads and next token") -> Piece:
    """Draw the three panels and, below them, the most probable next tokens after a chosen text token.

    Works with the keyboard: arrow keys move within a panel, Enter chooses, Escape clears the choice.
    """
    whole = float(data.by_text.nansum(dim=(0, 1)).mean())
    said = (
        f"Shares of the prompt in the attention output; in total {percent(whole)}, averaged over the text's tokens; the rest "
        "comes from the text itself. Blue adds to the output, red subtracts from it; a marked corner is beyond the scale."
        if math.isfinite(whole)
        else "Shares of the prompt in the attention output."
    )
    said = f"{said} {part_note([*data.prompt, *data.text])}".strip()
    body = (
        f'<figure class="piece" data-kvlens="linked"><figcaption>{html_text(title)}</figcaption>'
        f'<p class="note">{html_text(said)}</p><div class="linked"></div>'
        f"{data_script(_json(data))}</figure>"
    )
    return Piece(title, body)


def _json(data: LinkedShares) -> dict[str, object]:
    """The data of the page. A long prompt is shown in blocks of neighbors, each with its mean per token."""
    n_layers, n_heads, n_prompt = data.by_prompt.shape
    n_text = min(len(data.text), max(16, MAX_LINKED_CELLS // (n_layers * n_heads)))
    limit = min(MAX_LINKED_CELLS // (n_layers * n_heads), MAX_LINKED_CELLS // n_text)
    per_block = block_size(data.between.shape[1], limit)
    size = per_block * data.block
    return {
        "n_layers": n_layers,
        "n_heads": n_heads,
        "n_prompt": n_prompt,
        "block": size,
        "blocks": token_blocks(data.prompt, size),
        "text": list(data.text[:n_text]),
        "by_prompt": quantized(block_means(data.by_prompt, size)),
        "by_text": quantized(data.by_text[..., :n_text]),
        "between": quantized(block_means(data.between[:n_text], per_block, per_column=data.block, n=n_prompt)),
        "next": {
            name: [[[token, rounded(p)] for token, p in row] for row in rows[:n_text]]
            for name, rows in data.next_tokens.items()
        },
        "colorings": {
            name: {**quantized(numbers), "without_zero": name in data.without_zero} for name, numbers in data.colorings.items()
        },
        "note": f"{len(data.text):,} tokens." + (f" The first {n_text} are shown." if n_text < len(data.text) else ""),
    }


def strongest_positions(
    pattern: Float[Tensor, "head query key"], queries: Int[Tensor, " query"], n_prompt: int, max_tokens: int
) -> tuple[Int[Tensor, " kept"], Int[Tensor, " left_out"]]:
    """Choose which of the ``key`` positions a square view of ``max_tokens`` rows shows.

    The last queries after the prompt are kept, up to half of the view; then the other positions that these attend to most,
    positions with known rows first.

    Args:
        pattern: the known rows.
        queries: the positions of these rows, ascending.
        n_prompt: number of positions of the prompt.
        max_tokens: rows and columns of the view.
    """
    n_keys = pattern.shape[-1]
    if n_keys <= max_tokens:
        return torch.arange(n_keys), torch.arange(0)
    of_text = (queries >= n_prompt).nonzero().squeeze(1)
    last = of_text[-max(max_tokens // 2, max_tokens - n_prompt) :]
    mass = pattern[:, last].abs().sum(dim=(0, 1))
    mass[queries] += mass.sum()  # positions with known rows come before those with empty rows
    mass[queries[last]] = torch.inf
    chosen = torch.zeros(n_keys, dtype=torch.bool)
    chosen[mass.topk(max_tokens).indices] = True
    return chosen.nonzero().squeeze(1), (~chosen).nonzero().squeeze(1)
