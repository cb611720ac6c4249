"""What is wrong with a command line is answered before torch is imported, as far as that needs no torch."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from kvlens.analyses.batch.arguments import declared_in
from kvlens.analyses.batch.work import load_analysis

from kvlens.analyses import ANALYSES
from kvlens.cli import main

GOOD = ["p.txt", "--model", "docs-linear", "--out", "t.parquet"]
ANSWERED_EARLY = {
    "there is no such option": ["--bogus", "3"],
    "did you mean '--retry-failed'": ["--retry-faild"],
    "no column 'layr'": ["--columns", "layr"],
    "invalid choice": ["--dtype", "int8"],
    "workers: at most": ["--workers", "99999"],
    "did you mean 'docs-linear'": ["--model", "docs-linaer"],
    "expected a file that ends in .parquet": ["--out", "t.csv"],
    "prompts: cannot read nowhere.txt": ["nowhere.txt"],
    "File name too long": ["--out", f"{'x' * 300}.parquet"],
}


@pytest.mark.parametrize("name", ANALYSES)
def test_the_text_of_the_module_says_what_the_declaration_says(name):
    read, analysis = declared_in(name), load_analysis(name)
    assert read is not None and read.reads_prompts == bool(analysis.inputs)
    assert read.options == {option: isinstance(default, bool) for option, default in analysis.defaults.items()}
    assert read.columns in (None, tuple(analysis.columns))


def test_torch_is_not_imported_to_say_what_is_wrong(tmp_path):
    (tmp_path / "p.txt").write_text("ab\n")
    code = f"""
import contextlib, io, sys
from kvlens.cli import main
for words, more in {ANSWERED_EARLY!r}.items():
    given = {GOOD!r}[1:] if more == ["nowhere.txt"] else {GOOD!r}
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        assert main(["analyse", "dual_losses", *given, *more]) == 2, more
    assert words in error.getvalue() or words.startswith("there is no"), (words, error.getvalue())
    assert not {{"torch", "pandas"}} & set(sys.modules), more
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]


def test_weights_alone_need_no_prompts_and_run_once_a_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    models = ["--model", "docs-linear", "--model", "docs-shift"]
    assert main(["analyse", "composition", *models, "--kinds", "Q", "--out", "t.parquet"]) == 0
    assert capsys.readouterr().out == "Written to t.parquet: 432 rows of 2 models\n"
    Path("p.txt").write_text("one\ntwo\nthree\n")
    assert main(["analyse", "composition", *models, "p.txt", "--kinds", "Q", "--out", "u.parquet"]) == 0
    told = capsys.readouterr()
    assert "composition reads the weights alone, and runs once per model; p.txt is not read" in told.err
    table = pd.read_parquet("t.parquet")
    pd.testing.assert_frame_equal(table, pd.read_parquet("u.parquet"))
    assert set(table["prompt_id"]) == {"none"} and not table.duplicated().any()


def test_other_analyses_say_that_prompts_are_missing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["analyse", "bias_by_head", "--model", "docs-linear", "--out", "t.parquet"]) == 2
    assert "required: PROMPTS" in capsys.readouterr().err
