"""An experiment whose figure fails: its tables and its summary are written before the figure is drawn."""

import importlib
import json
import os

import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvlens.cli import main
from kvlens.files import check_folder
from kvlens.papers.harness.run import EXPERIMENT_FOLDER

COMMAND = ["reproduce", "gradient-descent", "--scale", "tiny", "--out"]


def no_figure(*drawn):
    raise ZeroDivisionError("no axes")


def one_that_cannot_be_rendered(*drawn):
    figure = Figure()
    figure.text(0, 0, r"$\no_such_symbol$")
    return figure


def interrupted(*drawn):
    raise KeyboardInterrupt


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An experiment's folder, complete."""
    folder = tmp_path_factory.mktemp("whole") / "o"
    assert main([*COMMAND, str(folder)]) == 0
    return folder


@pytest.mark.parametrize("draw", [no_figure, one_that_cannot_be_rendered, interrupted])
def test_an_experiment_whose_figure_fails_keeps_its_tables(draw, whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.import_module("kvlens.papers.dual.gradient_descent"), "draw", draw)
    assert main([*COMMAND, "x"]) == (130 if draw is interrupted else 2)
    error = capsys.readouterr().err.splitlines()[-1]
    if draw is not interrupted:
        assert error.startswith("kvlens: error: gradient-descent: the figure cannot be drawn (")
        assert error.endswith("); tables and summary.json are in x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert {*summary["files"], "summary.json"} == set(os.listdir("x")) == {"tasks.parquet", "summary.json"}
    for name in summary["files"]:
        kept, expected = (pd.read_parquet(folder / name) for folder in (tmp_path / "x", whole))
        pd.testing.assert_frame_equal(kept, expected, check_exact=True)
    check_folder(tmp_path / "x", EXPERIMENT_FOLDER, overwrite=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main([*COMMAND, "x", "--overwrite"]) == 0
    assert set(os.listdir("x")) == set(os.listdir(whole)) > {"figure.png", "figure.svg"}
