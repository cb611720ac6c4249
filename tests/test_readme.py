"""The README's Python examples run, in the order in which they stand, and its commands run."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from kvlens.cli import main

README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run(number, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code = blocks("python")[number]
    namespace: dict = {"__name__": "readme"}
    exec(compile(code, f"README.md, example {number + 1}", "exec"), namespace)
    if "relative error" in code:
        printed = capsys.readouterr().out
        # float32 rounding through the layers: some 1e-6 of ten times as much allowed
        assert float(re.search(r"relative error: (\S+)", printed).group(1)) < 1e-5
        assert "answer:  parrot\n" in printed


def test_the_readme_has_examples():
    assert len(blocks("python")) >= 2
    assert len(blocks("bash")) >= 3


def test_the_readme_is_short():
    assert len(README.read_bytes()) <= 10_000


def test_what_the_readme_links_to_is_there():
    paths = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert ".github/explanation.png" in paths
    assert not [path for path in paths if not (README.parent / path).exists()]


IN_SECONDS = {"train": ["--steps", "2"], "reproduce": ["--scale", "tiny"], "analyse": ["--workers", "1"]}
"""What is added to a command so that it takes seconds and starts no processes (``test_engines.py`` does)."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="the README's commands are a shell's: needs bash")
def test_the_commands_of_the_readme_run_one_after_the_other_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    commands = [command for block in blocks("bash") for line in block.splitlines() for command in line.split(" && ")]
    assert sum(command.startswith("kvlens ") for command in commands) >= 6
    for command in commands:
        program, *words = shlex.split(command)
        if "--download" in words:
            continue  # of a real model: tests/real/test_readme_command.py
        if program == "kvlens":
            assert main([*words, *IN_SECONDS.get(words[0], [])]) == 0, capsys.readouterr().err
        elif program == "pip":
            assert words[0] == "install"
        else:
            subprocess.run(["bash", "-c", command], check=True)
    assert {"report", "my-report", "prompts.jsonl", "table.parquet", "run"} <= {path.name for path in tmp_path.iterdir()}
    assert "2 prompts" in capsys.readouterr().out
