"""The interface of an engine that runs workers in other processes: of this machine, or Ray actors."""

from typing import Any, Protocol, runtime_checkable

from .worker import Job, PromptResult


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
