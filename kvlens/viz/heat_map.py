"""One number per head, as a map of layers and heads; clicking a head shows its attention."""

import functools
from typing import Any

import numpy as np
import pandas as pd

from kvlens.analyses import HeadDetails
from kvlens.arguments import numbers_of
from kvlens.checks import checked
from kvlens.viz._color import beyond, diverging_map, scale_of
from kvlens.viz._details import details_json
from kvlens.viz._head_maps import MAX_NUMBERED, column_choice, head_grid, head_map, maps_data
from kvlens.viz._text import data_script, html_text, number
from kvlens.viz.piece import Piece


@checked
def head_heatmap(
    table: Any, value: str | None = None, *, details: HeadDetails | None = None, title: str | None = None, ax: Any = None
) -> Piece | Any:
    """A map of layers (down) and heads (across).

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


def _table(values: Any, name: str) -> pd.DataFrame:
    """One row per head, from numbers [layer, head]."""
    numbers = numbers_of(values)
    n_layers, n_heads = numbers.shape
    layer, head = np.indices((n_layers, n_heads)).reshape(2, -1)
    return pd.DataFrame({"layer": layer, "head": head, name: numbers.flatten().numpy()})


def heat_figure(table: pd.DataFrame, value: str, name: str, *, without_zero: bool = False) -> Any:
    """The map of one column, drawn with matplotlib."""
    from matplotlib.figure import Figure

    n_layers, n_heads = head_grid(table, value).shape
    figure = Figure(figsize=(1.5 + 0.5 * min(n_heads, 24), 0.9 + 0.38 * min(n_layers, 48)))
    draw_heat_map(figure.add_subplot(), table, value, name, without_zero=without_zero)
    return figure


def draw_heat_map(ax: Any, table: pd.DataFrame, value: str, name: str, *, without_zero: bool = False) -> Any:
    """Draw the map into given axes, and return them."""
    grid = head_grid(table, value)
    low, top = scale_of(grid.to_numpy().flat, without_zero=without_zero)
    top = top if top > low else low + 1.0
    signed = not without_zero and bool((grid < 0).any(axis=None))
    lowest = -top if signed else low
    colors = diverging_map() if signed else _upper_half(diverging_map())
    image = ax.imshow(grid, cmap=colors, vmin=lowest, vmax=top, aspect="auto")
    ax.set(xlabel="head", ylabel="layer", title=name)
    ax.set_xticks(range(grid.shape[1]), [str(head) for head in grid.columns])
    ax.set_yticks(range(grid.shape[0]), [str(layer) for layer in grid.index])
    if grid.shape[1] <= MAX_NUMBERED:
        for (row, column), entry in np.ndenumerate(grid.to_numpy()):
            color = "white" if abs(entry - low) > 0.55 * (top - low) else "black"
            ax.text(column, row, number(entry), ha="center", va="center", fontsize=7, color=color)
    ax.figure.colorbar(image, ax=ax, label=value, extend=beyond(grid.to_numpy().flat, lowest, top))
    return ax


def _upper_half(colors: Any) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kvlens_positive", colors(np.linspace(0.5, 1, 128)))
