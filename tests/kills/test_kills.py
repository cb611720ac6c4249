"""SIGKILL at every moment of a write: the old or the new content is there, and the next run leaves nothing of the dead one."""

import pytest
from kill_everywhere import kill_everywhere

from kvlens.files import atomic

STEPS = {"bias": 5, "model": 20, "outcome-": 20, "run": 30, "table": 10}
"""At least so many steps each has on the file system. All folders are written by one function, with swaps (here `model`) or
without (`outcome-`); reports and trained models take longer: `kill_everywhere.py FOLDER report trained model- outcome`."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", STEPS)
def test_killed_before_every_step(kind, tmp_path, monkeypatch):
    if kind.endswith("-"):
        monkeypatch.setattr(atomic, "_swapped", lambda a, b: False)
    assert kill_everywhere(kind, tmp_path / kind) >= STEPS[kind]
