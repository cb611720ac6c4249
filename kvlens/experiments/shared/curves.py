"""Learning curves: several models trained on one task with several seeds, as one tidy table, and a plot of it.

The table has one row per measurement: ``model``, ``seed``, ``n_parameters``, ``step``, ``split``, ``loss``, ``accuracy``. A
seed determines both the initial weights and the batches, so runs of the same seed differ only in the model. A run that stopped
early (``stop_at_accuracy``) has fewer rows; in averages over seeds, it keeps its last value. Two models are compared seed by
seed; whether the differences are significant is tested by :data:`kvlens.experiments.shared.significance.SIGNIFICANCE`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

PALETTE = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can tell apart (Okabe and Ito 2008), without their yellow, which is too light for a line."""
PLAIN, SHIFTED = PALETTE[:2]
"""Colors of models without and with KV shift, in every figure."""
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("-", "--", ":")


def of_heldout(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the held-out split."""
    return table[table["split"] == "heldout"].reset_index(drop=True)


def last_heldout(table: pd.DataFrame, by: Iterable[str] = ("model", "seed")) -> pd.DataFrame:
    """The last held-out row of every run, in the order of the table; ``by`` names the columns that identify a run."""
    return of_heldout(table).groupby(list(by), sort=False).tail(1).reset_index(drop=True)


def steps_to(table: pd.DataFrame, accuracy: float, by: Iterable[str] = ("model", "seed")) -> pd.DataFrame:
    """The first evaluation of every run at which its held-out accuracy is at least ``accuracy``.

    Returns:
        One row per run: the columns of ``by``, and ``steps``, infinite if the run never reached it, so that a median over
        seeds counts failures.
    """
    keys = list(by)
    heldout = of_heldout(table)
    reached = heldout["step"].where(heldout["accuracy"] >= accuracy, math.inf)
    return heldout[keys].assign(steps=reached).groupby(keys, sort=False, as_index=False)["steps"].min()


def mean_and_spread(values: Sequence[float]) -> str:
    """``"+0.123 ± 0.004 (3 seeds)"``: mean and standard deviation of single values."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"not finite for {lost} of {len(values)} seeds"
    series = pd.Series(values, dtype=float)
    spread = "" if len(series) < 2 else f" ± {series.std():.3f}"
    return f"{series.mean():+.3f}{spread} ({len(series)} seed{'s' * (len(series) > 1)})"


def final_losses(course: pd.DataFrame, by: Sequence[str] = ("model", "seed")) -> pd.DataFrame:
    """One row per run: ``by``, the columns that identify it, and ``heldout_loss``, that of its last evaluation."""
    last = last_heldout(course.sort_values("step", kind="stable"), by)
    return last[[*by, "loss"]].rename(columns={"loss": "heldout_loss"})


def differences_by_seed(runs: pd.DataFrame, of: str, minus: str, column: str) -> list[float]:
    """``column`` of model ``of`` minus that of model ``minus``, by rising seed, for the seeds that both have.

    Args:
        runs: columns ``model``, ``seed`` and ``column``. Several rows of a run (at several widths, say) are averaged first.
        of, minus: labels in ``model``.
        column: what is compared.
    """
    chosen = runs[runs["model"].isin([of, minus])]
    by_model: Mapping[Any, pd.Series] = {name: rows.groupby("seed")[column].mean() for name, rows in chosen.groupby("model")}
    ours, theirs = by_model[of].align(by_model[minus], join="inner")
    return (ours - theirs).sort_index().tolist()


def mean_course(table: pd.DataFrame, x: str = "step", y: str = "accuracy") -> pd.DataFrame:
    """Mean, least and largest ``y`` over seeds at each ``x``; a run that ended early keeps its last value.

    Args:
        table: of one model; columns ``seed``, ``x`` and ``y``, one row for each pair of seed and x.

    Returns:
        Columns ``x``, ``mean``, ``least``, ``largest``, by rising x.
    """
    by_seed = table.dropna(subset=[y]).set_index([x, "seed"])[y].unstack().sort_index().ffill()  # noqa: PD010
    course = dict(mean=by_seed.mean(axis=1), least=by_seed.min(axis=1), largest=by_seed.max(axis=1))
    return pd.DataFrame(course).reset_index()


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
