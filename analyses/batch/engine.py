"""What a way to run workers elsewhere has to offer: processes of this machine, or Ray actors."""

from typing import Any, Protocol, runtime_checkable

from .worker import Job, PromptResult


class WorkerDied(Exception):
    """A worker is gone, and what it held is not done. The message says how."""


@runtime_checkable
class Engine(Protocol):
    """A way to run workers elsewhere. A worker is whatever ``start`` returns; it holds one job at a time."""

    def start(self) -> Any:
        """Start a worker without waiting for it; its first answer is no result."""

    def submit(self, worker: Any, job: Job) -> None:
        """Give a worker that has answered its next job; ``wait`` and ``collect`` report a death."""

    def wait(self, workers: list[Any]) -> list[Any]:
        """Wait until at least one of these has answered or died, and return those."""

    def collect(self, worker: Any) -> list[PromptResult]:
        """The answer; raises WorkerDied, or KVLensError where the job cannot be run by any worker."""

    def stop(self, worker: Any) -> None:
        """End a worker, busy or not, dead or alive."""
