"""The look of figures: colors and lines, curves of several models with several seeds, and panels of them."""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlens.papers.harness.learned import mean_course

PALETTE = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can tell apart (Okabe and Ito 2008), without their yellow, which is too light for a line."""
PLAIN, SHIFTED = PALETTE[:2]
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
    **line: Any,
) -> None:
    """One color per model: a line through the mean over seeds, and a thin one for each seed.

    Args:
        axes: to draw into; labels, title and legend are left to the caller.
        table: columns ``by``, ``seed``, ``x`` and ``y``, one row for each triple of model, seed and x (so: of one split).
        x, y: columns.
        by: the column whose values are the lines, labelled in the order of the table.
        colors: by label; the others take `PALETTE` in turn, with another kind of line after each round. Every label has a
            marker of its own.
        **line: matplotlib's properties of the lines.
    """
    labels = table[by].unique()
    for number, label in enumerate(labels):
        rows, look = table[table[by] == label], line_style(number)
        course = mean_course(rows, x, y)
        look |= {"color": (colors or {}).get(label, look["color"]), "markevery": max(1, len(course) // 8)}
        for _, run in rows.sort_values(x, kind="stable").groupby("seed"):
            axes.plot(run[x], run[y], color=look["color"], alpha=0.35, linewidth=0.7, label="_seed")
        axes.plot(course[x], course["mean"], **{"linewidth": 1.8, "label": str(label), **look, **line})
    finish(axes)


def finish(axes: Axes, title: str = "", *, ncols: int = 0, below: float = 0.13, **legend: Any) -> None:
    """The look of a panel: a light grid, no frame above and on the right, its title, and with ``ncols`` a legend under it.

    Args:
        axes: with everything drawn.
        title: above the panel, on the left.
        ncols: columns of the legend; 0 for none.
        below: the legend's distance from the panel, in heights of it.
        **legend: matplotlib's properties of the legend.
    """
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    if ncols:
        look = dict(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -below), ncols=ncols)
        axes.legend(**{**look, **legend})


def draw_panels(
    table: pd.DataFrame,
    x: str,
    y: str = "accuracy",
    *,
    xlabel: str,
    ylabel: str,
    colors: Mapping[str, str],
    title: str | Callable[[pd.DataFrame], str],
    by: str | None = None,
    ticks: bool = False,
    log2: bool = False,
) -> Figure:
    """``y`` against ``x``: mean over seeds, a thin line for each seed, and a line for guessing (column ``chance``).

    Args:
        table: columns model, seed, ``x``, ``y``, ``by``; one row for each model, seed and ``x`` of a panel.
        x, y: columns.
        xlabel, ylabel: of the axes.
        colors: by model.
        title: of a panel; or a function of its rows.
        by: the column whose values are the panels; None: one panel.
        ticks: whether each value of ``x`` has its tick and marker.
        log2: whether the axis of ``x`` is logarithmic, with base 2.
    """
    groups = [table] if by is None else [rows for _, rows in table.groupby(by, sort=False)]
    figure = Figure(figsize=(7.4 if len(groups) == 1 else 4.4 * len(groups), 4.6), layout="constrained")
    for axes, rows in zip(figure.subplots(1, len(groups), sharey=True, squeeze=False)[0], groups, strict=True):
        marker: dict[str, Any] = dict(markevery=1) if ticks else {}
        draw_curves(axes, rows, x, y, colors=colors, **marker)
        if "chance" in rows:
            axes.axhline(rows["chance"].iloc[0], color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, label="chance")
        if log2:
            axes.set_xscale("log", base=2)
        if ticks:
            values = sorted(set(rows[x].tolist()))
            axes.set_xticks(values, [str(value) for value in values])
        axes.set_title(title if isinstance(title, str) else title(rows), loc="left", fontsize=11)
        axes.set(xlabel=xlabel, ylim=(-0.02, 1.04))
    figure.axes[0].set_ylabel(ylabel)
    words: dict[str, Any] = dict(
        title="thick: mean over seeds; thin: each seed", title_fontsize=8, frameon=False, fontsize=9, ncols=4
    )
    lines = {label: line for axes in figure.axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(list(lines.values()), list(lines), loc="outside lower center", **words)
    return figure
