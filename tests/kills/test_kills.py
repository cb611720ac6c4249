"""SIGKILL at every moment of a write: the old or the new content is there, and the next run leaves nothing of the dead one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
STEPS = {"bias": 5, "model": 20, "outcome-": 20, "run": 30, "table": 10}
"""At least so many steps each has on the file system. All folders are written by one function, with swaps (here `model`) or
without (`outcome-`); reports and trained models take longer: `kill_everywhere.py FOLDER report trained model- outcome`."""


@pytest.mark.slow
def test_killed_before_every_step(tmp_path):
    path = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "training"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__).with_name("kill_everywhere.py")), str(tmp_path), *STEPS]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    kills = dict(line.split() for line in done.stdout.splitlines())
    assert list(kills) == list(STEPS) and all(int(kills[kind]) >= fewest for kind, fewest in STEPS.items()), kills
