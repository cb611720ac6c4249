"""The progress bar of a long pass: only on a terminal, only in the main process, and not if the caller shows the progress."""

import io
import sys

import pytest
from kvlens.analyses.segments import bar_unless

from kvlens.analyses import segments


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stderr", "worker", "shown"), [(Terminal(), None, True), (io.StringIO(), None, False), (Terminal(), object(), False)]
)
def test_a_bar_shows_on_a_terminal_and_goes(monkeypatch, stderr, worker, shown):
    monkeypatch.setattr(segments, "BAR_AFTER", 0)
    monkeypatch.setattr(segments.multiprocessing, "parent_process", lambda: worker)
    monkeypatch.setattr(sys, "stderr", stderr)
    with bar_unless(None, "looking") as tell:
        tell(0.5)
    assert ("looking" in stderr.getvalue()) == shown
    assert stderr.getvalue().split("\r")[-1].strip() == ""


def test_a_bar_shows_in_a_notebook_that_has_no_terminal(monkeypatch):
    seen = {}

    class tqdm_notebook(segments.tqdm):
        def __init__(self, **options):
            seen.update(options)
            super().__init__(**options | {"disable": True})

    monkeypatch.setattr(segments, "tqdm", tqdm_notebook)
    with bar_unless(None, "looking") as tell:
        tell(0.5)
    assert seen["disable"] is False


def test_a_callback_is_called_instead_of_showing_a_bar():
    told = []
    with bar_unless(told.append, "looking") as tell:
        tell(0.25)
    assert told == [0.25]
