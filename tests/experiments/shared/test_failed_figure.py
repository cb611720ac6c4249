"""An experiment whose figure fails: its tables and its summary are written before the figure is drawn."""

import importlib
import json
import os

import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvlens.cli import main
from kvlens.experiments.shared.outcome import OUTCOME_FOLDER
from kvlens.files import check_folder


def no_figure(*drawn):
    raise ZeroDivisionError("no axes")


def one_that_cannot_be_rendered(*drawn):
    figure = Figure()
    figure.text(0, 0, r"$\no_such_symbol$")
    return figure


def interrupted(*drawn):
    raise KeyboardInterrupt


@pytest.mark.parametrize("draw", [no_figure, one_that_cannot_be_rendered, interrupted])
def test_an_experiment_whose_figure_fails_keeps_its_tables(draw, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "landscape", "--scale", "tiny", "--out", "whole"]) == 0
    monkeypatch.setattr(importlib.import_module("kvlens.experiments.kvsa.landscape"), "draw", draw)
    assert main(["reproduce", "landscape", "--scale", "tiny", "--out", "x"]) == (130 if draw is interrupted else 2)
    error = capsys.readouterr().err.splitlines()[-1]
    if draw is not interrupted:
        assert error.startswith("kvlens: error: landscape: the figure cannot be drawn (")
        assert error.endswith("); tables and summary.json are in x")
    summary = json.loads((tmp_path / "x" / "summary.json").read_text())
    assert {*summary["files"], "summary.json"} == set(os.listdir("x")) == {"landscape.parquet", "path.parquet", "summary.json"}
    for name in summary["files"]:
        whole, kept = (pd.read_parquet(tmp_path / folder / name) for folder in ("whole", "x"))
        pd.testing.assert_frame_equal(kept, whole, check_exact=True)
    check_folder(tmp_path / "x", OUTCOME_FOLDER, overwrite=True)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", "landscape", "--scale", "tiny", "--out", "x", "--overwrite"]) == 0
    assert set(os.listdir("x")) == set(os.listdir("whole")) > {"figure.png", "figure.svg"}
