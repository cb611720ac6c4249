"""The workers of a batch, which keep their model loaded and turn prompts into rows: this process, spawned ones, or Ray actors.

If the analysis refuses a prompt or fails on it, that is recorded as its result, and the batch continues. If a model cannot be
loaded, the batch ends.

A worker may die: be killed for its memory, with its machine, or by hand. Another takes its place and its prompt; a prompt that
kills that one, too, is given up. It does not matter which worker runs which prompt.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa
import torch

from kvlens import KVLensError, KVModel, load
from kvlens.terminal import end_with_parent

from ..declaration import Analysis, Record
from .parts import DIED, FAILED, REFUSED, PromptResult, schema_of
from .records import own_value
from .work import Resources, Work, columns_of, load_analysis

MAX_DEATHS = 2
"""The number of workers that a prompt may kill before it is abandoned."""
MAX_DEATHS_WITHOUT_RESULT = 20
"""The batch ends when this many times the number of workers have died in a row, since then the prompts are not the cause."""
PATIENCE = 10.0
"""Seconds without a result after which it is checked whether Ray still runs here."""


@dataclass(frozen=True)
class Job:
    """A prompt for one model.

    Attributes:
        model: index into the work's models.
        number: of the prompt in the input.
        record: the prompt.
        deaths: number of workers that have died while running it.
    """

    model: int
    number: int
    record: Record
    deaths: int = 0


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
    """Runs the prompts of one batch, keeping the model of the last one loaded.

    Args:
        work: what is computed.
        own_fields: fields of the records that become columns, with their dtypes.
        threads: threads that torch may use; None does not change them.
        models: the models of ``work``, if they are loaded already.
    """

    def __init__(self, work: Work, own_fields: Mapping[str, str], threads: int | None = None, models: ModelShelf | None = None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with torch's
        if threads is not None:
            torch.set_num_threads(threads)
        self.work, self.analysis, self.own_fields = work, load_analysis(work.analysis, work.folder), own_fields
        self.schema = schema_of(columns_of(self.analysis, own_fields))
        self.schema_of_analysis = schema_of(self.analysis.columns.dtypes)
        self.models = models or ModelShelf(work.models, device=work.device, dtype=work.dtype)

    def run(self, job: Job) -> PromptResult:
        """The result of a prompt.

        Raises:
            KVLensError: the model cannot be loaded.
        """
        model = self.models[job.model]
        with warnings.catch_warnings(record=True) as caught:
            result = self._run(model, job)
        return replace(result, warnings=tuple(dict.fromkeys(_one_line(str(one.message)) for one in caught)))

    def _run(self, model: KVModel, job: Job) -> PromptResult:
        try:
            rows = self._table(model, job)
        except KVLensError as error:
            return _without_rows(job, REFUSED, str(error), _where(error, self.analysis))
        except Exception as error:  # an error on one prompt does not stop the others
            return _without_rows(job, FAILED, f"{type(error).__name__}: {error}", _where(error, self.analysis))
        return PromptResult(job.model, job.number, job.record.id, rows.num_rows, rows=rows)

    def _table(self, model: KVModel, job: Job) -> pa.Table:
        """The rows of a prompt; a value that does not fit its column without loss raises an ``ArrowException``."""
        frame = self.analysis.run(model, job.record, **self.work.options)
        rows = pa.Table.from_pandas(frame, schema=self.schema_of_analysis, preserve_index=False)
        own = {name: own_value(job.record.fields.get(name), dtype) for name, dtype in self.own_fields.items()}
        front = {"model": self.work.models[job.model], "prompt_id": job.record.id, **own}
        same = [pa.array([value] * len(frame), self.schema.field(name).type) for name, value in front.items()]
        return pa.Table.from_arrays([*same, *rows.columns], schema=self.schema)


def _without_rows(job: Job, kind: str, error: str, where: str | None = None) -> PromptResult:
    return PromptResult(job.model, job.number, job.record.id, kind=kind, error=_one_line(error), where=where)


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
    """A worker in another process, which has one prompt at a time."""

    def submit(self, job: Job) -> Future[PromptResult]:
        """Give it a job."""

    def death(self, error: BaseException) -> str | None:
        """Say how it died, if an error of its job means that it did, else None; may raise the error in fewer words."""

    def stop(self) -> None:
        """End it, busy or not, dead or alive."""


class Spawned:
    """A process of this machine, spawned since torch's threads do not survive a fork.

    Each has an executor of its own: one that breaks does not say which of its processes died.
    """

    def __init__(self, *given: object):
        self._given = given
        self._pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)

    def submit(self, job: Job) -> Future[PromptResult]:
        self._job = self._pool.submit(_run, self._given, job)
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
"""That of a spawned process, once it has had a prompt."""


def _run(given: tuple[Any, ...], job: Job) -> PromptResult:
    if not _WORKER:
        _WORKER.append(Worker(*given))
    return _WORKER[0].run(job)


@dataclass(frozen=True)
class RayActor:
    """A `Worker` as an actor of Ray, which itself restarts none."""

    ray: Any
    actor: Any

    def submit(self, job: Job) -> Future[PromptResult]:
        return self.actor.run.remote(job).future()

    def death(self, error: BaseException) -> str | None:
        if isinstance(cause := getattr(error, "cause", None), KVLensError):
            raise cause from None
        kinds = self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError
        return " ".join(str(error).split())[:200] if isinstance(error, kinds) else None

    def stop(self) -> None:
        self.ray.kill(self.actor)


def on_ray(given: tuple[Any, ...], threads: int, gpus: float) -> tuple[Callable[[], RayActor], Callable[[], None]]:
    """Start Ray, or reach its cluster, for a batch.

    Args:
        given: arguments of `Worker`.
        threads: CPUs that Ray reserves for each actor.
        gpus: GPUs that Ray reserves for each: 0.25 puts four on one GPU. With 0 they see none.

    Returns:
        What requests an actor, which starts when the cluster has resources for it; and what raises KVLensError if Ray's daemon
        on this machine is gone, without which results would be waited for without end.

    Raises:
        KVLensError: Ray is not installed, or cannot be started or reached.
    """
    try:
        import ray
    except ImportError as error:
        raise KVLensError("the engine ray needs Ray: pip install -e '.[ray]' in a clone, or pip install ray") from error
    if not ray.is_initialized():
        try:
            ray.init(log_to_driver=False, configure_logging=False)
        except Exception as error:  # a start that takes too long is none of Ray's own errors
            raise KVLensError(f"the engine ray cannot start or reach its cluster: {error}") from error
    new = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(Worker).remote

    def check() -> None:
        here = ray.get_runtime_context().get_node_id()
        if any(node["NodeID"] == here and not node["Alive"] for node in ray.nodes()):
            raise KVLensError(
                "the engine ray: Ray's daemon on this machine died; finished prompts are kept, and the same command resumes "
                "the batch"
            )

    return lambda: RayActor(ray, new(*given)), check


def run_jobs(
    jobs: Iterable[Job],
    work: Work,
    own_fields: Mapping[str, str],
    resources: Resources,
    tell: Callable[[str], None] = print,
    models: ModelShelf | None = None,
) -> Iterator[PromptResult]:
    """Run every job and yield results as they arrive: in the order of the jobs with one process, else in any order.

    Args:
        jobs: the jobs, read as needed.
        work, own_fields: as in `Worker`.
        resources: engine and number of workers.
        tell: called with a message when a worker has died.
        models: the models of ``work``, if this process has them; other processes load their own.

    Raises:
        KVLensError: a model cannot be loaded, Ray is not installed, or workers keep dying.
    """
    n_workers = resources.workers
    threads = resources.threads or max(1, torch.get_num_threads() // n_workers)
    given = work, own_fields, threads
    if resources.engine == "ray":
        start, check = on_ray(given, threads, resources.gpus_per_worker)
        yield from share_out(jobs, start, n_workers, tell, check)
    elif n_workers == 1:
        yield from map(Worker(work, own_fields, resources.threads, models).run, jobs)
    else:
        yield from share_out(jobs, lambda: Spawned(*given), n_workers, tell)


def share_out(
    jobs: Iterable[Job],
    start: Callable[[], Remote],
    n_workers: int,
    tell: Callable[[str], None] = print,
    check: Callable[[], None] = lambda: None,
) -> Iterator[PromptResult]:
    """Keep ``n_workers`` busy until every job is done, replacing those that die; always stop all of them at the end.

    Args:
        jobs, tell: as in :func:`run_jobs`.
        start: starts a worker.
        n_workers: how many there are at a time, at most.
        check: called when nothing has come for a while; raises if nothing will.

    Raises:
        KVLensError: as :func:`run_jobs`.
    """
    waiting, again = iter(jobs), list[Job]()
    busy: dict[Future[PromptResult], tuple[Remote, Job]] = {}
    deaths = 0

    def employ(worker: Remote | None = None) -> None:
        """Give the next job to a worker, or to a new one; without a job there is none."""
        job = again.pop() if again else next(waiting, None)
        if job is not None:
            worker = worker or start()
            busy[worker.submit(job)] = worker, job
        elif worker is not None:
            worker.stop()

    def bury(job: Job, how: str) -> list[PromptResult]:
        """Give a job out again whose worker died, or give it up."""
        if job.deaths < MAX_DEATHS:
            again.append(job)
            return []
        why = f"its worker died {job.deaths} times ({how}); it may need more memory than there is"
        return [_without_rows(job, DIED, why)]

    try:
        for _ in range(n_workers):
            employ()
        while busy:
            done, _ = wait(busy, PATIENCE, FIRST_COMPLETED)
            if not done:
                check()
            for future in done:
                worker, job = busy[future]
                how = None if (error := future.exception()) is None else worker.death(error)
                deaths = 0 if how is None else deaths + 1
                if deaths > MAX_DEATHS_WITHOUT_RESULT * n_workers:
                    raise KVLensError(f"{deaths} workers died one after the other; of the last: {how}")
                if how is None:
                    results = [future.result()]
                    employ(worker)
                else:
                    tell(f"a worker died ({how}); another takes over")
                    worker.stop()
                    results = bury(replace(job, deaths=job.deaths + 1), how)
                    employ()
                del busy[future]
                yield from results
    finally:
        for worker, _ in busy.values():
            worker.stop()
