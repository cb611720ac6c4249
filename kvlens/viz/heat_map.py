"""One number a head, as a map of layers and heads; a click on a head opens what it attends to."""

import functools
from typing import Any

import numpy as np
import pandas as pd
import torch

from analyses import HeadDetails
from kvlens.errors import KVLensError
from kvlens.viz._colour import diverging_map, strongest, style
from kvlens.viz._details import details_json
from kvlens.viz._frames import check_columns, check_numbers
from kvlens.viz._text import html_text, number, script_json
from kvlens.viz.piece import Piece

MAX_NUMBERED = 24
"""Up to so many heads a layer, a cell has room for its number."""


def head_heatmap(
    table: Any, value: str | None = None, *, details: HeadDetails | None = None, title: str | None = None
) -> Piece:
    """A map of layers (downwards) and heads (across).

    Args:
        table: one row a head, with columns ``layer`` and ``head`` and numbers, as ``bias_by_head`` returns it (a head that is
            missing stays empty); or one number a head, a tensor or array [layer, head], as ``transformer_lens.patching``
            returns it.
        value: the column that is shown first, of which the reader of the page can choose another; ``b_kv_norm`` if None. For a
            tensor, what its numbers are called; "value" if None.
        details: what a click on a head shows; None makes a map without clicking.
        title: above the map.

    Raises:
        KVLensError: a missing column (the nearest is proposed), no rows, two rows for one head, a column without numbers.
    """
    if not isinstance(table, pd.DataFrame):
        value = value or "value"
        table = _table(table, value)
    value = value or "b_kv_norm"
    check_columns("head_heatmap", table, ("layer", "head", value))
    check_numbers("head_heatmap", table, value)
    if table.duplicated(["layer", "head"]).any():
        twice = table.loc[table.duplicated(["layer", "head"]), ["layer", "head"]].iloc[0]
        raise KVLensError(
            f"head_heatmap: layer {twice['layer']}, head {twice['head']} has two rows; give one row a head "
            "(filter one prompt, or average over prompts, first)"
        )
    others = [str(c) for c in table.columns if c not in ("layer", "head", value) and pd.api.types.is_numeric_dtype(table[c])]
    columns = [value, *others]
    maps = "".join(_map(table, column, clickable=details is not None, hidden=column != value) for column in columns)
    name = title or "heads"
    clickable = f'<div class="detail"></div>{_data(details)}' if details is not None else ""
    body = (
        f'<figure class="piece" data-kvlens="heat-map"><figcaption>{html_text(name)}{_choice(columns)}</figcaption>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="map of heads">{maps}</div>{clickable}</figure>'
    )
    return Piece(name, body, figure=functools.partial(_figure, table, value, name))


def _table(values: Any, name: str) -> pd.DataFrame:
    """One row a head, from numbers [layer, head]."""
    try:
        numbers = torch.as_tensor(values).detach().double().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise KVLensError(f"head_heatmap: expected a table, or numbers [layer, head], got {type(values).__name__}") from error
    if numbers.dim() != 2 or not numbers.numel():
        raise KVLensError(f"head_heatmap: expected numbers [layer, head], got shape {list(numbers.shape)}")
    layer, head = np.indices(tuple(numbers.shape)).reshape(2, -1)
    return pd.DataFrame({"layer": layer, "head": head, name: numbers.flatten().numpy()})


def _choice(columns: list[str]) -> str:
    """A selector of the column; plain text where there is one column only."""
    if len(columns) == 1:
        return f' <span class="unit">{html_text(columns[0])}</span>'
    options = "".join(f"<option>{html_text(column)}</option>" for column in columns)
    return f' <select aria-label="which column is shown">{options}</select>'


def _map(table: pd.DataFrame, column: str, *, clickable: bool, hidden: bool) -> str:
    grid = _grid(table, column)
    top = strongest(grid.to_numpy().flat)
    wide = grid.shape[1] > MAX_NUMBERED
    element = "button" if clickable else "span"
    heads = "".join(f'<th scope="col">{head}</th>' for head in grid.columns)
    rows = []
    for layer, row in grid.iterrows():
        cells = []
        for head, value in row.items():
            place = f"layer {layer}, head {head}: {column} {number(value)}"
            where = f'data-layer="{layer}" data-head="{head}" title="{html_text(place)}"'
            shown = "" if wide else number(value)
            cells.append(f"<td><{element} {where} {style(value, top)}>{shown}</{element}></td>")
        rows.append(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>')
    kind = f'class="heat{" wide" if wide else ""}" data-column="{html_text(column)}"{" hidden" if hidden else ""}'
    head = f"<thead><tr><th>layer \\ head</th>{heads}</tr></thead>"
    return f"<table {kind}><caption>{_legend(grid, top, column)}</caption>{head}<tbody>{''.join(rows)}</tbody></table>"


def _legend(grid: pd.DataFrame, top: float, column: str) -> str:
    negative = bool((grid < 0).any(axis=None))
    ramp = f'<span class="ramp{" signed" if negative else ""}" aria-hidden="true"></span>'
    ends = number(-top) if negative else "0", f"{number(top)} {column}"
    return f'<span class="legend"><span>{ends[0]}</span>{ramp}<span>{html_text(ends[1])}</span></span>'


def _data(details: HeadDetails) -> str:
    return f'<script type="application/json">{script_json(details_json(details))}</script>'


def _grid(table: pd.DataFrame, column: str) -> pd.DataFrame:
    grid = table.pivot(index="layer", columns="head", values=column)  # noqa: PD010, pivot_table would average and drop NaN
    return grid.astype("float64")


def _figure(table: pd.DataFrame, value: str, name: str) -> Any:
    from matplotlib.figure import Figure

    grid = _grid(table, value)
    top = strongest(grid.to_numpy().flat) or 1.0
    figure = Figure(figsize=(1.5 + 0.5 * min(grid.shape[1], 24), 0.9 + 0.38 * min(grid.shape[0], 48)))
    ax = figure.add_subplot()
    lowest = -top if bool((grid < 0).any(axis=None)) else 0.0
    colours = diverging_map() if lowest < 0 else _upper_half(diverging_map())
    image = ax.imshow(grid, cmap=colours, vmin=lowest, vmax=top, aspect="auto")
    ax.set(xlabel="head", ylabel="layer", title=name)
    ax.set_xticks(range(grid.shape[1]), [str(head) for head in grid.columns])
    ax.set_yticks(range(grid.shape[0]), [str(layer) for layer in grid.index])
    if grid.shape[1] <= MAX_NUMBERED:
        for (row, column), entry in np.ndenumerate(grid.to_numpy()):
            colour = "white" if abs(entry) > 0.55 * top else "black"
            ax.text(column, row, number(entry), ha="center", va="center", fontsize=7, color=colour)
    figure.colorbar(image, ax=ax, label=value)
    return figure


def _upper_half(colours: Any) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("kvlens_positive", colours(np.linspace(0.5, 1, 128)))
