"""Distributing jobs to workers that may die.

Workers may be killed for their memory, with their machine, or by hand. The job of a dead worker is reassigned one prompt at a
time, so that a prompt that kills its worker is identified, and only its rows are lost. It does not matter which worker runs
which job, since results carry the numbers of their prompts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from kvlens import KVLensError

from .worker import DIED, Job, PromptResult

MAX_DEATHS = 2
"""The number of workers that a prompt, run alone, may kill before it is abandoned."""
MAX_DEATHS_WITHOUT_RESULT = 20
"""The batch ends when this many times the number of workers have died in a row, since then the prompts are not the cause. (A
single job of eight prompts that all kill their worker accounts for 17.)"""


class WorkerDied(Exception):
    """A worker died before it finished its job. The message says how."""


@runtime_checkable
class Engine(Protocol):
    """Runs workers in other processes. A worker is whatever ``start`` returns; it has one job at a time."""

    def start(self) -> Any:
        """Start a worker without waiting for it; its first answer only says that it is ready."""

    def submit(self, worker: Any, job: Job) -> None:
        """Give the next job to a worker that has answered; ``wait`` and ``collect`` report a death."""

    def wait(self, workers: list[Any]) -> list[Any]:
        """Wait until at least one of these has answered or died, and return those."""

    def collect(self, worker: Any) -> list[PromptResult]:
        """Return the answer; raises WorkerDied, or KVLensError if no worker can run the job."""

    def stop(self, worker: Any) -> None:
        """End a worker, busy or not, dead or alive."""


def share_out(
    jobs: Iterable[Job], engine: Engine, n_workers: int, tell: Callable[[str], None] = print
) -> Iterator[list[PromptResult]]:
    """Keep ``n_workers`` busy until every job is done, replacing those that die; always stop all of them at the end.

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
                    results = engine.collect(worker)
                except WorkerDied as death:
                    deaths += 1
                    if deaths > MAX_DEATHS_WITHOUT_RESULT * n_workers:
                        raise KVLensError(f"{deaths} workers died one after the other; of the last: {death}") from death
                    tell(f"a worker died ({death}); another takes over")
                    engine.stop(worker)
                    retries, results = _after_death(holds.pop(worker), str(death))
                    again.extend(retries)
                    holds[engine.start()] = None
                else:
                    deaths = 0 if results else deaths
                    job = holds[worker] = again.popleft() if again else next(waiting, None)
                    if job is not None:
                        engine.submit(worker, job)
                    else:
                        del holds[worker]
                        engine.stop(worker)
                if results:
                    yield results
    finally:
        for worker in holds:
            engine.stop(worker)


def _after_death(job: Job | None, how: str) -> tuple[list[Job], list[PromptResult]]:
    """The jobs to reassign and the prompts to abandon after a worker died."""
    if job is None:
        return [], []
    if len(job.prompts) > 1:  # run them one by one to find the one that kills its worker
        return [replace(job, prompts=(prompt,)) for prompt in job.prompts], []
    if job.deaths + 1 < MAX_DEATHS:
        return [replace(job, deaths=job.deaths + 1)], []
    number, record = job.prompts[0]
    error = f"its worker died {MAX_DEATHS} times ({how}); it may need more memory than there is"
    return [], [PromptResult(job.model, number, record.id, kind=DIED, error=error)]
