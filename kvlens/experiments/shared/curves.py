"""Learning curves: several models trained on one task with several seeds, as one tidy table, and a plot of it.

The table has one row per measurement: ``model``, ``seed``, ``n_parameters``, ``step``, ``split``, ``loss``, ``accuracy``. A
seed determines both the initial weights and the batches, so runs of the same seed differ only in the model. A run that stopped
early (``stop_at_accuracy``) has fewer rows; in averages over seeds, it keeps its last value.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from kvlens.tasks import Task
from kvlens.tasks.batch import Model
from kvlens.training import NotFiniteError, TrainResult, build_model, train

N_TUNING = 2
"""Runs per model and learning rate for choosing the rate; their seeds are not among those that are compared."""
PALETTE = ("#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Colors that color-blind readers can tell apart (Okabe and Ito 2008), without their yellow, which is too light for a line."""
PLAIN, SHIFTED = PALETTE[:2]
"""Colors of models without and with KV shift, in every figure."""
MARKERS, DASHES = ("o", "s", "^", "D", "v", "P", "X", "*"), ("-", "--", ":")


def train_and_compare(
    task: Task,
    models: Mapping[str, Mapping[str, Any]],
    training: Mapping[str, Any],
    seeds: Sequence[int],
    tell: Callable[[str], None],
    examine: Callable[[str, int, Model], None] | None = None,
    rates: Sequence[float] = (),
    *,
    keep_diverged: bool = False,
) -> pd.DataFrame:
    """Train every model on ``task`` with every seed.

    Args:
        task: from :func:`kvlens.tasks.make_task`.
        models: label -> fields of the model's config, as for :func:`kvlens.training.build_model`.
        training: fields of :class:`kvlens.training.TrainSettings`, the same for all; ``seed`` is set here.
        seeds: one run each; a seed determines the initial weights and the batches.
        tell: called with a sentence after each run.
        examine: called with label, seed and trained model after each run; models are not kept.
        rates: learning rates from which `best_rate` chooses one for each model; none: that of ``training``.
        keep_diverged: whether a run whose loss or gradient is not finite becomes one held-out row with an infinite loss.

    Returns:
        One row per measurement: model, seed, n_parameters, step, split ("train" or "heldout"), loss, accuracy; with ``rates``
        also the ``learning_rate`` that was chosen.
    """
    if rates:
        others = range(max(seeds) + 1, max(seeds) + 1 + N_TUNING)
        own = {label: best_rate(task, label, model, training, rates, others, tell) for label, model in models.items()}
        courses = [
            train_and_compare(task, {label: model}, {**training, "learning_rate": own[label]}, seeds, tell, examine)
            for label, model in models.items()
        ]
        curves = pd.concat(courses, ignore_index=True)
        return curves.assign(learning_rate=curves["model"].map(own))
    courses = []
    for (label, settings), seed in itertools.product(models.items(), seeds):
        model = build_model(task, {**settings, "seed": seed})
        try:
            result = train(model, task, progress=False, **{**training, "seed": seed})
        except NotFiniteError as error:
            if not keep_diverged:
                raise
            tell(f"{label}, seed {seed}: {error}")
            end = dict(model=label, seed=seed, step=training["steps"], split="heldout", loss=math.inf, accuracy=0.0)
            courses.append(pd.DataFrame([end]))
            continue
        tell(f"{label}, seed {seed}: {_describe(result)}")
        if examine is not None:
            examine(label, seed, model)
        course = result.metrics[["step", "split", "loss", "accuracy"]]
        run = dict(model=label, seed=seed, n_parameters=sum(p.numel() for p in model.parameters()))
        courses.append(pd.DataFrame(run, index=course.index).join(course))
    return pd.concat(courses, ignore_index=True)


def best_rate(
    task: Task,
    label: str,
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    rates: Sequence[float],
    seeds: Sequence[int],
    tell: Callable[[str], None],
) -> float:
    """The learning rate with which ``model`` reaches the lowest mean held-out loss over ``seeds``, without diverging."""
    if len(rates) == 1:
        return rates[0]

    def loss(rate: float) -> float:
        own = {**training, "learning_rate": rate}
        course = train_and_compare(task, {label: model}, own, seeds, lambda text: None, keep_diverged=True)
        return float(of_heldout(course).groupby("seed")["loss"].min().sum())

    best = min(rates, key=loss)
    tell(f"{label}: learning rate {best:g} of {', '.join(f'{rate:g}' for rate in rates)}")
    return best


def _describe(result: TrainResult) -> str:
    last = result.heldout.iloc[-1]
    accuracy = "" if math.isnan(last["accuracy"]) else f", accuracy {last['accuracy']:.1%}"
    return f"held-out loss {last['loss']:.4g}{accuracy} after {result.steps} steps, {result.seconds:.0f} s"


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
    """One color per model: a line through the mean over seeds, and a band from minimum to maximum.

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
        course, look = mean_course(table[table[by] == label], x, y), line_style(number)
        look |= {"color": (colors or {}).get(label, look["color"]), "markevery": max(1, len(course) // 8)}
        axes.fill_between(course[x], course["least"], course["largest"], color=look["color"], alpha=0.18, linewidth=0)
        axes.plot(course[x], course["mean"], **{"linewidth": 1.8, "label": str(label), **look, **line})
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
