"""What somebody reads who picks the project up: the guide's code runs, the citation is whole, every >>> is true."""

import doctest
import importlib
import os
import re
import tomllib
from datetime import datetime
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

import kvlens
from kvlens.components import FEATURE_MAPS

ROOT = Path(__file__).resolve().parents[1]
GUIDE = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S)
CODE = {title: re.findall(r"```python\n(.*?)```", text, flags=re.S) for title, text in GUIDE}
WORKED = [title for title, blocks in CODE.items() if blocks]
WITH_EXAMPLES = (
    "kvlens.kv_bias.kv_bias",
    "kvlens.conversion.convert",
    "kvlens.conversion.softmax.landmark",
    "kvlens.model",
    "kvlens.viz.attention",
    "kvlens.viz.tokens",
    "kvlens.tasks",
    "analyses.declaration",
)


def test_the_guide_has_one_worked_example_each():
    assert WORKED == ["An op", "A feature map", "A conversion method", "An analysis", "A task", "An experiment"]


@pytest.mark.parametrize("title", WORKED)
def test_the_guides_examples_run(title, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "guide"}
    with patch.dict(FEATURE_MAPS):
        for code in CODE[title]:
            exec(compile(code, f"CONTRIBUTING.md, {title}", "exec"), namespace)
    for name, test in list(namespace.items()):
        if name.startswith("test_"):
            test()


def test_the_guide_names_paths_that_exist():
    for path in re.findall(r"`((?:kvlens|analyses|tests|notebooks)/[\w/.]*)`", (ROOT / "CONTRIBUTING.md").read_text()):
        if "PAPER" not in path:
            assert (ROOT / path).exists(), path


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
    assert ".ci/run" in steps
    assert os.access(ROOT / ".ci/run", os.X_OK)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_are_true(module, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    results = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.attempted > 0 and results.failed == 0
