"""Processes that are killed, or that work on one output at the same time: one complete result, and the others say so."""

import os
import re
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens.experiments.shared.outcome import OUTCOME_FOLDER
from kvlens.files import check_folder
from kvlens.report.folder import EXPLANATION_FOLDER, REPORT_FOLDER

pytestmark = pytest.mark.slow
STORY, QUESTION = "Mira keeps a goat. Kaya feeds a donkey.", " Which animal does Kaya keep? Kaya keeps a"
EXPLAIN = ("explain", "--model", "facts-linear", "--prompt", STORY, "--text", QUESTION, "--null", "40", "--out", "d")


def started(folder, *arguments):
    command = [sys.executable, "-m", "kvlens", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("command", ["report", "reproduce"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_commands_one_writes_and_the_other_says_so(command, overwrite, tmp_path):
    model, here = tmp_path / "model", tmp_path / "here"
    here.mkdir()
    tiny_text_model().save(model)
    arguments = {
        "report": ["--model", str(model), "--prompt", PROMPT, "--text", TEXT, "--by", "none", "--new-tokens", "1"],
        "reproduce": ["landscape", "--scale", "tiny"],
    }[command]
    both = [started(here, command, *arguments, "--out", "r", *["--overwrite"] * overwrite) for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    failed = [error for process, error in zip(both, errors, strict=True) if process.returncode]
    check_folder(here / "r", {"report": REPORT_FOLDER, "reproduce": OUTCOME_FOLDER}[command], overwrite=True)
    assert os.listdir(here) == ["r"]
    assert len(failed) == 1 or (overwrite and not failed), errors  # with --overwrite the second may begin after the first
    assert all(re.search("is at work on|already holds", error) for error in failed), errors


def test_an_explanation_that_is_killed_resumes_and_nobody_else_works_on_it_meanwhile(tmp_path):
    kept = tmp_path / "d.unfinished"

    def n_kept():
        return kept.read_bytes().count(b"\n") if kept.exists() else 0

    seen = [0]
    for kill in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        first = started(tmp_path, *EXPLAIN)
        while n_kept() < seen[-1] + 12 and first.poll() is None:
            time.sleep(0.01)
        first.send_signal(signal.SIGSTOP)
        if len(seen) == 1:
            held = kept.read_bytes()
            second = started(tmp_path, *EXPLAIN, "--overwrite")
            _, error = second.communicate(timeout=300)
            assert second.returncode == 2 and "another process is at work on" in error, error
            assert kept.read_bytes() == held
        first.send_signal(kill)
        first.send_signal(signal.SIGCONT)
        _, error = first.communicate(timeout=300)
        assert first.returncode == (143 if kill == signal.SIGTERM else -kill), error
        assert ("What was measured is kept in d.unfinished" in error) == (kill == signal.SIGTERM)
        seen.append(n_kept())
        assert not (tmp_path / "d").exists()
    assert seen == sorted(set(seen)), seen  # each went on where the one before it stopped
    whole = tmp_path / "whole"
    whole.mkdir()
    for folder in (tmp_path, whole):
        last = started(folder, *EXPLAIN)
        assert last.communicate(timeout=300) and last.returncode == 0
        check_folder(folder / "d", EXPLANATION_FOLDER, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["d", "whole"] and os.listdir(whole) == ["d"]
    for name in ("units", "heads", "positions"):
        read = [pd.read_parquet(folder / "d" / f"{name}.parquet") for folder in (tmp_path, whole)]
        pd.testing.assert_frame_equal(*read, check_exact=True)
