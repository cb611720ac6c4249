"""What all commands share: signals end a command with a word and the status that a shell expects, and controls become signs."""

import os
import signal

import pytest

from kvlens.cli import main, zoo
from kvlens.terminal import UNREADABLE, visible


@pytest.mark.parametrize(
    ("number", "word", "status"), [(signal.SIGTERM, "terminated", 143), (signal.SIGINT, "interrupted", 130)]
)
def test_a_signal_ends_a_command_with_a_message(number, word, status, monkeypatch, capsys):
    if number == signal.SIGINT:  # a run in the background ignores it from its start
        signal.signal(number, signal.default_int_handler)
    before = signal.getsignal(number)
    monkeypatch.setattr(zoo.zoo, "names", lambda: os.kill(os.getpid(), number))
    assert main(["zoo"]) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"kvlens: {word}\n")
    assert signal.getsignal(number) is before


def test_controls_marks_and_line_ends_become_signs_and_letters_stay():
    assert visible("a\x1b[31m\x07\x9b\u202e\u2066\u200f\u2028\u2029\x85\n\ud800b") == f"a{UNREADABLE}[31m{UNREADABLE * 10}b"
    assert visible("naïve 語 ⏎ é ·") == "naïve 語 ⏎ é ·"
    assert visible("👨\u200d👩 می\u200cخواهم") == "👨\u200d👩 می\u200cخواهم"  # joiners are spelling
