"""Running jobs in this process, in spawned processes, or in Ray actors, by one function, :func:`run_jobs`."""

from collections.abc import Callable, Iterable, Iterator

import torch

from .ray_engine import RayEngine
from .sharing import Engine, share_out
from .spawn_engine import SpawnEngine
from .work import Resources, Work
from .worker import Job, ModelShelf, PromptResult, Worker


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
    if resources.engine == "processes" and resources.workers == 1:
        yield from map(Worker(work, resources.threads, models).run, jobs)
        return
    threads = resources.threads or max(1, torch.get_num_threads() // resources.workers)
    engine: Engine = (
        RayEngine(work, threads, resources.gpus_per_worker) if resources.engine == "ray" else SpawnEngine(work, threads)
    )
    yield from share_out(jobs, engine, resources.workers, tell)
