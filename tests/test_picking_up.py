"""What somebody reads who picks the project up: the guide's code runs, the citation is whole, every >>> is true."""

import doctest
import functools
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import kvlens
from kvlens.cli import main
from kvlens.components import FEATURE_MAPS

ROOT = Path(__file__).resolve().parents[1]
GUIDE, READING = ((ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "docs/reading.md"))
RECIPES = {
    "An op": "kvlens.ops",
    "A feature map": "kvlens.components.feature_maps",
    "A recurrent rule": "kvlens.mixers",
    "A conversion method": "kvlens.conversion.method",
    "A task": "kvlens.tasks",
    "An experiment": "kvlens.papers.harness",
}
"""The docstring that has each recipe; that of an analysis stands in the guide."""
CODE = {title: importlib.import_module(name).__doc__ or "" for title, name in RECIPES.items()} | {"An analysis": GUIDE}
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("kvlens", "analyses")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"^ *>>> ", path.read_text(encoding="utf-8"), re.M)
)


@pytest.mark.parametrize("title", CODE)
def test_the_recipes_run(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "guide"}
    with patch.dict(FEATURE_MAPS):
        blocks = re.findall(r"```python\n(.*?)```", CODE[title], flags=re.S)
        for code in blocks:
            exec(compile(code, title, "exec"), namespace)
    assert blocks
    for name, test in list(namespace.items()):
        if name.startswith("test_"):
            test()


def test_the_guide_and_the_recipes_name_paths_that_exist():
    for path in re.findall(r"`((?:kvlens|analyses|tests|notebooks)/[\w/.]*)`", READING + "".join(CODE.values())):
        if "PAPER" not in path:
            assert (ROOT / path).exists(), path
    assert all(f"**{title}" in GUIDE or f"## {title}" in GUIDE for title in CODE)


def test_the_files_and_the_walk_of_a_prompt():
    files = set(re.findall(r"`([\w/]+\.py)`", READING.partition("## The files")[2]))
    assert len(files) == 31 and sum(len((ROOT / file).read_text().splitlines()) for file in files) < 10_100
    steps = re.findall(r"^\d+\. `([\w.]+)` \(`([\w/]+)\.py`\)", READING, re.M)
    assert len(steps) == 16
    for name, file in steps:
        module = importlib.import_module(file.replace("/", "."))
        found = functools.reduce(getattr, name.split("."), module)
        assert inspect.unwrap(found).__module__ == module.__name__, name


def test_the_citation_is_whole_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format demands
    assert citation["version"] == kvlens.__version__
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    allowed = {"article", "book", "conference-paper", "generic", "report", "software"}
    for reference in citation["references"]:
        assert reference["type"] in allowed and reference["title"] and 2020 < reference["year"] <= datetime.now().year
        assert all(set(author) <= {"family-names", "given-names"} for author in reference["authors"])


def test_the_workflow_runs_what_a_person_runs():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    assert ".ci/run" in steps and any("pip wheel" in step for step in steps)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    checks = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert [hook["id"] for hook in hooks] == ["ruff", "ruff-format", "mypy"]
    assert all(" ".join(hook["entry"].split()[:2]) in checks for hook in hooks) and "sphinx-build" in checks
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0 and results.failed == 0


README = Path(__file__).resolve().parents[1] / "README.md"


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_examples_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "readme"}
    exec(compile(blocks("python")[number], f"README.md, example {number + 1}", "exec"), namespace)
    assert namespace["model"].to_string(namespace["logits"][0, -1].argmax()) == " parrot"


def test_the_readme_is_short_and_begins_with_two_commands():
    assert len(README.read_bytes()) <= 7_000
    assert blocks("python") and blocks("bash")[0] == "pip install -e . && kvlens explain\n"
    assert blocks("bash")[1].startswith("pip install") and blocks("bash")[1].endswith("python -m pytest -n auto\n")


def test_what_the_readme_links_to_is_there():
    paths = re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text(encoding="utf-8"))
    assert ".github/explanation.png" in paths
    assert not [path for path in paths if not (README.parent / path).exists()]


IN_SECONDS = {"train": ["--steps", "2"], "reproduce": ["--scale", "tiny"], "analyse": ["--workers", "1"]}
"""What is added to a command so that it takes seconds and starts no processes (``test_engines.py`` does)."""
BY_OTHERS = ("python", "sphinx-build", "ray")
"""Commands that ``.ci/run`` runs itself, or that need a cluster."""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="the commands are a shell's: needs bash")
def test_the_commands_of_readme_and_pages_run_one_after_the_other_in_an_empty_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    has_gguf = importlib.util.find_spec("gguf") is not None
    if has_gguf:
        from test_gguf import write

        write(tmp_path / "chat.gguf")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Return a list of widgets."}\n{"prompt": "Sort the list."}\n')
    message = {"role": "user", "content": "the cat sat on the mat. where is the cat?"}
    asked = {"question": "is the mat red?", "documents": {"rooms.txt": "the mat is red. the cat is old."}, "answer": "red"}
    chats = [{"messages": [message], "answer": "the mat"}, asked]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    pages = [README, ROOT / "docs/start.md", *sorted((ROOT / "docs/how-to").glob("*.md"))]
    lines = [line for page in pages for block in blocks("bash", page) for line in block.splitlines()]
    commands = [command for line in lines for command in line.split(" && ")]
    assert sum(command.startswith("kvlens ") for command in commands) >= 6
    for command in commands:
        program, *words = shlex.split(command, comments=True)
        if "chat.gguf" in words and not has_gguf:
            continue  # needs the extra gguf
        if program in BY_OTHERS or "--download" in words or words[:1] == ["app"]:
            continue  # of a real model: tests/real/test_explanation.py; a server: tests/test_app.py
        if program == "kvlens":
            assert main([*words, *IN_SECONDS.get(words[0], [])]) == 0, capsys.readouterr().err
        elif program == "pip":
            assert words[0] == "install"
        else:
            subprocess.run(["bash", "-c", command], check=True)
    assert {"minutes.txt", "table.parquet", "run"} <= {path.name for path in tmp_path.iterdir()}
    assert "2 prompts" in capsys.readouterr().out
