"""Every experiment at its smallest scale: it runs, its folder says what it measured, and the command refuses bad input."""

import json
import os

import pandas as pd
import pytest

from kvlens.cli import main
from kvlens.experiments import EXPERIMENTS, find_experiment


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_tiny_run_leaves_tables_figure_and_comparisons(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["reproduce", name, "--scale", "tiny"]) == 0
    out = capsys.readouterr().out
    folder = tmp_path / f"{name}-tiny"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(os.listdir(folder)) == {"summary.json", *summary["files"]}
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG") and "<svg" in (folder / "figure.svg").read_text()
    tables = [pd.read_parquet(folder / file) for file in summary["files"] if file.endswith(".parquet")]
    assert tables and all(len(table) for table in tables)
    assert summary["comparisons"], "a reproduction puts the paper beside ours"
    for comparison in summary["comparisons"]:
        assert set(comparison) == {"what", "paper", "ours", "claim", "holds", "judged"}
        assert comparison["judged"] or comparison["holds"] is None
        assert comparison["what"] in out
    assert summary["settings"] == json.loads(json.dumps(dict(find_experiment(name).scales["tiny"])))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_names_its_source_scales_and_cost(name):
    experiment = find_experiment(name)
    assert experiment.name == name
    assert experiment.source.split()[0].rstrip(",;") in ("KVSA", "ICLCA", "LECTURE", "DUAL")
    assert set(experiment.scales) == set(experiment.cost) == {"tiny", "small", "paper"}


def test_an_outcome_is_not_replaced_unasked_and_other_folders_never(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["reproduce", "induction-exact", "--scale", "tiny", "--out", "o"]
    assert main(command) == 0
    assert main(command) == 2
    assert "already holds an experiment" in capsys.readouterr().err
    assert main([*command, "--overwrite"]) == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    assert main([*command[:-1], "mine", "--overwrite"]) == 2
    assert "left alone" in capsys.readouterr().err
    assert os.listdir(tmp_path / "mine") == ["notes.txt"]
