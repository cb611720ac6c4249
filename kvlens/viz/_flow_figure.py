"""The static picture of a flow, from the same data as the page's: the unit, its positions and heads, and the answer."""

import functools
import textwrap
from typing import Any

from kvlens.viz._axes import check_ax
from kvlens.viz._color import NEGATIVE, POSITIVE
from kvlens.viz._text import label, number, percent, printable, running

LEAST = 0.32**2
"""Lines below this share of the strongest are left out, as in the page before its slider is moved (``static/flow.js``)."""
THICKEST = 9.0
"""Width in points of a line as strong as the unit's total effect."""
COLUMNS = (0.0, 0.37, 0.6, 0.83)
WIDTHS = (0.27, 0.15, 0.13, 0.17)
ROW, BOX = 1.0, 0.72
"""Distance of two boxes of a column, and their height."""


def edges(data: dict[str, Any], measure: str) -> list[tuple[str, str, float]]:
    """Both ends and the strength, in nats, of every line; a part is "p38" for a position, "h0.2" for a head."""
    states, positions, heads = data["states"], data["positions"], data["heads"]
    pairs = [("unit", f"p{p}", p, "") for p in positions] + [(f"p{p}", f"h{h}", p, h) for p in positions for h in heads]
    found = []
    for start, end, position, head in [*pairs, *((f"h{h}", "answer", "", h) for h in heads)]:
        effect = states[f"{head}|{position}|{int(bool(position and head))}|{int(measure == 'alone')}"][0]
        found.append((start, end, total_effect(data) - effect if measure == "alone" else effect))
    strongest = max((abs(value) for *_, value in found), default=0.0)
    return [edge for edge in found if abs(edge[2]) >= LEAST * strongest]


def total_effect(data: dict[str, Any]) -> float:
    """How much the answer's log-probability falls without the units, in nats."""
    return data["states"]["||0|1"][0]


def figure(data: dict[str, Any], measure: str, title: str) -> Any:
    """A new figure with the picture."""
    from matplotlib.figure import Figure

    rows = max(map(len, _columns(edges(data, measure))))
    made = Figure(figsize=(9.5, 0.55 * rows + 1.7))
    draw(made.add_axes((0.02, 0.02, 0.96, 0.86)), data, measure, title)
    return made


def draw(ax: Any, data: dict[str, Any], measure: str, title: str) -> Any:
    """The picture, in ``ax``, which is returned."""
    check_ax("flow_view: ax", ax)
    lines, total, columns = edges(data, measure), total_effect(data), _columns(edges(data, measure))
    n_rows = max(map(len, columns))
    boxes = {
        part: (x, (n_rows - len(column)) * ROW / 2 + i * ROW + ROW / 2, width)
        for column, x, width in zip(columns, COLUMNS, WIDTHS, strict=True)
        for i, part in enumerate(column)
    }
    values = {start if end == "answer" else end: value for start, end, value in lines if start == "unit" or end == "answer"}
    curve = functools.partial(_curve, ax, total=total)
    for start, end, value in lines:
        curve((boxes[start][0] + boxes[start][2], boxes[start][1]), (boxes[end][0], boxes[end][1]), value)
    for part, (x, y, width) in boxes.items():
        _box(ax, x, y, width, _words(part, data, total, values.get(part)))
    for x, words in zip(COLUMNS, data["columns"], strict=True):
        ax.text(x, -0.12, words, fontsize=8, color="dimgrey", va="bottom")
    what = "of this part alone" if measure == "alone" else "of exchanging this part"
    said = f"numbers: effect {what}, nats, positive: it raises log p; in total {number(total)} nats; dashed: negative"
    ax.text(0, n_rows * ROW + 0.1, said, fontsize=7, color="dimgrey", va="top")
    ax.set(xlim=(-0.01, 1.01), ylim=(n_rows * ROW + 0.4, -0.5))
    ax.set_title(printable(title), loc="left", fontsize=10, parse_math=False)
    ax.axis("off")
    return ax


def _columns(lines: list[tuple[str, str, float]]) -> list[list[str]]:
    parts = [*dict.fromkeys(part for start, end, _ in lines for part in (start, end))]
    return [["unit"], *([part for part in parts if part[0] == kind] for kind in "ph"), ["answer"]]


def _words(part: str, data: dict[str, Any], total: float, value: float | None) -> list[str]:
    """The lines of a box."""
    if part == "unit":
        text = printable(running(data["cause"]))
        return [*textwrap.wrap(text, 30, max_lines=2, placeholder=" …"), number(total)]
    if part == "answer":
        named = zip((data["answer"], data["rival"]), data["states"]["||0|0"][1:3], strict=True)
        return [f"{printable(running(name.strip() or name))[:12]} {percent(p)}" for name, p in named]
    shown = number(value) if value is not None else "–"
    if part[0] == "h":
        return [data["heads"][part[1:]], shown]
    token = data["positions"][part[1:]]
    if token is None:
        return ["shift state", shown]
    return [printable(running(token.strip()) if token.strip() else label(token))[:14], f"{shown} at {part[1:]}"]


def _box(ax: Any, x: float, y: float, width: float, words: list[str]) -> None:
    from matplotlib.patches import Rectangle

    look: dict[str, Any] = dict(facecolor="white", edgecolor="dimgrey", linewidth=0.8, zorder=2)
    ax.add_patch(Rectangle((x, y - BOX / 2), width, BOX, **look))
    look = dict(fontsize=7, va="center", linespacing=1.25, parse_math=False, zorder=3, clip_on=True)
    ax.text(x + 0.008, y, "\n".join(words), **look)


def _curve(ax: Any, start: tuple[float, float], end: tuple[float, float], value: float, *, total: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    middle = (start[0] + end[0]) / 2
    path = Path([start, (middle, start[1]), (middle, end[1]), end], [Path.MOVETO, Path.CURVE4, Path.CURVE4, Path.CURVE4])
    width = max(0.6, THICKEST * min(1.0, abs(value) / max(abs(total), 1e-12)))
    style, color = ("--", NEGATIVE) if value < 0 else ("-", POSITIVE)
    look: dict[str, Any] = dict(facecolor="none", edgecolor=color, linewidth=width, linestyle=style, alpha=0.55, zorder=1)
    ax.add_patch(PathPatch(path, **look))
