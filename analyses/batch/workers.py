"""The workers of a batch, which keep their model loaded and turn prompts into rows: this process, spawned ones, or Ray actors.

If the analysis refuses a prompt or fails on it, that is recorded as its result, and the batch continues. If a model cannot be
loaded, the batch ends.

A worker may die: be killed for its memory, with its machine, or by hand. Another takes its place, and its job is given out
again one prompt at a time, so that a prompt that kills its worker is found, and only its rows are lost. It does not matter
which worker runs which job, since results carry the numbers of their prompts.

Ray (``pip install -e '.[ray]'``) runs workers on this machine, several machines, or the GPUs of a cluster. Without a running
cluster (``RAY_ADDRESS``, or one started on this machine) it starts one here. On a cluster, every machine needs kvlens, and the
model folders under the same paths.
"""

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

import torch

from kvlens import KVLensError, KVModel, load
from kvlens.terminal import end_with_parent

from ..declaration import Analysis, Record
from .journal import DIED, FAILED, REFUSED, PromptResult, schema_of, to_bytes
from .work import FRONT_COLUMNS, Resources, Work, load_analysis

MAX_DEATHS = 2
"""The number of workers that a prompt, run alone, may kill before it is abandoned."""
MAX_DEATHS_WITHOUT_RESULT = 20
"""The batch ends when this many times the number of workers have died in a row, since then the prompts are not the cause. (A
single job of eight prompts that all kill their worker accounts for 17.)"""
PATIENCE = 10.0
"""Seconds without a result after which it is checked whether Ray still runs here."""


@dataclass(frozen=True)
class Job:
    """Prompts for one model, with their numbers in the input.

    Attributes:
        model: index into the work's models.
        prompts: (number, record), at least one.
        deaths: number of workers that have died while running it.
    """

    model: int
    prompts: tuple[tuple[int, Record], ...]
    deaths: int = 0


def columns_of(analysis: Analysis) -> dict[str, str]:
    """The table's columns with their dtypes: model and prompt, then those of the analysis."""
    return {**dict.fromkeys(FRONT_COLUMNS, "str"), **analysis.columns.dtypes}


class ModelShelf:
    """Keeps the last requested model loaded; a batch goes model by model, and two might not fit in memory.

    Args:
        names: what :func:`kvlens.load` takes.
        device: where they run; None takes TransformerLens' choice.
        dtype: dtype of the weights, e.g. ``float64``; None keeps the stored one.
    """

    def __init__(self, names: tuple[str, ...], *, device: str | None, dtype: str | None):
        self.names, self.device, self.dtype = names, device, dtype
        self._held: tuple[int, KVModel] | None = None

    def __getitem__(self, index: int) -> KVModel:
        if self._held is None or self._held[0] != index:
            self._held = None  # frees the old model before the new one is read
            self._held = (index, load(self.names[index], device=self.device, dtype=self.dtype))
        return self._held[1]


class Worker:
    """Runs the jobs of one batch, keeping the model of the last job loaded.

    Args:
        work: what is computed.
        threads: threads that torch may use; None does not change them.
        models: the models of ``work``, if they are loaded already.
    """

    def __init__(self, work: Work, threads: int | None = None, models: ModelShelf | None = None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with torch's
        if threads is not None:
            torch.set_num_threads(threads)
        self.work, self.analysis = work, load_analysis(work.analysis, work.folder)
        self.schema = schema_of(columns_of(self.analysis))
        self.models = models or ModelShelf(work.models, device=work.device, dtype=work.dtype)

    def run(self, job: Job) -> list[PromptResult]:
        """Run a job; return one result per prompt, in order.

        Raises:
            KVLensError: the model cannot be loaded.
        """
        model = self.models[job.model]
        return [self._warned(model, job.model, number, record) for number, record in job.prompts]

    def _warned(self, model: KVModel, index: int, number: int, record: Record) -> PromptResult:
        with warnings.catch_warnings(record=True) as caught:
            result = self._run_one(model, index, number, record)
        return replace(result, warnings=tuple(dict.fromkeys(_one_line(str(one.message)) for one in caught)))

    def _run_one(self, model: KVModel, index: int, number: int, record: Record) -> PromptResult:
        try:
            frame = self.analysis.run(model, record, **self.work.options)
            frame = frame.assign(model=self.work.models[index], prompt_id=record.id)
            rows = to_bytes(frame[self.schema.names], self.schema)
        except KVLensError as error:
            return PromptResult(
                index, number, record.id, kind=REFUSED, error=_one_line(str(error)), where=_where(error, self.analysis)
            )
        except Exception as error:  # an error on one prompt does not stop the others
            why = _one_line(f"{type(error).__name__}: {error}")
            return PromptResult(index, number, record.id, kind=FAILED, error=why, where=_where(error, self.analysis))
        return PromptResult(index, number, record.id, n_rows=len(frame), rows=rows)


def _where(error: Exception, analysis: Analysis) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(sys.modules.get(analysis.function.__module__), "__file__", None)
    own = [frame for frame in frames if frame.filename == own_file][-1:]
    raised = f"{frames[-1].filename}:{frames[-1].lineno}"
    called = [f"{frame.filename}:{frame.lineno}" for frame in own if frame is not frames[-1]]
    return ", called at ".join([raised, *called])


def _one_line(text: str) -> str:
    return " ".join(text.split())


# --- workers in other processes ---


class Remote(Protocol):
    """A worker in another process, which has one job at a time."""

    def submit(self, job: Job) -> Future[list[PromptResult]]:
        """Give it a job."""

    def death(self, error: BaseException) -> str | None:
        """Say how it died, if an error of its job means that it did, else None; may raise the error in fewer words."""

    def stop(self) -> None:
        """End it, busy or not, dead or alive."""


class Spawned:
    """A process of this machine, spawned since torch's threads do not survive a fork.

    Each has an executor of its own: one that breaks fails all its jobs, and does not say which of its processes died.
    """

    def __init__(self, work: Work, threads: int):
        self._given = work, threads
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)

    def submit(self, job: Job) -> Future[list[PromptResult]]:
        self._job = self._pool.submit(_run, *self._given, job)
        return self._job

    def death(self, error: BaseException) -> str | None:
        if not isinstance(error, BrokenProcessPool):
            return None
        (process,) = self._pool._processes.values()
        self._pool.shutdown()
        return f"killed by {signal.Signals(-code).name}" if (code := process.exitcode or 0) < 0 else f"exit status {code}"

    def stop(self) -> None:
        if not self._job.done():
            for process in self._pool._processes.values():
                process.kill()
        self._pool.shutdown()


_WORKER: list[Worker] = []
"""That of a spawned process, once it has had a job."""


def _run(work: Work, threads: int, job: Job) -> list[PromptResult]:
    if not _WORKER:
        _WORKER.append(Worker(work, threads))
    return _WORKER[0].run(job)


class RayCluster:
    """Ray, for a batch.

    Args:
        work: what its actors compute.
        threads: threads that each may use, and CPUs that Ray reserves for it.
        gpus: GPUs that Ray reserves for each: 0.25 puts four on one GPU. With 0 they see none.

    Raises:
        KVLensError: Ray is not installed, or cannot be started or reached.
    """

    def __init__(self, work: Work, threads: int, gpus: float):
        try:
            import ray
        except ImportError as error:
            raise KVLensError("the engine ray needs Ray: pip install -e '.[ray]' in a clone, or pip install ray") from error
        self.ray, self._arguments = ray, (work, threads)
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False, configure_logging=False)
            except Exception as error:  # a start that takes too long is none of Ray's own errors
                raise KVLensError(f"the engine ray cannot start or reach its cluster: {error}") from error
        self._new = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(Worker).remote

    def start(self) -> "RayActor":
        """Request an actor; it starts when the cluster has resources for it."""
        return RayActor(self.ray, self._new(*self._arguments))

    def check(self) -> None:
        """Raise KVLensError if Ray's daemon on this machine is gone, without which results would be waited for without end."""
        here = self.ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == here and not node["Alive"] for node in self.ray.nodes()):
            raise KVLensError(
                "the engine ray: Ray's daemon on this machine died; finished prompts are kept, and the same command resumes "
                "the batch"
            )


@dataclass(frozen=True)
class RayActor:
    """A `Worker` as an actor of Ray, which itself restarts none."""

    ray: Any
    actor: Any

    def submit(self, job: Job) -> Future[list[PromptResult]]:
        return self.actor.run.remote(job).future()

    def death(self, error: BaseException) -> str | None:
        if isinstance(cause := getattr(error, "cause", None), KVLensError):
            raise cause from None
        kinds = self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError
        return " ".join(str(error).split())[:200] if isinstance(error, kinds) else None

    def stop(self) -> None:
        self.ray.kill(self.actor)


def run_jobs(
    jobs: Iterable[Job],
    work: Work,
    resources: Resources,
    tell: Callable[[str], None] = print,
    models: ModelShelf | None = None,
) -> Iterator[list[PromptResult]]:
    """Run every job and yield results as they arrive: in the order of the jobs with one process, else in any order.

    Args:
        jobs: the jobs, read as needed.
        work: what is computed.
        resources: engine and number of workers.
        tell: called with a message when a worker has died.
        models: the models of ``work``, if this process has them; other processes load their own.

    Raises:
        KVLensError: a model cannot be loaded, Ray is not installed, or workers keep dying.
    """
    n_workers = resources.workers
    threads = resources.threads or max(1, torch.get_num_threads() // n_workers)
    if resources.engine == "ray":
        ray = RayCluster(work, threads, resources.gpus_per_worker)
        yield from share_out(jobs, ray.start, n_workers, tell, ray.check)
    elif n_workers == 1:
        yield from map(Worker(work, resources.threads, models).run, jobs)
    else:
        yield from share_out(jobs, lambda: Spawned(work, threads), n_workers, tell)


def share_out(
    jobs: Iterable[Job],
    start: Callable[[], Remote],
    n_workers: int,
    tell: Callable[[str], None] = print,
    check: Callable[[], None] = lambda: None,
) -> Iterator[list[PromptResult]]:
    """Keep ``n_workers`` busy until every job is done, replacing those that die; always stop all of them at the end.

    Args:
        jobs, tell: as in :func:`run_jobs`.
        start: starts a worker.
        n_workers: how many there are at a time, at most.
        check: called when nothing has come for a while; raises if nothing will.

    Raises:
        KVLensError: as :func:`run_jobs`.
    """
    waiting = iter(jobs)
    todo = deque(islice(waiting, n_workers))
    busy: dict[Future[list[PromptResult]], tuple[Remote, Job]] = {}
    deaths = 0

    def employ(worker: Remote | None) -> None:
        """Give the next job to a worker, or to a new one; without a job there is none."""
        job = todo.popleft() if todo else next(waiting, None)
        if job is not None:
            worker = worker or start()
            busy[worker.submit(job)] = worker, job
        elif worker is not None:
            worker.stop()

    try:
        for _ in range(len(todo)):  # no more workers than jobs
            employ(None)
        while busy:
            done, _ = wait(busy, PATIENCE, FIRST_COMPLETED)
            if not done:
                check()
            for future in done:
                worker, job = busy[future]
                how = None if (error := future.exception()) is None else worker.death(error)
                results, again = (future.result(), []) if how is None else _after_death(job, how)
                todo.extend(again)
                deaths = 0 if how is None else deaths + 1
                if deaths > MAX_DEATHS_WITHOUT_RESULT * n_workers:
                    raise KVLensError(f"{deaths} workers died one after the other; of the last: {how}")
                if how is not None:
                    tell(f"a worker died ({how}); another takes over")
                    worker.stop()
                employ(worker if how is None else None)
                del busy[future]
                if results:
                    yield results
    finally:
        for worker, _ in busy.values():
            worker.stop()


def _after_death(job: Job, how: str) -> tuple[list[PromptResult], list[Job]]:
    """The prompts to abandon and the jobs to give out again after a worker died."""
    if len(job.prompts) > 1:  # run them one by one to find the one that kills its worker
        return [], [replace(job, prompts=(prompt,)) for prompt in job.prompts]
    if job.deaths + 1 < MAX_DEATHS:
        return [], [replace(job, deaths=job.deaths + 1)]
    number, record = job.prompts[0]
    error = f"its worker died {MAX_DEATHS} times ({how}); it may need more memory than there is"
    return [PromptResult(job.model, number, record.id, kind=DIED, error=error)], []
