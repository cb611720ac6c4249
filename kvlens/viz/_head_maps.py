"""The table of layers (down) and heads (across) that several pieces share; one of its columns is shown at a time."""

from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from kvlens.viz._color import scale_of, strength_style
from kvlens.viz._text import html_text, number, rounded

MAX_NUMBERED = 24
"""Up to this many heads per layer, cells show their numbers."""


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
            shown = "" if wide else number(value)
            cells.append(f"<td><{element} {where} {strength_style(value, low, top)}>{shown}</{element}></td>")
        rows.append(f'<tr><th scope="row">{layer}</th>{"".join(cells)}</tr>')
    kind = f'class="heat{" wide" if wide else ""}" data-column="{html_text(column)}"'
    head = f"<thead><tr><th>layer \\ head</th>{heads}</tr></thead>"
    caption = _legend(low, top, column, signed=bool(low == 0 and (grid < 0).any(axis=None)))
    table_html = f"<table {kind}><caption>{caption}</caption>{head}<tbody>{''.join(rows)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="map of {html_text(title)}">{table_html}</div>'


def maps_data(table: pd.DataFrame, columns: Sequence[str], without_zero: Collection[str] = ()) -> dict[str, Any]:
    """Where there are several columns, by column: each head's value, in rows, and the values without and with full color."""
    return {column: _map_data(table, column, column in without_zero) for column in columns} if len(columns) > 1 else {}


def _map_data(table: pd.DataFrame, column: str, without_zero: bool) -> dict[str, Any]:
    numbers = head_grid(table, column).to_numpy().flatten().tolist()
    low, top = scale_of(numbers, without_zero=without_zero)
    return {"values": [rounded(value) for value in numbers], "low": rounded(low), "top": rounded(top)}


def _legend(low: float, top: float, column: str, *, signed: bool) -> str:
    ramp = f'<span class="ramp{" signed" if signed else ""}" aria-hidden="true"></span>'
    ends = number(-top if signed else low), f"{number(top)} {column}"
    return f'<span class="legend"><span>{ends[0]}</span>{ramp}<span>{html_text(ends[1])}</span></span>'
