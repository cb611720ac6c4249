"""The look of figures: colors and lines, curves of several models with several seeds, and panels of them."""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlens.papers.harness.learned import mean_course

PALETTE = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can tell apart (Okabe and Ito 2008), without their yellow, which is too light for a line."""
PLAIN_COLOR, SHIFTED_COLOR = PALETTE[:2]
"""Colors of models without and with KV shift, in every figure."""
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("-", "--", ":")


def line_style(number: int) -> dict[str, Any]:
    """Color, marker and kind of line of the ``number``-th line of a figure: no two alike among the first 21."""
    return dict(
        color=PALETTE[number % len(PALETTE)],
        linestyle=DASHES[number // len(PALETTE) % len(DASHES)],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4.5,
    )


def draw_curves(
    axes: Axes,
    table: pd.DataFrame,
    x: str = "step",
    y: str = "accuracy",
    *,
    by: str = "model",
    colors: Mapping[str, str] | None = None,
    dots: bool = False,
) -> None:
    """One color per model: a line through the mean over seeds, and a thin one for each seed.

    Args:
        axes: to draw into; labels, title and legend are left to the caller.
        table: columns ``by``, ``x`` and ``y``; ``seed`` where there are several runs, one row for each triple of model, seed
            and x (so: of one split); ``low`` and ``high`` where values have an interval.
        x, y: columns.
        by: the column whose values are the lines, labelled in the order of the table.
        colors: by label; the others take `PALETTE` in turn, with another kind of line after each round. Every label has a
            marker of its own.
        dots: a dot for each row instead of lines.
    """
    for number, label in enumerate(table[by].unique()):
        rows, look = table[table[by] == label].sort_values(x, kind="stable"), line_style(number)
        look |= {"color": (colors or {}).get(label, look["color"]), "label": str(label)}
        if dots:
            axes.plot(rows[x], rows[y], **look | {"linestyle": "none", "alpha": 0.6})
            continue
        if "seed" in rows:
            for _, run in rows.groupby("seed"):
                axes.plot(run[x], run[y], color=look["color"], alpha=0.35, linewidth=0.7, label="_seed")
        if "low" in rows:
            axes.fill_between(rows[x], rows["low"], rows["high"], color=look["color"], alpha=0.15, linewidth=0)
        course = mean_course(rows if "seed" in rows else rows.assign(seed=0), x, y)
        axes.plot(course[x], course["mean"], linewidth=1.8, markevery=max(1, len(course) // 8), **look)
    finish(axes)


def finish(axes: Axes) -> None:
    """The look of a panel with everything drawn: a light grid, no frame above and on the right."""
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def draw_panels(
    table: pd.DataFrame,
    x: str,
    y: str = "accuracy",
    *,
    by: str = "model",
    panel: str | None = None,
    title: str = "",
    xlabel: str = "",
    ylabel: str = "",
    colors: Mapping[str, str] | None = None,
    lines: Mapping[str, float] | None = None,
    log: str = "",
    ticks: bool = False,
    dots: bool = False,
) -> Figure:
    """``y`` against ``x`` as `draw_curves` draws it, with one legend, and the largest ``chance`` as a line.

    Args:
        table: one row for each line, seed and ``x`` of a panel.
        x, y: columns.
        by: the column whose values are the lines.
        panel: the column whose values are the panels; None: one panel.
        title: of the figure.
        xlabel, ylabel: of the axes; by default the columns' names.
        colors, dots: as in `draw_curves`.
        lines: what horizontal lines mark, and where they are.
        log: the logarithmic axes: "x", "y" or "xy".
        ticks: whether each value of ``x`` has its tick.
    """
    groups = (
        [("", table)] if panel is None else [(f"{panel}: {value}", rows) for value, rows in table.groupby(panel, sort=False)]
    )
    n_columns = min(len(groups), 5)
    shape = (-(-len(groups) // n_columns), n_columns)
    figure = Figure(figsize=(7.4 if len(groups) == 1 else 4.4 * shape[1], 4.6 * shape[0]), layout="constrained")
    panels = figure.subplots(*shape, sharey=True, squeeze=False).flatten()
    for axes in panels[len(groups) :]:
        axes.remove()
    for axes, (name, rows) in zip(panels, groups, strict=False):
        axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
        draw_curves(axes, rows, x, y, by=by, colors=colors, dots=dots)
        marked = {**(lines or {}), **({"chance": rows["chance"].max()} if "chance" in rows else {})}
        for dash, (label, value) in zip(("--", ":"), marked.items(), strict=False):
            axes.axhline(value, color="#64748b", linestyle=dash, linewidth=1, label=label)
        if ticks:
            values = sorted(set(rows[x].tolist()))
            axes.set_xticks(values, [str(value) for value in values])
            axes.minorticks_off()
        if y == "accuracy":
            axes.set_ylim(-0.02, 1.04)
        axes.set_xlabel(xlabel or x.replace("_", " "))
        axes.set_title(name.replace("_", " "), loc="left", fontsize=10)
    for first in panels[: len(groups) : n_columns]:
        first.set_ylabel(ylabel or y.replace("_", " "))
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    handles = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    fitting = int(13 * figure.get_figwidth() / (6 + max(map(len, handles))))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        frameon=False,
        fontsize=9,
        ncols=min(4, max(1, fitting)),
        title="thick: mean over seeds; thin: each seed" if "seed" in table and not dots else None,
        title_fontsize=8,
    )
    return figure
