"""A tidy frame as a formatted table, and as bars: one group per layer (or other grouping column), one bar per part."""

import functools
import math
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvlens.checks import Count, checked
from kvlens.viz._figures import NEGATIVE_COLOR, POSITIVE_COLOR, strongest
from kvlens.viz._text import html_text, number
from kvlens.viz.page import Piece

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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


def _cell(value: object, right: bool) -> str:
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


@checked
def contribution_bars(
    table: pd.DataFrame,
    value: str,
    *,
    by: str = "layer",
    part: str | None = None,
    title: str = "contributions",
    ax: "Axes | None" = None,
) -> Piece | Any:
    """Draw horizontal bars from zero, blue to the right and red to the left.

    Args:
        table: tidy: one row per group and part.
        value: the column of the bars' lengths.
        by: the column that groups them.
        part: the column that names the bars of a group, such as ``component``; None draws one bar per group.
        title: title above the bars.
        ax: draw the static picture into these matplotlib axes instead, and return them.

    Returns:
        A `Piece`; ``ax`` where it was given.
    """
    names = [_name(row, by, part) for row in table[[by, *([] if part is None else [part])]].itertuples(index=False)]
    numbers = [float(x) for x in table[value]]
    if ax is not None:
        return _draw(ax, names, numbers, value, title)
    top = strongest(numbers)
    left = max(0.0, -min((x for x in numbers if x == x), default=0.0)) / top if top else 0.0
    zero = 100 * left / (1 + left) if any(x > 0 for x in numbers) or not left else 100.0
    rows = "".join(_bar(name, x, top, zero) for name, x in zip(names, numbers, strict=True))
    body = (
        f'<figure class="piece"><figcaption>{html_text(title)} <span class="unit">{html_text(value)}</span></figcaption>'
        f'<table class="bars"><tbody>{rows}</tbody></table></figure>'
    )
    return Piece(title, body, figure=functools.partial(_figure, names, numbers, value, title))


def _name(row: Sequence[object], by: str, part: str | None) -> str:
    group = f"{by} {row[0]}" if isinstance(row[0], int) else str(row[0])
    return group if part is None else f"{group}, {row[1]}"


def _bar(name: str, value: float, top: float, zero: float) -> str:
    """One bar; ``zero`` is the position of zero, in percent of the width, and the longest bar reaches an edge."""
    width = abs(value) / top * (max(zero, 100 - zero) if top else 0) if top and value == value else 0.0
    start = max(0.0, zero - width) if value < 0 else zero
    kind = "negative" if value < 0 else "positive"
    bar = f'<div class="bar {kind}" style="left:{start:.2f}%;width:{width:.2f}%"></div>'
    return (
        f'<tr><th scope="row">{html_text(name)}</th><td><div class="track">{bar}</div></td><td>{number(value, top)}</td></tr>'
    )


def _figure(names: list[str], numbers: list[float], value: str, title: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 0.8 + 0.24 * len(names)))
    _draw(figure.add_subplot(), names, numbers, value, title)
    return figure


def _draw(ax: "Axes", names: list[str], numbers: list[float], value: str, title: str) -> "Axes":
    ax.barh(range(len(names)), numbers, color=[NEGATIVE_COLOR if x < 0 else POSITIVE_COLOR for x in numbers])
    ax.set_yticks(range(len(names)), names, fontsize=8, parse_math=False)
    ax.invert_yaxis()
    ax.axvline(0, color="black", linewidth=0.8)
    ax.set(xlabel=value, title=title)
    ax.spines[["top", "right"]].set_visible(False)
    return ax
