"""One number per head, as a map of layers (down) and heads (across); clicking a head shows its attention.

First the map that several pieces share, of which one column is shown at a time; then a page's data on every head, within size
limits; then :func:`head_heatmap`; then :func:`dual_view`, the steps of the heads' dual models and the demonstrations of one.
"""

import functools
import math
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.analyses import HeadDetails
from kvlens.arguments import numbers_of
from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.viz._figures import (
    FULL_COLOR,
    beyond,
    block_means,
    block_size,
    diverging_map,
    strongest,
    style,
    token_blocks,
)
from kvlens.viz._text import data_script, html_text, number, quantized, rounded
from kvlens.viz.page import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

MAX_NUMBERED = 24
"""Up to this many heads per layer, cells show their numbers."""
SMALLEST_POINTS, LARGEST_POINTS, TICK_POINTS = 3.5, 7.0, 10.0
"""Of a matplotlib map: the size of the numbers in cells, which stay away where they would be smaller, and between two ticks."""


def head_grid(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column as [layer, head]; NaN for missing rows."""
    grid = table.pivot(index="layer", columns="head", values=column)  # noqa: PD010, pivot_table would average and drop NaN
    return grid.astype("float64")


def column_choice(columns: Sequence[str]) -> str:
    """A selector of the column; plain text if there is only one column."""
    if len(columns) == 1:
        return f' <span class="unit">{html_text(columns[0])}</span>'
    options = "".join(f"<option>{html_text(column)}</option>" for column in columns)
    return f' <select aria-label="which column is shown">{options}</select>'


def head_map(table: pd.DataFrame, column: str, *, clickable: bool, without_zero: bool = False, title: str = "heads") -> str:
    """The map of one column; the page's script turns it into that of another (`maps_data`).

    Args:
        table: one row per head.
        column: the column that is shown.
        clickable: whether heads are buttons.
        without_zero: whether the column's 0 is not meaningful, as for logarithms: colored from lowest to highest value.
        title: label for screen readers.
    """
    grid = head_grid(table, column)
    low, top = scale_of(grid.to_numpy().flat, without_zero=without_zero)
    wide = grid.shape[1] > MAX_NUMBERED
    element = "button" if clickable else "span"
    heads = "".join(f'<th scope="col">{head}</th>' for head in grid.columns)
    rows = []
    for layer, row in grid.iterrows():
        cells = []
        for head, value in row.items():
            place = f"layer {layer}, head {head}: {column} {number(value)}"
            where = f'data-layer="{layer}" data-head="{head}" title="{html_text(place)}"'
            shown = "" if wide else number(value, max(abs(low), abs(top)))
            cells.append(f"<td><{element} {where} {strength_style(value, low, top)}>{shown}</{element}></td>")
        rows.append(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>')
    kind = f'class="heat{" wide" if wide else ""}" data-column="{html_text(column)}"'
    head = f"<thead><tr><th>layer \\ head</th>{heads}</tr></thead>"
    caption = _legend(low, top, column, signed=bool(low == 0 and (grid < 0).any(axis=None)))
    table_html = f"<table {kind}><caption>{caption}</caption>{head}<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="map of {html_text(title)}">{table_html}</div>'


def maps_data(table: pd.DataFrame, columns: Sequence[str], without_zero: Collection[str] = ()) -> dict[str, object]:
    """Return, by column where there are several, each head's value, in rows, and the values without and with full color."""
    return {column: _map_data(table, column, column in without_zero) for column in columns} if len(columns) > 1 else {}


def _map_data(table: pd.DataFrame, column: str, without_zero: bool) -> dict[str, object]:
    numbers = head_grid(table, column).to_numpy().flatten().tolist()
    low, top = scale_of(numbers, without_zero=without_zero)
    return {"values": [rounded(value) for value in numbers], "low": rounded(low), "top": rounded(top)}


def _legend(low: float, top: float, column: str, *, signed: bool) -> str:
    ramp = f'<span class="ramp{" signed" if signed else ""}" aria-hidden="true"></span>'
    most = max(abs(low), abs(top))
    ends = number(-top if signed else low, most), f"{number(top, most)} {column}"
    return f'<span class="legend"><span>{ends[0]}</span>{ramp}<span>{html_text(ends[1])}</span></span>'


MAX_PROMPT_COLUMNS, MAX_TEXT_COLUMNS = 256, 128
MAX_NUMBERS, MAX_SHARES = 270_000, 70_000
"""The most numbers in a page for all heads together, and the most shares among them."""
MIN_COLUMNS = 32
"""A pattern has these, even if it makes more numbers; what is more than `MAX_NUMBERS` is rounded to `LEVELS`."""
LEVELS = 63
"""The number of colors from none to full: more than are seen. Fewer numbers keep three digits."""


def details_json(details: HeadDetails) -> dict[str, object]:
    """The data of the page, within its size limits, and ``notes`` that say what was left out."""
    n_layers, n_heads = details.pattern.shape[:2]
    n_prompt, n_text, n_queries = len(details.prompt), len(details.text), len(details.queries)
    n_columns = details.pattern.shape[-1] - n_text
    of_share = block_size(n_prompt, MAX_SHARES // (n_layers * n_heads))
    shares = block_means(details.prompt_shares, of_share)
    a_head = max(MIN_COLUMNS, (MAX_NUMBERS - shares.numel()) // max(1, n_layers * n_heads * n_queries))
    of_text = block_size(n_text, min(MAX_TEXT_COLUMNS, 2 * a_head // 5))
    per_cell = block_size(n_columns, min(MAX_PROMPT_COLUMNS, a_head - math.ceil(n_text / of_text)))
    of_prompt = per_cell * details.block
    parts = details.pattern.split([n_columns, n_text], dim=-1)
    means = block_means(parts[0], per_cell, per_column=details.block, n=n_prompt), block_means(parts[1], of_text)
    cells = torch.cat(means, dim=-1)
    coarse = cells.numel() + shares.numel() > MAX_NUMBERS
    bias = details.bias_shares
    return {
        "n_prompt": n_prompt,
        "text": details.text,
        "queries": (details.queries - n_prompt).tolist(),
        "columns": {"prompt": token_blocks(details.prompt, of_prompt), "text": token_blocks(details.text, of_text)},
        "blocks": token_blocks(details.prompt, of_share),
        "pattern": _by_head(cells, coarse),
        "shares": _by_head(shares, coarse),
        "bias": None if bias is None else _by_head(bias, coarse),
        "whole": [[rounded(x) for x in heads] for heads in details.prompt_shares.sum(dim=-1).tolist()],
        "notes": [
            *_notes(details, n_queries, of_prompt, of_text, of_share),
            *([f"Values are rounded to 1/{LEVELS} of full color."] if coarse else []),
        ],
    }


def _by_head(values: Tensor, coarse: bool) -> list[list[dict[str, object]]]:
    """[layer][head]: the numbers of a head, to three digits of its largest or, if ``coarse``, what their common colors show."""
    if not coarse:
        return [[quantized(head) for head in layer] for layer in values]
    full = strongest(values.flatten().tolist(), FULL_COLOR)
    return [[quantized(head, full=full, levels=LEVELS) for head in layer] for layer in values]


def _notes(details: HeadDetails, n_queries: int, of_prompt: int, of_text: int, of_share: int) -> list[str]:
    notes = []
    if n_queries < len(details.text):
        notes.append(f"{n_queries} of the text's {len(details.text):,} queries are shown, evenly spaced.")
    if of_prompt > 1:
        notes.append(f"One column is the mean of {of_prompt} neighboring tokens of the prompt's {len(details.prompt):,}.")
    if of_text > 1:
        notes.append(f"One column is the mean of {of_text} neighboring tokens of the text's {len(details.text):,}.")
    if of_share > 1:
        notes.append(f"Shares are means over {of_share} neighboring prompt tokens; the text of long blocks is shortened.")
    return notes


@checked
def head_heatmap(
    table: pd.DataFrame | Float[Tensor, "layer head"] | np.ndarray,
    value: str | None = None,
    *,
    details: HeadDetails | None = None,
    title: str | None = None,
    ax: "Axes | None" = None,
) -> Piece | Any:
    """Draw a map of layers (down) and heads (across).

    Args:
        table: one row per head, with columns ``layer`` and ``head`` and numbers, as ``bias_by_head`` returns it (missing heads
            stay empty); or one number per head, a tensor or array [layer, head], as ``transformer_lens.patching`` returns it.
        value: the column that is shown first; the page can switch to others. ``b_kv_norm`` if None. For a tensor, the name of
            its numbers; "value" if None.
        details: the data shown when a head is clicked; None makes a map that cannot be clicked.
        title: title above the map.
        ax: draw the static picture into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.
    """
    if not isinstance(table, pd.DataFrame):
        value = value or "value"
        table = _table(table, value)
    value = value or "b_kv_norm"
    if ax is not None:
        return draw_heat_map(ax, table, value, title or "heads")
    others = [str(c) for c in table.columns if c not in ("layer", "head", value) and pd.api.types.is_numeric_dtype(table[c])]
    columns = [value, *others]
    name = title or "heads"
    data = {"maps": maps_data(table, columns), "details": None if details is None else details_json(details)}
    place = "" if details is None else '<div class="detail"></div>'
    body = (
        f'<figure class="piece" data-kvlens="heat-map"><figcaption>{html_text(name)}{column_choice(columns)}</figcaption>'
        f"{head_map(table, value, clickable=details is not None)}{place}{data_script(data)}</figure>"
    )
    return Piece(name, body, figure=functools.partial(heat_figure, table, value, name))


def _table(values: object, name: str) -> pd.DataFrame:
    """One row per head, from numbers [layer, head]."""
    numbers = numbers_of(values)
    n_layers, n_heads = numbers.shape
    layer, head = np.indices((n_layers, n_heads)).reshape(2, -1)
    return pd.DataFrame({"layer": layer, "head": head, name: numbers.flatten().numpy()})


def heat_figure(table: pd.DataFrame, value: str, name: str, *, without_zero: bool = False) -> "Figure":
    """The map of one column, drawn with matplotlib."""
    from matplotlib.figure import Figure

    n_layers, n_heads = head_grid(table, value).shape
    figure = Figure(figsize=(1.5 + 0.5 * min(n_heads, 24), 0.9 + 0.38 * min(n_layers, 48)))
    draw_heat_map(figure.add_subplot(), table, value, name, without_zero=without_zero)
    return figure


def draw_heat_map(ax: "Axes", table: pd.DataFrame, value: str, name: str, *, without_zero: bool = False) -> "Axes":
    """Draw the map into given axes, and return them."""
    grid = head_grid(table, value)
    values = grid.to_numpy()
    low, top = scale_of(values.flat, without_zero=without_zero)
    top = top if top > low else low + 1.0
    signed = not without_zero and bool((grid < 0).any(axis=None))
    lowest = -top if signed else low
    colors = diverging_map() if signed else _upper_half(diverging_map())
    image = ax.imshow(grid, cmap=colors, vmin=lowest, vmax=top, aspect="auto")
    ax.set(xlabel="head", ylabel="layer", title=name)
    ax.figure.colorbar(image, ax=ax, label=value, extend=beyond(values.flat, lowest, top))
    room = ax.get_window_extent()
    wide, high = (72 / ax.figure.dpi * side / n for side, n in zip((room.width, room.height), grid.shape[::-1], strict=True))
    for axis, names, side in ((ax.xaxis, grid.columns, wide), (ax.yaxis, grid.index, high)):
        every = math.ceil(TICK_POINTS / side)
        axis.set_ticks(range(0, len(names), every), [str(each) for each in names[::every]])
    texts = [number(entry, max(abs(low), abs(top))) for entry in values.flat]
    size = min(LARGEST_POINTS, wide / (0.6 * max(map(len, texts))), 0.8 * high)
    if grid.shape[1] <= MAX_NUMBERED and size >= SMALLEST_POINTS:
        for ((row, column), entry), text in zip(np.ndenumerate(values), texts, strict=True):
            color = "white" if abs(entry - low) > 0.55 * (top - low) else "black"
            ax.text(column, row, text, ha="center", va="center", fontsize=size, color=color)
    return ax


def _upper_half(colors: "Colormap") -> "Colormap":
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kvlens_positive", colors(np.linspace(0.5, 1, 128)))


FIGURES = ("log_loss_drop", "step_share", "demonstration_weight", "cosine_before", "cosine_after")
LOGARITHMS = ("log_loss_drop",)
OF_TOKENS = ("weight", "output_share", "log_step_norm", "cosine_before", "cosine_after")
MOST = 5
"""The number of demonstrations listed for each head by their contribution to the output, and again by that to the step."""
MAX_CELLS = 100_000
"""The most numbers in each of the two matrices; each takes about three bytes."""


@checked
def dual_view(
    losses: pd.DataFrame,
    demonstrations: pd.DataFrame,
    *,
    query: str = "the query",
    title: str = "steps of the dual models",
    ax: "Axes | None" = None,
) -> Piece | Any:
    """Draw a map of the heads' steps; choosing a head shows the contribution of each demonstration to its step and its output.

    Args:
        losses: the table of ``dual_losses``, for one prompt; each head's numbers are means over its queries.
        demonstrations: the table of ``dual_demonstrations``, for one query.
        query: that query's token.
        title: title above the map.
        ax: draw the map of the heads into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.

    Raises:
        KVLensError: a head with missing or duplicate demonstrations.
    """
    by_head = losses.groupby(["layer", "head"], as_index=False)[list(FIGURES)].mean()
    given = demonstrations.sort_values(["layer", "head", "prompt_position"], kind="stable")
    n = given["prompt_position"].nunique()
    if not (given.groupby(["layer", "head"]).size() == n).all() or len(given) != n * len(by_head):
        raise KVLensError(
            f"dual_view: expected one row for each of {len(by_head)} heads and {n} demonstrations, got {len(given)}; give the "
            "table of one query of the same prompt"
        )
    if ax is not None:
        return draw_heat_map(ax, by_head, FIGURES[0], title, without_zero=True)
    data = {"maps": maps_data(by_head, FIGURES, LOGARITHMS), **_json(given, by_head, n, query)}
    body = (
        f'<figure class="piece" data-kvlens="dual"><figcaption>{html_text(title)}{column_choice(FIGURES)}</figcaption>'
        f"{head_map(by_head, FIGURES[0], clickable=True, without_zero=FIGURES[0] in LOGARITHMS, title=title)}"
        f'<div class="detail"></div>{data_script(data)}</figure>'
    )
    return Piece(title, body, figure=functools.partial(heat_figure, by_head, FIGURES[0], title, without_zero=True))


def _json(given: pd.DataFrame, by_head: pd.DataFrame, n: int, query: str) -> dict[str, object]:
    """The data of the page. Long prompts are colored in blocks of neighbors, each with its mean per token."""
    numbers = {name: given[name].to_numpy().reshape(len(by_head), n) for name in OF_TOKENS}
    numbers["step"] = _shares(numbers["log_step_norm"])
    positions, tokens = given["prompt_position"].tolist()[:n], [str(token) for token in given["token"].tolist()[:n]]
    size = block_size(n, MAX_CELLS // len(by_head))
    heads: dict[int, dict[int, object]] = {}
    for i, row in enumerate(by_head.itertuples()):
        of_head = {name: values[i] for name, values in numbers.items()}
        heads.setdefault(int(row.layer), {})[int(row.head)] = {
            "step": quantized(block_means(torch.tensor(of_head["step"]), size)),
            "output": quantized(block_means(torch.tensor(of_head["output_share"]), size)),
            "whole": rounded(float(of_head["output_share"].sum())),
            "most": [_row(of_head, positions[j], tokens[j], j) for j in _most(of_head)],
        }
    return {"n": n, "query": query, "block": size, "blocks": token_blocks(tokens, size), "heads": heads}


def _shares(logs: np.ndarray) -> np.ndarray:
    """exp of each number, divided by the sum over its row."""
    largest = logs.max(axis=1, keepdims=True)
    sizes = np.exp(logs - np.where(np.isfinite(largest), largest, 0.0))
    total = sizes.sum(axis=1, keepdims=True)
    return sizes / np.where(total > 0, total, 1.0)


def _most(of_head: dict[str, np.ndarray]) -> list[int]:
    """The demonstrations that are listed: first those of the output, then those of the step."""
    strongest = [np.argsort(-np.abs(of_head[name]), kind="stable")[:MOST].tolist() for name in ("output_share", "step")]
    return list(dict.fromkeys([*strongest[0], *strongest[1]]))


def _row(of_head: dict[str, np.ndarray], position: int, token: str, j: int) -> list[object]:
    names = ("step", "output_share", "weight", "cosine_before", "cosine_after")
    return [position, token, *(rounded(float(of_head[name][j])) for name in names)]


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
