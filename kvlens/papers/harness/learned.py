"""Training the models of an experiment, and whether they have learned enough to be compared.

Every run is a `TrainingRun`; inside a `keeping_runs` block it is kept in one folder under a name made from its task, data,
model and settings (:func:`kvlens.training.train`, ``runs``). An experiment that was killed resumes there, and experiments that
need the same run share it. `train_cells` trains what is varied and returns one tidy table with one row per measurement:
``model``, ``seed``, ``n_parameters``, ``step``, ``split``, ``loss``, ``accuracy``. A seed determines both the initial weights
and the batches, so runs of the same seed differ only in the model, and two models are compared seed by seed (`lead`).

A claim that one model is better is tested only if the baseline has finished learning (`Goal`):

    gain(t) = (chance - y(t)) / (chance - best)        y: held-out loss or accuracy, mean over seeds

``chance`` is the score of an untrained guess: the variance of the labels, the loss of the token frequencies, or one over the
number of answers; ``best`` is that of a perfect model. If one of two conditions fails, the verdict is "not trained far
enough" (:attr:`~kvlens.papers.harness.significance.Comparison.untrained`), whatever the significance test says:

- *learned*: the baseline ends with a gain of at least ``share``;
- *flat*: the second half of the steps contributed at most `LATE` of the model's own total gain. This is required of the
  baseline and of models that end behind it (a model that is ahead may still improve). Then half of the steps would have been
  nearly as good, so twice as many would hardly be better. (The last few steps alone would prove nothing, because a learning
  rate that decays to zero makes any curve flat.) A model that has learned nearly everything (`DONE`) has nothing left to gain,
  however early its training ended; and a late gain of at most ``1 - DONE`` is none, since a model that has learned next to
  nothing has only noise to divide it by.

A curve may be flat before it falls, as it is for induction. Then the baseline has not learned, and there is no verdict.
"""

import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kvlens.checks import from_fields
from kvlens.files import checksum_of_json, write_atomically
from kvlens.files.parquet import read_table, table_bytes
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.run import Settings, Tell
from kvlens.papers.harness.significance import Comparison
from kvlens.tasks import Task
from kvlens.tasks.task import Model
from kvlens.terminal import end_with_parent
from kvlens.training import NotFiniteError, TrainResult, TrainSettings, build_model, train
from kvlens.training.checkpoint import ARITHMETIC

# --- one run ---

_KEPT: ContextVar[tuple[Path, int] | None] = ContextVar("kept runs", default=None)
"""The folder of an open `keeping_runs` block, and the number of processes that train."""


@contextmanager
def keeping_runs(folder: str | Path, jobs: int = 1) -> Iterator[None]:
    """Keep the training runs of all experiments run inside the block in ``folder``; train up to ``jobs`` at a time."""
    before = _KEPT.set((Path(folder), jobs))
    try:
        yield
    finally:
        _KEPT.reset(before)


@dataclass(frozen=True)
class TrainingRun:
    """One training run.

    Attributes:
        task: what is trained on.
        label: the model's name in the experiment.
        model: fields of the model's config, as for :func:`kvlens.training.build_model`.
        training: fields of :class:`kvlens.training.TrainSettings`; its ``seed`` also determines the initial weights.
    """

    task: Task
    label: str
    model: Mapping[str, Any]
    training: Mapping[str, Any]

    @property
    def seed(self) -> int:
        """The seed of the initial weights and the batches."""
        return int(self.training["seed"])

    def train(self) -> tuple[Model, TrainResult | NotFiniteError]:
        """The trained model and the record of its run, from the folder of kept runs if it is there.

        A run that diverged comes with its error in place of its record, and with its last good weights.
        """
        kept = _KEPT.get()
        model = build_model(self.task, {**self.model, "seed": self.seed})
        try:
            return model, train(model, self.task, runs=kept and kept[0], progress=False, **self.training)
        except NotFiniteError as error:
            return model, error

    def finished(self) -> tuple[Model, TrainResult]:
        """Train as `train` does; raises NotFiniteError if the run diverged."""
        model, result = self.train()
        if isinstance(result, NotFiniteError):
            raise result
        return model, result


def trained_further(
    model: HookedKVTransformer, task: Task, training: Mapping[str, Any]
) -> tuple[HookedKVTransformer, TrainResult]:
    """A copy of a trained model that goes on training on ``task``; the name under which it is kept has its weights in it."""
    kept, copy = _KEPT.get(), deepcopy(model)
    known = dict(weights=model.fingerprint().weights, task=task.name, settings=task.settings(), training=dict(training))
    name = f"further-{checksum_of_json(known)[:24]}"
    return copy, train(copy, task, folder=kept and kept[0] / name, progress=False, **training)


def train_all(trials: Sequence[TrainingRun]) -> Iterator[tuple[TrainingRun, Model, TrainResult | NotFiniteError]]:
    """Train every trial, in order, as :meth:`TrainingRun.train`.

    With several ``jobs``, processes of their own train ahead into the folder of kept runs, from which each run is then read.
    """
    folder, jobs = _KEPT.get() or (None, 1)
    if folder is None or jobs == 1 or len(trials) == 1:
        for trial in trials:
            yield trial, *trial.train()
        return
    threads = max(1, (os.cpu_count() or 1) // jobs)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, spawn, initializer=_start_worker, initargs=(folder, threads))
    try:
        for trial, done in zip(trials, [pool.submit(_train_ahead, trial) for trial in trials], strict=True):
            done.result()
            yield trial, *trial.train()
    finally:
        for process in list(pool._processes.values() if pool._processes else ()):
            process.terminate()  # each run resumes from its last checkpoint
        pool.shutdown(cancel_futures=True)


def kept_table(run: Mapping[str, object], make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """What ``make`` returns; read from the folder of kept runs where an equal run left it.

    For a run that is no `TrainingRun`. ``run`` has all that its numbers depend on, as JSON has it.
    """
    folder, _ = _KEPT.get() or (None, 1)
    if folder is None:
        return make()
    path = folder / f"{checksum_of_json({'arithmetic': ARITHMETIC, **run})}.parquet"
    if not path.is_file():
        table = table_bytes(make())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, table)
    return read_table(path)


def _start_worker(folder: Path, threads: int) -> None:
    end_with_parent()
    torch.set_num_threads(threads)
    _KEPT.set((folder, 1))


def _train_ahead(trial: TrainingRun) -> None:
    trial.train()  # a run that diverges does so again, from its last checkpoint on, where it is read


# --- many runs ---

N_TUNING, FIRST_TUNING = 2, 900_000
"""Runs per model and learning rate for choosing the rate, and the first of their seeds."""


@dataclass(frozen=True)
class Cell:
    """A task and the models that are trained on it.

    Attributes:
        task: from :func:`kvlens.tasks.make_task`.
        models: label -> fields of the model's config.
        columns: added to the rows of these runs; they identify the cell.
        training: changes to the setting ``training``.
        rates: learning rates to choose from; none: the setting ``rates``, or the rate of ``training`` where there is none.
        seeds: one run each; none: the setting ``seeds``.
        title: reported before the cell's training starts.
        examine: (label, seed, trained model) -> rows of a table of its own.
        keep_diverged: whether a run that diverges becomes a row with an infinite loss instead of an error.
    """

    task: Task
    models: Mapping[str, Mapping[str, object]]
    columns: Mapping[str, object] = field(default_factory=dict)
    training: Mapping[str, object] = field(default_factory=dict)
    rates: Sequence[float] = ()
    seeds: Sequence[int] = ()
    title: str = ""
    examine: Callable[[str, int, Any], list[dict[str, object]]] | None = None
    keep_diverged: bool = False

    def trials(self, label: str, seeds: Iterable[int], **changes: float) -> list[TrainingRun]:
        """The runs of one model with these seeds; ``changes`` are training settings."""
        training = {**self.training, **changes}
        return [TrainingRun(self.task, label, self.models[label], {**training, "seed": seed}) for seed in seeds]


class RunQueue:
    """Trains runs and tells how many are done, and how long the others will take.

    The estimate is the mean time of a step so far, kept runs included, times the steps that are left, over the processes.

    Args:
        cells: all that is trained, with their training, rates and seeds.
        tell: called with a sentence after each run.
    """

    def __init__(self, cells: Iterable[Cell], tell: Tell):
        self.n_runs, self.n_steps, self._tell = 0, 0, tell
        for cell in cells:
            n_runs = len(cell.models) * (len(cell.seeds) + (N_TUNING * len(cell.rates) if len(cell.rates) > 1 else 0))
            self.n_runs += n_runs
            self.n_steps += n_runs * from_fields(TrainSettings, dict(cell.training)).steps
        self.runs, self.steps, self.seconds = 0, 0, 0.0

    def train(self, trials: Sequence[TrainingRun]) -> Iterator[tuple[TrainingRun, Model, TrainResult | NotFiniteError]]:
        """Train as `train_all` does, and count."""
        for trial, model, result in train_all(trials):
            self.runs, self.steps = self.runs + 1, self.steps + from_fields(TrainSettings, dict(trial.training)).steps
            self.seconds += result.seconds if isinstance(result, TrainResult) else 0.0
            yield trial, model, result

    def tell(self, text: str) -> None:
        """Report what a run found, with the runs done: ``"...; 12 of 90 runs, about 41 minutes left"``."""
        left = self.seconds / max(1, self.steps) * (self.n_steps - self.steps) / (_KEPT.get() or (None, 1))[1]
        words = f", about {_in_words(left)} left" if self.runs < self.n_runs else ""
        self._tell(f"{text}; {self.runs} of {self.n_runs} runs{words}")


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def train_cells(cells: Iterable[Cell], settings: Settings, tell: Tell) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Train every model of every cell with every seed.

    Args:
        cells: what is trained.
        settings: ``training``, ``seeds`` and ``rates``, for cells that do not have their own.
        tell: called with a sentence after each run.

    Returns:
        One row per measurement, with the ``learning_rate`` of the model where one was chosen, and the columns of the cells; and
        the rows of `Cell.examine`, with the same columns.
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
    progress = RunQueue(whole, tell)
    courses: list[pd.DataFrame] = []
    examined: list[dict[str, object]] = []
    for cell in whole:
        if cell.title:
            tell(cell.title)
        course, rows = train_cell(cell, progress)
        courses.append(course.assign(**cell.columns))
        examined += ({**row, **cell.columns} for row in rows)
    return pd.concat(courses, ignore_index=True), pd.DataFrame(examined)


def train_cell(cell: Cell, progress: RunQueue) -> tuple[pd.DataFrame, list[dict[str, object]]]:
    """The curves of one cell, without its columns, and the rows of its `Cell.examine`; the models are not kept."""
    chosen = best_rates(cell, progress) if cell.rates else {}
    rates = {label: {"learning_rate": rate} for label, rate in chosen.items()}
    courses, examined = [], []
    trials = [trial for label in cell.models for trial in cell.trials(label, cell.seeds, **rates.get(label, {}))]
    for trial, model, result in progress.train(trials):
        run = dict(model=trial.label, seed=trial.seed, n_parameters=sum(p.numel() for p in model.parameters()))
        if isinstance(result, TrainResult):
            course = result.metrics[["step", "split", "loss", "accuracy"]]
            courses.append(pd.DataFrame(run, index=course.index).join(course))
            if cell.examine is not None:
                examined += cell.examine(trial.label, trial.seed, model)
        elif cell.keep_diverged:
            end = dict(step=cell.training["steps"], split="heldout", loss=math.inf, accuracy=0.0)
            courses.append(pd.DataFrame([{**run, **end}]))
        else:
            raise result
        progress.tell(f"{trial.label}, seed {trial.seed}: {_describe(result)}")
    curves = pd.concat(courses, ignore_index=True)
    return (curves.assign(learning_rate=curves["model"].map(chosen)) if chosen else curves), examined


def best_rates(cell: Cell, progress: RunQueue) -> dict[str, float]:
    """Choose for each model the learning rate with the lowest mean held-out loss, without diverging, on `tuning_seeds`."""
    if len(cell.rates) == 1:
        return dict.fromkeys(cell.models, cell.rates[0])
    seeds, pairs = tuning_seeds(cell.seeds), list(itertools.product(cell.models, cell.rates))
    losses = dict.fromkeys(pairs, 0.0)
    trials = [trial for label, rate in pairs for trial in cell.trials(label, seeds, learning_rate=rate)]
    for trial, _, result in progress.train(trials):
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


def _describe(result: TrainResult | NotFiniteError) -> str:
    if isinstance(result, NotFiniteError):
        return str(result)
    last = result.heldout.iloc[-1]
    accuracy = "" if math.isnan(last["accuracy"]) else f", accuracy {last['accuracy']:.1%}"
    return f"held-out loss {last['loss']:.4g}{accuracy} after {result.steps} steps, {result.seconds:.0f} s"


# --- what is read off the curves ---


def of_heldout(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the held-out split."""
    return table[table["split"] == "heldout"].reset_index(drop=True)


def last_heldout(table: pd.DataFrame, by: Iterable[str] = ("model", "seed")) -> pd.DataFrame:
    """The last held-out row of every run, in the order of the table; ``by`` names the columns that identify a run."""
    return of_heldout(table).groupby(list(by), sort=False).tail(1).reset_index(drop=True)


def final_losses(course: pd.DataFrame, by: Sequence[str] = ("model", "seed")) -> pd.DataFrame:
    """One row per run: ``by``, the columns that identify it, and ``heldout_loss``, that of its last evaluation."""
    last = last_heldout(course.sort_values("step", kind="stable"), by)
    return last[[*by, "loss"]].rename(columns={"loss": "heldout_loss"})


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


def differences_by_seed(runs: pd.DataFrame, of: str, minus: str, column: str) -> list[float]:
    """``column`` of model ``of`` minus that of model ``minus``, by rising seed, for the seeds that both have.

    Args:
        runs: columns ``model``, ``seed`` and ``column``. Several rows of a run (at several widths, say) are averaged first.
        of, minus: labels in ``model``.
        column: what is compared.
    """
    chosen = runs[runs["model"].isin([of, minus])]
    by_model = {name: rows.groupby("seed")[column].mean() for name, rows in chosen.groupby("model")}
    ours, theirs = by_model[of].align(by_model[minus], join="inner")
    return (ours - theirs).sort_index().tolist()


def mean_and_spread(values: Sequence[float]) -> str:
    """``"+0.123 ± 0.004 (3 seeds)"``: mean and standard deviation of single values."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"not finite for {lost} of {len(values)} seeds"
    series = pd.Series(values, dtype=float)
    spread = "" if len(series) < 2 else f" ± {series.std():.3f}"
    return f"{series.mean():+.3f}{spread} ({len(series)} seed{'s' * (len(series) > 1)})"


def lead(
    runs: pd.DataFrame,
    of: str,
    minus: str,
    column: str,
    what: str,
    claim: str,
    *,
    ours: str | None = None,
    paper: float | str | None = None,
    denied: bool = False,
) -> Comparison:
    """The claim that one model has more of something than another, tested seed by seed.

    Args:
        runs: columns model, seed and ``column``.
        of, minus: labels of the two models.
        column: what is compared.
        what: what is measured; ``{of}`` and ``{minus}`` become the means of the two models.
        claim: what the paper says.
        ours: our number, with the same fields as ``what``; None: mean and spread of the differences.
        paper: the number that the paper prints, if any.
        denied: whether the claim is that there is no lead. It holds where the difference is significantly below 0; that two
            models are equal cannot be shown.
    """
    values, mean = differences_by_seed(runs, of, minus, column), runs.groupby("model")[column].mean()
    means = dict(of=mean[of], minus=mean[minus])
    number = mean_and_spread(values) if ours is None else ours.format(**means)
    return Comparison.tested_on(what.format(**means), claim, values, below=denied, ours=number, paper=paper)


# --- whether a model has learned ---

LATE = 1 / 8
"""The largest share of the baseline's gain that the second half of the steps may contribute."""

DONE = 0.98
"""From this gain on, a model counts as having learned everything."""


@dataclass(frozen=True)
class Goal:
    """The scale on which learning is measured.

    Attributes:
        chance: ``y`` without having learned anything.
        best: ``y`` of a perfect model; 0 if that is unknown, as for text.
        share: the share of the distance from ``chance`` to ``best`` that counts as having learned.
        y: the column that is measured.
    """

    chance: float
    best: float = 0.0
    share: float = 0.5
    y: str = "loss"

    def gains(self, runs: pd.DataFrame) -> tuple[float, float]:
        """The gain of one model after half of the steps and at the end; means over seeds.

        Args:
            runs: held-out rows: seed, step and `y`. A run that ended early keeps its last value.
        """
        course = mean_course(runs.assign(**{self.y: runs[self.y].astype(float)}), y=self.y)
        early = course.loc[course["step"] <= course["step"].max() / 2, "mean"]
        half, end = (early.iloc[-1] if len(early) else self.chance), course["mean"].iloc[-1]
        return (self.chance - half) / (self.chance - self.best), (self.chance - end) / (self.chance - self.best)

    def why_not_learned(self, runs: pd.DataFrame, name: str) -> str | None:
        """The reason why the model has not learned enough (a gain below `share`), or None."""
        _, gain = self.gains(runs)
        if gain >= self.share:
            return None
        went = f"has learned {round(gain, 2) + 0.0:.0%} of what there is" if math.isfinite(gain) else "diverged"
        return f"{name} {went} ({self.y} {self.chance:.3g} is chance, {self.best:.3g} perfect); {self.share:.0%} is required"

    def why_not_flat(self, runs: pd.DataFrame, name: str, rival: pd.DataFrame | None = None) -> str | None:
        """The reason why the curve is not flat (the second half of the steps added more than `LATE` of its gain), or None.

        Args:
            runs: of the model whose curve is tested.
            name: of that model.
            rival: of the model that it is compared with; a model that is ahead of it need not be flat.
        """
        half, end = self.gains(runs)
        done = end >= DONE or (rival is not None and end > self.gains(rival)[1])
        if done or not math.isfinite(end) or end - half <= max(LATE * end, 1 - DONE):
            return None
        late = "all" if end <= end - half else f"{(end - half) / end:.0%}"
        return f"{name} still improves: {late} of the gain came in the second half of its steps"

    def why_untrained(self, course: pd.DataFrame, baseline: str) -> str | None:
        """The reason why the models of ``course`` cannot be compared with ``baseline`` yet, or None.

        Args:
            course: held-out rows of all that are compared: model, seed, step and `y`.
            baseline: the model that must have learned.
        """
        runs = dict(list(course.groupby("model", sort=False)))
        base = runs[baseline]
        found = self.why_not_learned(base, baseline) or self.why_not_flat(base, baseline)
        for name, own in runs.items():
            found = found or self.why_not_flat(own, str(name), rival=base)
        return found
