"""SIGKILL at every moment of a write: the old or the new content is there, and the next run leaves nothing of the dead one. Of
two commands that write one folder at the same time, one writes and the other says so."""

import io
import multiprocessing
import os
import re
import signal
import sys
import time
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from typing import NamedTuple

import pytest
from kill_everywhere import kill_everywhere

from kvlens.cli import main
from kvlens.files import atomic, check_folder
from kvlens.papers.harness.run import EXPERIMENT_FOLDER

STEPS = {"bias": 5, "model": 20, "outcome-": 20, "run": 30, "table": 10}
"""At least so many steps each has on the file system. All folders are written by one function, with swaps (here `model`) or
without (`outcome-`); trained models take longer: `kill_everywhere.py FOLDER trained model- outcome`."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STEPS)
def test_killed_before_every_step(kind, tmp_path, monkeypatch):
    if kind.endswith("-"):
        monkeypatch.setattr(atomic, "_swapped", lambda a, b: False)
    assert kill_everywhere(kind, tmp_path / kind) >= STEPS[kind]


pytestmark = pytest.mark.slow
REPRODUCE = ("reproduce", "landscape", "--scale", "tiny", "--out", "d")


class Started(NamedTuple):
    """A command in a fork, which need not import torch again, and what it said on stderr when it ended by itself."""

    process: BaseProcess
    said: SimpleQueue

    def end(self) -> tuple[int, str]:
        """The exit status (minus the signal by which it was killed) and the words."""
        self.process.join(300)
        return self.process.exitcode, "" if self.said.empty() else self.said.get()


def started(folder, *arguments) -> Started:
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()

    def run():
        os.chdir(folder)
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        status = main(list(arguments))
        said.put(sys.stderr.getvalue())
        sys.exit(status)

    process = fork.Process(target=run)
    process.start()
    return Started(process, said)


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_commands_one_writes_and_the_other_says_so(overwrite, tmp_path):
    both = [started(tmp_path, *REPRODUCE, *["--overwrite"] * overwrite) for _ in range(2)]
    ended = [command.end() for command in both]
    failed = [error for status, error in ended if status]
    check_folder(tmp_path / "d", EXPERIMENT_FOLDER, overwrite=True)
    assert os.listdir(tmp_path) == ["d"]
    assert len(failed) == 1 or (overwrite and not failed), ended  # with --overwrite the second may begin after the first
    assert all(re.search("is at work on|already holds", error) for error in failed), ended


def stop_while_at_work(process, folder):
    """Stop it where it holds the lock of its work on d, but not that of d itself, which it takes for a moment now and then."""
    while process.is_alive():
        time.sleep(0.01)
        if (folder / ".d.work.kvlens-lock").exists():
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(0.05)
            if not (folder / ".d.kvlens-lock").exists():
                return
            os.kill(process.pid, signal.SIGCONT)


def test_a_command_that_is_killed_leaves_nothing_and_nobody_else_works_on_its_folder_meanwhile(tmp_path):
    first = started(tmp_path, *REPRODUCE)
    stop_while_at_work(first.process, tmp_path)
    status, error = started(tmp_path, *REPRODUCE, "--overwrite").end()
    assert status == 2 and "another process is at work on" in error, error
    os.kill(first.process.pid, signal.SIGTERM)
    os.kill(first.process.pid, signal.SIGCONT)
    assert first.end()[0] == 143 and not (tmp_path / "d").exists()
    assert started(tmp_path, *REPRODUCE).end()[0] == 0
    check_folder(tmp_path / "d", EXPERIMENT_FOLDER, overwrite=True)
    assert os.listdir(tmp_path) == ["d"]
