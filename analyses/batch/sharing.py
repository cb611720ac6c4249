"""Sharing jobs out among workers that may die.

Workers are killed for their memory, with their machine, by hand. The job that a dead worker held is given out again, one
prompt at a time, so that a prompt that kills its worker is found and costs only itself. Which worker does what decides nothing:
results name their prompts.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from kvlens import KVLensError

from .engine import Engine, WorkerDied
from .worker import DIED, Job, PromptResult

MAX_DEATHS = 2
"""Workers that a prompt, run alone, may kill before it is given up."""
MAX_DEATHS_WITHOUT_RESULT = 20
"""When so many workers times their number have died one after the other, the prompts are not the cause, and the batch ends. (A
job of eight deadly prompts alone makes 17.)"""


def share_out(
    jobs: Iterable[Job], engine: Engine, n_workers: int, tell: Callable[[str], None] = print
) -> Iterator[list[PromptResult]]:
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
    """What is given out again of the job of a dead worker, and what is given up."""
    if job is None:
        return [], []
    if len(job.prompts) > 1:  # which of them it was, they show one by one
        return [replace(job, prompts=(prompt,)) for prompt in job.prompts], []
    if job.deaths + 1 < MAX_DEATHS:
        return [replace(job, deaths=job.deaths + 1)], []
    place, record = job.prompts[0]
    error = f"its worker died {MAX_DEATHS} times ({how}); it may need more memory than there is"
    return [], [PromptResult(job.model, place, record.id, kind=DIED, error=error)]
