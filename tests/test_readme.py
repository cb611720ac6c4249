"""The README's Python examples run, in the order in which they stand, and its commands exist."""

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[1] / "README.md"

SHORTER = {"train": ("--steps", "2"), "reproduce": ("--scale", "tiny")}
"""What makes a command of minutes one of seconds; every word of the README's own stays."""


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
        assert (
            float(re.search(r"relative error: (\S+)", printed).group(1)) < 1e-5
        )  # float32 rounding through the layers: some 1e-6
        assert "answer:  parrot\n" in printed


def test_the_readme_has_examples():
    assert len(blocks("python")) >= 3
    assert len(blocks("bash")) >= 3


def test_what_the_readme_links_to_is_there():
    paths = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert ".github/report.png" in paths
    assert not [path for path in paths if not (README.parent / path).exists()]


def test_the_commands_of_the_readme_are_commands(tmp_path, monkeypatch):
    import shlex

    from kvlens.cli import main

    monkeypatch.chdir(tmp_path)
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [shlex.split(part) for line in lines for part in line.split("&&") if part.split()[:1] == ["kvlens"]]
    assert len(commands) >= 2
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Return a list."}\n{"prompt": "Return", "text": " a"}\n')
    for command in commands:
        assert main([*command[1:], *SHORTER.get(command[1], ())]) == 0, command
