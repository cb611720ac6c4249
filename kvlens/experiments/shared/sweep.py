"""Sweeps: models trained on one or more tasks, with several seeds, and compared seed by seed.

`train_cells` trains what is varied (`Cell`), `compare_leads` tests claims (`Lead`) where the models have learned enough, and
`draw_panels` draws.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import count_runs, differences_by_seed, draw_curves, mean_and_spread, train_and_compare
from kvlens.experiments.shared.outcome import Comparison, Settings, Tell
from kvlens.experiments.shared.trials import Progress
from kvlens.tasks import Task
from kvlens.training import TrainSettings

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


class Runs(NamedTuple):
    """All runs of a sweep.

    Attributes:
        settings: of the sweep.
        curves: rows of :func:`~kvlens.experiments.shared.curves.train_and_compare`, with the columns of the cells.
        examined: rows of `Cell.examine`, with the columns of the cells; empty where there is none.
    """

    settings: Settings
    curves: pd.DataFrame
    examined: pd.DataFrame = pd.DataFrame()


def train_cells(cells: Iterable[Cell], settings: Settings, tell: Tell) -> Runs:
    """Train every model of every cell with every seed."""
    plans = [
        (cell, {**settings["training"], **cell.training}, cell.seeds or settings["seeds"], cell.rates or settings["rates"])
        for cell in cells
    ]
    n_runs = [count_runs(cell.models, seeds, rates) for cell, _, seeds, rates in plans]
    steps = [TrainSettings.of(training).steps for _, training, _, _ in plans]
    progress = Progress(sum(n_runs), sum(n * own for n, own in zip(n_runs, steps, strict=True)), tell)
    courses: list[pd.DataFrame] = []
    examined: list[dict[str, Any]] = []
    try:
        for cell, training, seeds, rates in plans:
            if cell.title:
                tell(cell.title)

            def examine(label: str, seed: int, model: Any, cell: Cell = cell) -> None:
                if cell.examine is not None:
                    examined.extend({**row, **cell.columns} for row in cell.examine(label, seed, model))

            more: Any = dict(rates=rates, keep_diverged=cell.keep_diverged, progress=progress)
            course = train_and_compare(cell.task, cell.models, training, seeds, tell, examine, **more)
            courses.append(course.assign(**cell.columns))
    finally:
        progress.close()
    return Runs(settings, pd.concat(courses, ignore_index=True), pd.DataFrame(examined))


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
