"""Running jobs: here, in spawned processes, or in Ray actors, behind one function, :func:`run_jobs`.

Workers may die: killed for their memory, with their machine, by hand. The job that a dead worker held is given out again, one
prompt at a time, so that a prompt that kills its worker is found and costs only itself. Which worker does what decides nothing:
outcomes name their prompts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import torch

from analyses.batch.models import ModelShelf
from analyses.batch.task import Resources, Task
from analyses.batch.worker import DIED, Job, Outcome, Worker
from kvlens import KVLensError

MAX_DEATHS = 2
"""Workers that a prompt, run alone, may kill before it is given up."""
MAX_DEATHS_WITHOUT_RESULT = 20
"""Deaths in a row, a worker, from which it is not the prompts that kill. A job of eight deadly prompts makes 17."""


class WorkerDied(Exception):
    """A worker is gone, and what it held is not done. The message says how."""


class Engine(Protocol):
    """A way to run workers elsewhere. A worker is whatever ``start`` returns; it holds one job at a time."""

    def start(self) -> Any:
        """Start a worker without waiting for it; its first answer is no outcome."""

    def submit(self, worker: Any, job: Job) -> None:
        """Give a worker that has answered its next job; a death is told by ``wait`` and ``collect``."""

    def wait(self, workers: list[Any]) -> list[Any]:
        """Wait until at least one of these has answered or died, and return those."""

    def collect(self, worker: Any) -> list[Outcome]:
        """The answer; raises WorkerDied, or KVLensError where the job cannot be run by any worker."""

    def stop(self, worker: Any) -> None:
        """End a worker, busy or not, dead or alive."""


def run_jobs(
    jobs: Iterable[Job],
    task: Task,
    resources: Resources,
    tell: Callable[[str], None] = print,
    models: ModelShelf | None = None,
) -> Iterator[list[Outcome]]:
    """Run every job and yield the outcomes as they come: in order of the jobs with one process, else in any order.

    Args:
        jobs: read as they are needed.
        task: what is computed.
        resources: which engine, and how many workers.
        tell: called with a line when a worker has died.
        models: the task's, where they are at hand in this process; other processes load their own.

    Raises:
        KVLensError: a model cannot be loaded, Ray is not installed, or workers die whatever they do.
    """
    if resources.engine == "processes" and resources.workers == 1:
        yield from map(Worker(task, resources.threads, models).run, jobs)
        return
    threads = resources.threads or max(1, torch.get_num_threads() // resources.workers)
    engine: Engine
    if resources.engine == "ray":
        from analyses.batch.ray_engine import RayEngine

        engine = RayEngine(task, threads, resources.gpus_per_worker)
    else:
        from analyses.batch.spawn_engine import SpawnEngine

        engine = SpawnEngine(task, threads)
    yield from share_out(jobs, engine, resources.workers, tell)


def share_out(
    jobs: Iterable[Job], engine: Engine, n_workers: int, tell: Callable[[str], None] = print
) -> Iterator[list[Outcome]]:
    """Keep ``n_workers`` busy until every job is done, replacing those that die; stop all of them at the end, however it comes.

    Raises:
        KVLensError: as :func:`run_jobs`.
    """
    waiting = iter(jobs)
    again = deque(islice(waiting, n_workers))
    holds: dict[Any, Job | None] = {}
    deaths = 0
    try:
        for _ in range(len(again)):  # no more workers than jobs
            holds[engine.start()] = None
        while holds:
            for worker in engine.wait(list(holds)):
                try:
                    outcomes = engine.collect(worker)
                except WorkerDied as death:
                    deaths += 1
                    if deaths > MAX_DEATHS_WITHOUT_RESULT * n_workers:
                        raise KVLensError(f"{deaths} workers died one after the other; of the last: {death}") from death
                    tell(f"a worker died ({death}); another takes over")
                    engine.stop(worker)
                    retries, outcomes = _after_death(holds.pop(worker), str(death))
                    again.extend(retries)
                    holds[engine.start()] = None
                else:
                    deaths = 0 if outcomes else deaths
                    job = holds[worker] = again.popleft() if again else next(waiting, None)
                    if job is not None:
                        engine.submit(worker, job)
                    else:
                        del holds[worker]
                        engine.stop(worker)
                if outcomes:
                    yield outcomes
    finally:
        for worker in holds:
            engine.stop(worker)


def _after_death(job: Job | None, how: str) -> tuple[list[Job], list[Outcome]]:
    """What is given out again of the job of a dead worker, and what is given up."""
    if job is None:
        return [], []
    if len(job.prompts) > 1:  # which of them it was, they show one by one
        return [replace(job, prompts=(prompt,)) for prompt in job.prompts], []
    if job.deaths + 1 < MAX_DEATHS:
        return [replace(job, deaths=job.deaths + 1)], []
    place, record = job.prompts[0]
    error = f"its worker died {MAX_DEATHS} times ({how}); it may need more memory than there is"
    return [], [Outcome(job.model, place, record.id, kind=DIED, error=error)]
