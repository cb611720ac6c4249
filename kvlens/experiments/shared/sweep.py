"""Sweeps: models trained on one or more tasks, with several seeds, and compared seed by seed.

`train_cells` trains what is varied (`Cell`), `compare_leads` tests claims (`Lead`) where the models have learned enough, and
`draw_panels` draws.
"""

import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import differences_by_seed, draw_curves, mean_and_spread
from kvlens.experiments.shared.outcome import Comparison, Settings, Tell
from kvlens.experiments.shared.trials import Progress, Trial, train_all
from kvlens.tasks import Task
from kvlens.tasks.batch import Model
from kvlens.training import NotFiniteError, TrainResult, TrainSettings

N_TUNING, FIRST_TUNING = 2, 900_000
"""Runs per model and learning rate for choosing the rate, and the first of their seeds."""
Reasons = Mapping[Any, str | None]
"""Group of runs -> why its models have learned too little for a verdict; None where they have learned enough."""


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: a task and the models that are trained on it.

    Attributes:
        task: from :func:`kvlens.tasks.make_task`.
        models: label -> fields of the model's config.
        columns: added to the rows of these runs; they identify the cell.
        training: changes to the sweep's setting ``training``.
        rates: learning rates to choose from; none: the sweep's setting ``rates``.
        seeds: one run each; none: the sweep's setting ``seeds``.
        title: reported before the cell's training starts.
        examine: (label, seed, trained model) -> rows of a table of its own (`Runs.examined`).
        keep_diverged: whether a run that diverges becomes a row with an infinite loss instead of an error.
    """

    task: Task
    models: Mapping[str, Mapping[str, Any]]
    columns: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    rates: Sequence[float] = ()
    seeds: Sequence[int] = ()
    title: str = ""
    examine: Callable[[str, int, Any], list[dict[str, Any]]] | None = None
    keep_diverged: bool = False

    @property
    def n_runs(self) -> int:
        """Of all its models, those for choosing learning rates included."""
        return len(self.models) * (len(self.seeds) + (N_TUNING * len(self.rates) if len(self.rates) > 1 else 0))

    def trials(self, label: str, seeds: Iterable[int], **changes: float) -> list[Trial]:
        """The runs of one model with these seeds; ``changes`` are training settings."""
        training = {**self.training, **changes}
        return [Trial(self.task, label, self.models[label], {**training, "seed": seed}) for seed in seeds]


class Runs(NamedTuple):
    """All runs of a sweep.

    Attributes:
        settings: of the sweep.
        curves: one row per measurement, in the form of :mod:`~kvlens.experiments.shared.curves`; where learning rates were
            chosen also the ``learning_rate`` of the model; and the columns of the cells.
        examined: rows of `Cell.examine`, with the columns of the cells; empty where there is none.
    """

    settings: Settings
    curves: pd.DataFrame
    examined: pd.DataFrame = pd.DataFrame()


def train_cells(cells: Iterable[Cell], settings: Settings, tell: Tell) -> Runs:
    """Train every model of every cell with every seed.

    Args:
        cells: what is trained.
        settings: ``training``, ``seeds`` and ``rates``, for cells that do not have their own. Without rates a model is trained
            at the learning rate of ``training``.
        tell: called with a sentence after each run.
    """
    whole = [
        replace(
            cell,
            training={**settings["training"], **cell.training},
            seeds=cell.seeds or settings["seeds"],
            rates=cell.rates or settings.get("rates", ()),
        )
        for cell in cells
    ]
    n_steps = sum(cell.n_runs * TrainSettings.of(dict(cell.training)).steps for cell in whole)
    progress = Progress(sum(cell.n_runs for cell in whole), n_steps, tell)
    courses: list[pd.DataFrame] = []
    examined: list[dict[str, Any]] = []
    try:
        for cell in whole:
            if cell.title:
                tell(cell.title)
            course, rows = train_cell(cell, progress)
            courses.append(course.assign(**cell.columns))
            examined += ({**row, **cell.columns} for row in rows)
    finally:
        progress.close()
    return Runs(settings, pd.concat(courses, ignore_index=True), pd.DataFrame(examined))


def train_cell(cell: Cell, progress: Progress) -> tuple[pd.DataFrame, list[dict[str, Any]]]:
    """The curves of one cell, without its columns, and the rows of its `Cell.examine`; the models are not kept."""
    chosen = best_rates(cell, progress) if cell.rates else {}
    rates = {label: {"learning_rate": rate} for label, rate in chosen.items()}
    trials = [trial for label in cell.models for trial in cell.trials(label, cell.seeds, **rates.get(label, {}))]
    courses, examined = [], []
    for trial, model, result in counted(trials, progress):
        name = f"{trial.label}, seed {trial.seed}"
        run = dict(model=trial.label, seed=trial.seed, n_parameters=sum(p.numel() for p in model.parameters()))
        if isinstance(result, TrainResult):
            progress.tell(f"{name}: {_describe(result)}")
            if cell.examine is not None:
                examined += cell.examine(trial.label, trial.seed, model)
            course = result.metrics[["step", "split", "loss", "accuracy"]]
            courses.append(pd.DataFrame(run, index=course.index).join(course))
        elif cell.keep_diverged:
            progress.tell(f"{name}: {result}")
            end = dict(step=cell.training["steps"], split="heldout", loss=math.inf, accuracy=0.0)
            courses.append(pd.DataFrame([{**run, **end}]))
        else:
            raise result
    curves = pd.concat(courses, ignore_index=True)
    return (curves.assign(learning_rate=curves["model"].map(chosen)) if chosen else curves), examined


def best_rates(cell: Cell, progress: Progress) -> dict[str, float]:
    """For each model the learning rate with the lowest mean held-out loss, without diverging, on `tuning_seeds`."""
    if len(cell.rates) == 1:
        return dict.fromkeys(cell.models, cell.rates[0])
    seeds, pairs = tuning_seeds(cell.seeds), list(itertools.product(cell.models, cell.rates))
    losses = dict.fromkeys(pairs, 0.0)
    trials = [trial for label, rate in pairs for trial in cell.trials(label, seeds, learning_rate=rate)]
    for trial, _, result in counted(trials, progress):
        least = float(result.heldout["loss"].min()) if isinstance(result, TrainResult) else math.inf
        rate = trial.training["learning_rate"]
        losses[trial.label, rate] += least
        progress.tell(f"{trial.label}, to choose the rate: held-out loss {least:.4g} at {rate:g}")
    best = {label: min(cell.rates, key=lambda rate: losses[label, rate]) for label in cell.models}
    for label, rate in best.items():
        progress.tell(f"{label}: learning rate {rate:g} of {', '.join(f'{other:g}' for other in cell.rates)}")
    return best


def tuning_seeds(compared: Collection[int]) -> list[int]:
    """`N_TUNING` seeds that are not ``compared``; the same ones for most, so that experiments share these runs."""
    return list(itertools.islice((seed for seed in itertools.count(FIRST_TUNING) if seed not in compared), N_TUNING))


def counted(trials: Sequence[Trial], progress: Progress) -> Iterator[tuple[Trial, Model, TrainResult | NotFiniteError]]:
    """:func:`~kvlens.experiments.shared.trials.train_all`, counting in ``progress``."""
    for trial, model, result in train_all(trials):
        steps = TrainSettings.of(dict(trial.training)).steps
        progress.count(steps, result.seconds if isinstance(result, TrainResult) else 0.0)
        yield trial, model, result


def _describe(result: TrainResult) -> str:
    last = result.heldout.iloc[-1]
    accuracy = "" if math.isnan(last["accuracy"]) else f", accuracy {last['accuracy']:.1%}"
    return f"held-out loss {last['loss']:.4g}{accuracy} after {result.steps} steps, {result.seconds:.0f} s"


@dataclass(frozen=True)
class Lead:
    """The claim that one model has more of something than another, tested seed by seed.

    Attributes:
        what: what is measured; ``{group}``, ``{of}`` and ``{minus}`` become the group's name and the means of the two models.
        claim: what the paper says.
        of, minus: labels of the two models.
        column: what is compared.
        runs: group -> the rows that are compared; by default all.
        paper: the number that the paper prints, if any.
        ours: our number, with the same fields as ``what``; None: mean and spread of the differences.
        denied: whether the claim is that there is no lead. It holds where the difference is significantly below 0; that two
            models are equal cannot be shown.
    """

    what: str
    claim: str
    of: str
    minus: str
    column: str
    runs: Callable[[pd.DataFrame], pd.DataFrame] = lambda group: group
    paper: float | str | None = None
    ours: str | None = None
    denied: bool = False

    def compare(self, group: pd.DataFrame, name: object = None) -> Comparison:
        """The claim on a group of runs: columns model, seed and `column`."""
        runs = self.runs(group)
        values = differences_by_seed(runs, self.of, self.minus, self.column)
        mean = runs.groupby("model")[self.column].mean()
        words = dict(group=name, of=mean[self.of], minus=mean[self.minus])
        ours = mean_and_spread(values) if self.ours is None else self.ours.format(**words)
        return Comparison.tested_on(
            self.what.format(**words), self.claim, values, below=self.denied, ours=ours, paper=self.paper
        )


def compare_leads(
    measured: pd.DataFrame,
    why: Reasons,
    *leads: Lead,
    by: str | None = None,
    name: Callable[[Any], object] = lambda group: group,
) -> list[Comparison]:
    """Every claim, in every group of runs.

    Args:
        measured: what claims are tested on: columns model, seed and those of the leads.
        why: why a group has learned too little for a verdict; its key is None where all runs are one group.
        leads: the claims.
        by: the column whose values are the groups; None: all runs are one.
        name: a group's name in the text of a claim.
    """
    groups: Iterable[tuple[Any, pd.DataFrame]] = [(None, measured)] if by is None else measured.groupby(by, sort=False)
    return [lead.compare(rows, name(group)).unless(why.get(group)) for group, rows in groups for lead in leads]


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
