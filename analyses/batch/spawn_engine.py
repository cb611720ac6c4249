"""Workers as spawned processes of this machine, each with its own pipe.

The pools of the standard library are not suitable: ``multiprocessing.Pool`` waits forever for a worker that was killed, and
``ProcessPoolExecutor`` fails every job in flight without saying which worker died. With one pipe per worker, the end of file
identifies the worker that died, and the others are not affected.
"""

import contextlib
import multiprocessing
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from kvlens import KVLensError

from .sharing import WorkerDied
from .work import Work
from .worker import Job, PromptResult, Worker


@dataclass(frozen=True, eq=False)
class SpawnedWorker:
    """A process and our end of its pipe."""

    process: BaseProcess
    pipe: Connection


class SpawnEngine:
    """An :class:`kvlens.analyses.batch.sharing.Engine` of processes, spawned since torch's threads do not survive a fork.

    Args:
        work: what they compute.
        threads: threads that each may use.
    """

    def __init__(self, work: Work, threads: int):
        self.work, self.threads = work, threads
        self._context = multiprocessing.get_context("spawn")

    def start(self) -> SpawnedWorker:
        """Start a process, without waiting until it has loaded torch."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, self.work, self.threads), daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        return SpawnedWorker(process, ours)

    def submit(self, worker: SpawnedWorker, job: Job) -> None:
        """Send a job; a process that has just died is found by ``wait``."""
        with contextlib.suppress(OSError):
            worker.pipe.send(job)

    def wait(self, workers: list[SpawnedWorker]) -> list[SpawnedWorker]:
        """Return the workers whose pipe has an answer, or has ended."""
        ready = set(wait([worker.pipe for worker in workers]))
        return [worker for worker in workers if worker.pipe in ready]

    def collect(self, worker: SpawnedWorker) -> list[PromptResult]:
        """Receive the answer.

        Raises:
            WorkerDied: there is no complete answer.
            KVLensError: the worker raised it.
        """
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join(timeout=10)
            raise WorkerDied(_how(worker.process.exitcode)) from None
        if isinstance(answer, str):
            raise KVLensError(answer)
        return answer

    def stop(self, worker: SpawnedWorker) -> None:
        """Kill the process; it has nothing to clean up."""
        worker.process.kill()
        worker.process.join()
        worker.process.close()
        worker.pipe.close()


def _how(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"


def _serve(pipe: Connection, work: Work, threads: int) -> None:
    """The main loop of a worker: answer every job, until the other end of the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches the whole group: end without a traceback
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        try:
            worker = Worker(work, threads)
            pipe.send(worker.ready())
            while True:
                pipe.send(worker.run(pipe.recv()))
        except KVLensError as error:
            pipe.send(str(error))
