"""Workers as Ray actors, on this machine, several machines, or the GPUs of a cluster: ``pip install -e '.[ray]'``.

Without a running cluster (``RAY_ADDRESS``, or one started on this machine) Ray starts one here. On a cluster, every machine
needs kvlens, and the model folders under the same paths.
"""

from dataclasses import dataclass
from typing import Any

from kvlens import KVLensError

from .sharing import WorkerDied
from .work import Work
from .worker import Job, PromptResult, Worker

PATIENCE = 10.0
"""Seconds without an answer after which it is checked whether Ray still runs here."""


@dataclass(eq=False)
class ActorWorker:
    """A Ray actor, and the reference to its pending answer."""

    actor: Any
    answer: Any


class RayEngine:
    """An :class:`kvlens.analyses.batch.sharing.Engine` of Ray actors that keep their model.

    Ray itself restarts nothing: the scheduler of the jobs replaces a dead actor, on any machine with free resources, and
    reassigns its job.

    Args:
        work: what they compute.
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
        self.ray = ray
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False, configure_logging=False)
            except Exception as error:  # a start that takes too long is none of Ray's own errors
                raise KVLensError(f"the engine ray cannot start or reach its cluster: {error}") from error
        self._arguments = (work, threads)
        self._new = ray.remote(num_cpus=threads, num_gpus=gpus, max_restarts=0)(Worker).remote

    def start(self) -> ActorWorker:
        """Request an actor; it starts when the cluster has resources for it."""
        actor: Any = self._new(*self._arguments)
        return ActorWorker(actor, actor.ready.remote())

    def submit(self, worker: ActorWorker, job: Job) -> None:
        """Send a job; an actor that has just died is found by ``collect``."""
        worker.answer = worker.actor.run.remote(job)

    def wait(self, workers: list[ActorWorker]) -> list[ActorWorker]:
        """Return the workers that have answered or died.

        Raises:
            KVLensError: Ray's daemon on this machine is gone, without which new actors would be waited for without end.
        """
        ready: list[Any] = []
        while not ready:
            answers = [worker.answer for worker in workers]
            ready, _ = self.ray.wait(answers, num_returns=1, timeout=PATIENCE, fetch_local=False)
            here = self.ray.get_runtime_context().get_node_id()
            if not ready and any(node["NodeID"] == here and not node["Alive"] for node in self.ray.nodes()):
                raise KVLensError("the engine ray: Ray's daemon on this machine died; finished prompts are kept, and the same "
                                  "command resumes the batch")  # fmt: skip
        return [worker for worker in workers if worker.answer in ready]

    def collect(self, worker: ActorWorker) -> list[PromptResult]:
        """Fetch the answer.

        Raises:
            WorkerDied: the actor, or the machine that has its answer, is gone.
            KVLensError: the worker raised it.
        """
        try:
            return self.ray.get(worker.answer)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.ObjectLostError) as error:
            raise WorkerDied(" ".join(str(error).split())[:200]) from None
        except self.ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, KVLensError) else error) from None

    def stop(self, worker: ActorWorker) -> None:
        """Kill the actor and give its CPUs and GPUs back."""
        self.ray.kill(worker.actor)
