"""Warnings of a batch: each once, in one line, whatever the number of prompts and workers; and what its help asks for."""

import json
import sys
import warnings

import pytest
from kvlens.analyses.batch.script import analyse

from kvlens.cli import main
from kvlens.terminal import plain_warnings

MODULE = """
import warnings

from kvlens.analyses import Columns, analysis
from kvlens.errors import warn

COLUMNS = Columns(letter=("str", ""))


@analysis(COLUMNS, "the first letter")
def first(model, prompt):
    warn(f"{100 / (1 + len(prompt)):.3g} % of it is lost")
    warnings.warn("the same in " + " ".join(["every"] * 3) + "\\nprompt", stacklevel=2)
    return COLUMNS.frame({"letter": ["x"]})
"""


@pytest.fixture
def command(model_folder, tmp_path, monkeypatch):
    (tmp_path / "one_that_warns.py").write_text(MODULE)
    prompts = [{"id": str(i), "prompt": "abcdefghij"[: 1 + i % 10]} for i in range(30)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return ["analyse", "one_that_warns:first", "p.jsonl", "--model", str(model_folder), "--out", "t.parquet", "--threads", "1"]


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("default")
def test_a_warning_of_thirty_prompts_is_told_once_without_its_line_of_code(workers, command, capsys):
    assert main([*command, "--workers", workers]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "warn" in line.lower()]
    assert len(told) == 2 and told[1] == "warning: the same in every every every prompt", told
    assert told[0].startswith("warning: ") and told[0].endswith(" % of it is lost")


@pytest.mark.filterwarnings("default")
def test_other_warnings_of_a_command_are_one_line_once(capsys):
    shown = warnings.showwarning
    with plain_warnings():
        for number in range(3):
            warnings.warn(f"{number}.5 % of it\nis \x1b[31mlost", stacklevel=1)
        warnings.warn("another", stacklevel=1)
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("warning: 0.5 % of it is ") and "\x1b" not in first and second == "warning: another"
    assert warnings.showwarning is shown


def test_the_help_says_what_a_user_gives(capsys):
    assert analyse(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "a function of your own as MODULE:FUNCTION" in text and "decorator kvlens.analyses.analysis" in text
    assert "kvlens.analyses.Analysis" not in text and 'kvlens.read_table("FILE")' in text
