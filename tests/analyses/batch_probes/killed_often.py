"""``python killed_often.py PROMPTS MODEL OUT``: run a batch, have it killed again and again, and print how often.

The batch runs in forks of a process that has imported everything, so that it is killed at its work and not while importing.
The system kills it, by a timer of processor time: it ends at once, as by SIGKILL, and as far in its work on a busy machine.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch

from analyses.batch.runner import Input, run_batch
from analyses.batch.work import Resources, Work, load_analysis


def main(prompts: str, model: str, out: str) -> None:
    work, source, pause = Work("bias_by_head", (model,)), Input(Path(prompts)), random.Random(0)
    load_analysis(work.analysis)
    torch.set_num_threads(1)  # as in the tests: the last bits of a sum depend on it
    kills, attempts = 0, 0
    while True:
        attempts += 1
        seconds = 0.001 + pause.uniform(0, 0.04 * attempts)  # ever later, so that it comes to an end on any machine
        child = os.fork()
        if child == 0:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            run_batch(work, source, out, resources=Resources(prompts_per_job=2), progress=False)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not os.WIFSIGNALED(status):
            break
        kills += 1
        if Path(out).exists() and not Path(f"{out}.partial").exists():  # killed when all was done
            status = 0
            break
    assert os.WEXITSTATUS(status) == 0, status
    print(kills)


if __name__ == "__main__":
    main(*sys.argv[1:])
