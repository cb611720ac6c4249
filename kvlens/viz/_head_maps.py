"""The table of layers (down) and heads (across) that several pieces share: one map per column, one of them shown."""

from collections.abc import Collection, Sequence

import pandas as pd

from kvlens.errors import KVLensError
from kvlens.viz._color import scale_of, strength_style
from kvlens.viz._frames import check_columns, check_numbers
from kvlens.viz._text import html_text, number

MAX_NUMBERED = 24
"""Up to this many heads per layer, cells show their numbers."""


def check_heads(piece: str, table: pd.DataFrame, value: str) -> None:
    """Raise KVLensError unless ``table`` has one row per head and numbers in column ``value``."""
    check_columns(piece, table, ("layer", "head", value))
    check_numbers(piece, table, value)
    if table.duplicated(["layer", "head"]).any():
        twice = table.loc[table.duplicated(["layer", "head"]), ["layer", "head"]].iloc[0]
        raise KVLensError(
            f"{piece}: layer {twice['layer']}, head {twice['head']} has two rows; give one row per head "
            "(filter one prompt, or average over prompts, first)"
        )


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


def head_maps(
    table: pd.DataFrame, columns: Sequence[str], *, clickable: bool, without_zero: Collection[str] = (), title: str = "heads"
) -> str:
    """One map per column, with the first one shown; heads are buttons if ``clickable``.

    Args:
        table: one row per head.
        columns: the columns that can be shown.
        clickable: whether heads are buttons.
        without_zero: columns whose 0 is not meaningful, such as logarithms: colored from lowest to highest value.
        title: label for screen readers.
    """
    maps = "".join(
        _map(table, column, clickable=clickable, hidden=i > 0, without_zero=column in without_zero)
        for i, column in enumerate(columns)
    )
    return f'<div class="scroll" tabindex="0" role="region" aria-label="map of {html_text(title)}">{maps}</div>'


def _map(table: pd.DataFrame, column: str, *, clickable: bool, hidden: bool, without_zero: bool) -> str:
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
    kind = f'class="heat{" wide" if wide else ""}" data-column="{html_text(column)}"{" hidden" if hidden else ""}'
    head = f"<thead><tr><th>layer \\ head</th>{heads}</tr></thead>"
    caption = _legend(low, top, column, signed=bool(low == 0 and (grid < 0).any(axis=None)))
    return f"<table {kind}><caption>{caption}</caption>{head}<tbody>{''.join(rows)}</tbody></table>"


def _legend(low: float, top: float, column: str, *, signed: bool) -> str:
    ramp = f'<span class="ramp{" signed" if signed else ""}" aria-hidden="true"></span>'
    ends = number(-top if signed else low), f"{number(top)} {column}"
    return f'<span class="legend"><span>{ends[0]}</span>{ramp}<span>{html_text(ends[1])}</span></span>'
