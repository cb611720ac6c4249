"""The training runs of experiments: each is described by what it is, and trained once.

Inside a `keeping_runs` block every run is kept in one folder under a name made from its task, data, model and settings
(:func:`kvlens.training.train`, ``runs``). An experiment that was killed resumes there, and experiments that need the same run
share it.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm

from kvlens.errors import KVLensError
from kvlens.tasks import Task
from kvlens.tasks.batch import Model
from kvlens.training import NotFiniteError, TrainResult, build_model, train


class Kept(NamedTuple):
    """The folder of an open `keeping_runs` block, and the processes that train."""

    folder: Path
    jobs: int


_KEPT: ContextVar[Kept | None] = ContextVar("kept runs", default=None)


@contextmanager
def keeping_runs(folder: str | Path, jobs: int = 1) -> Iterator[None]:
    """Keep the training runs of all experiments run inside the block in ``folder``; train up to ``jobs`` at a time."""
    before = _KEPT.set(Kept(Path(folder), jobs))
    try:
        yield
    finally:
        _KEPT.reset(before)


@dataclass(frozen=True)
class Trial:
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
        """Of the initial weights and the batches."""
        return int(self.training["seed"])

    def train(self) -> tuple[Model, TrainResult | NotFiniteError]:
        """The trained model and the record of its run, from the folder of kept runs if it is there.

        A run that diverged comes with its error in place of its record, and with its last good weights.
        """
        kept = _KEPT.get()
        model = build_model(self.task, {**self.model, "seed": self.seed})
        try:
            runs = None if kept is None else kept.folder
            return model, train(model, self.task, runs=runs, progress=False, **self.training)
        except NotFiniteError as error:
            return model, error

    def finished(self) -> tuple[Model, TrainResult]:
        """As `train`; raises NotFiniteError if the run diverged."""
        model, result = self.train()
        if isinstance(result, NotFiniteError):
            raise result
        return model, result


class Progress:
    """How many runs of an experiment are done, and how long the others will take.

    The estimate is the mean time of a step so far, kept runs included, times the steps that are left, over the processes.

    Args:
        n_runs: all runs.
        n_steps: the most steps that they take together.
        tell: called with a sentence after each run.
    """

    def __init__(self, n_runs: int, n_steps: int, tell: Callable[[str], None]):
        self.n_runs, self.n_steps, self._tell = n_runs, n_steps, tell
        self.runs, self.steps, self.seconds = 0, 0, 0.0
        look = "{desc}: {percentage:.0f}%|{bar}|{postfix}"
        self._bar = tqdm(total=n_steps, disable=None, bar_format=look, leave=False)

    def count(self, steps: int, seconds: float) -> None:
        """Count a run that could take ``steps`` and took ``seconds``."""
        self.runs, self.steps, self.seconds = self.runs + 1, self.steps + steps, self.seconds + seconds
        self._bar.set_description(self.words, refresh=False)
        self._bar.update(steps)

    @property
    def words(self) -> str:
        """``"12 of 90 runs, about 41 minutes left"``."""
        kept = _KEPT.get()
        left = self.seconds / max(1, self.steps) * (self.n_steps - self.steps) / (1 if kept is None else kept.jobs)
        return f"{self.runs} of {self.n_runs} runs" + (f", about {_in_words(left)} left" if self.runs < self.n_runs else "")

    def tell(self, text: str) -> None:
        """Report what a run found, with the runs done."""
        self._tell(f"{text}; {self.words}")

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()


def _in_words(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def train_all(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Model, TrainResult | NotFiniteError]]:
    """Train every trial, in order, as :meth:`Trial.train`.

    With several ``jobs``, processes of their own train ahead into the folder of kept runs, from which each run is then read.

    Raises:
        KVLensError: a process died.
    """
    kept = _KEPT.get()
    if kept is None or kept.jobs == 1 or len(trials) == 1:
        for trial in trials:
            yield trial, *trial.train()
        return
    threads = max(1, (os.cpu_count() or 1) // kept.jobs)
    pool = ProcessPoolExecutor(
        kept.jobs, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(kept.folder, threads)
    )
    try:
        for trial, done in zip(trials, [pool.submit(_train_ahead, trial) for trial in trials], strict=True):
            done.result()
            yield trial, *trial.train()
    except BrokenProcessPool as error:
        raise KVLensError(
            f"reproduce: a training process died (out of memory?); runs are kept in {kept.folder}: repeat the command, with "
            "fewer jobs if memory was short"
        ) from error
    finally:
        for process in list(pool._processes.values() if pool._processes else ()):
            process.terminate()  # each run resumes from its last checkpoint
        pool.shutdown(cancel_futures=True)


def _start_worker(folder: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    _KEPT.set(Kept(folder, 1))


def _train_ahead(trial: Trial) -> None:
    trial.train()  # a run that diverges does so again, from its last checkpoint on, where it is read
