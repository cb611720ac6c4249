"""A batch that is killed again and again until it is done."""

import os
import random
import signal
from pathlib import Path

from kvlens.analyses.batch.runner import Input, run_batch
from kvlens.analyses.batch.work import Resources, Work, load_analysis


def run_killed_often(work: Work, source: Input, out: Path) -> int:
    """Run the batch in forks, which the system kills by a timer of processor time; how many were killed.

    A fork has imported everything, so that it is killed at its work; it ends at once, as by SIGKILL, and as far in its work on
    a busy machine.
    """
    load_analysis(work.analysis)
    pause, kills, attempts = random.Random(0), 0, 0
    while True:
        attempts += 1
        seconds = 0.001 + pause.uniform(0, 0.04 * attempts)  # ever later, so that it comes to an end on any machine
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.setitimer(signal.ITIMER_PROF, seconds)
                run_batch(work, source, out, resources=Resources(prompts_per_job=2), progress=False)
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            assert os.WEXITSTATUS(status) == 0, status
            return kills
        kills += 1
        if out.exists() and not Path(f"{out}.partial").exists():  # killed when all was done
            return kills
