"""A tidy frame as a formatted table."""

import math
import numbers
from typing import Any

import pandas as pd

from kvlens.checks import Count, checked
from kvlens.viz._text import html_text, number
from kvlens.viz.piece import Piece

MAX_ROWS = 200


@checked
def error_table(frame: pd.DataFrame, *, title: str = "table", max_rows: Count = MAX_ROWS) -> Piece:
    """Show the first ``max_rows`` rows, with numbers to three digits, and the total number of rows.

    Args:
        frame: any tidy frame.
        title: title above the table.
        max_rows: number of rows to show.
    """
    more = f'<p class="note">The first {max_rows} of {len(frame):,} rows.</p>' if len(frame) > max_rows else ""
    body = (
        f'<figure class="piece"><figcaption>{html_text(title)}</figcaption><div class="scroll" tabindex="0" role="region" '
        f'aria-label="{html_text(title)}">{table_html(frame.head(max_rows))}</div>{more}</figure>'
    )
    return Piece(title, body)


def table_html(frame: pd.DataFrame) -> str:
    """All rows of a frame as an HTML table."""
    is_number = {column: pd.api.types.is_numeric_dtype(frame[column]) for column in frame.columns}
    head = "".join(f'<th scope="col"{_right(is_number[column])}>{html_text(str(column))}</th>' for column in frame.columns)
    rows = "".join(
        "<tr>" + "".join(_cell(x, is_number[column]) for column, x in zip(frame.columns, row, strict=True)) + "</tr>"
        for row in frame.itertuples(index=False)
    )
    return f'<table class="plain"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>'


def _cell(value: Any, right: bool) -> str:
    """A number that is shown with fewer digits than it has carries them all as its title, which copying and CSV files take."""
    digits = ""
    if isinstance(value, numbers.Integral):
        shown = str(value)  # bool too
    elif isinstance(value, numbers.Real):
        shown = number(float(value))
        digits = f' title="{float(value)!r}"' if math.isfinite(value) and shown != repr(float(value)) else ""
    else:
        shown = "–" if pd.isna(value) else html_text(str(value))
    return f"<td{_right(right)}{digits}>{shown}</td>"


def _right(right: bool) -> str:
    return ' class="right"' if right else ""
