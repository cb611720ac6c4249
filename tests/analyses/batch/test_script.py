"""The commands: every analysis has one, with help, a reliable exit status, and each warning once in one line."""

import importlib
import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path
from types import FunctionType

import pandas as pd
import pytest
from kvlens.analyses.batch import script
from kvlens.analyses.batch.script import analyse
from kvlens.analyses.batch.work import load_analysis

from kvlens import analyses, explanation
from kvlens.analyses import ANALYSES
from kvlens.cli import main
from kvlens.terminal import plain_warnings

LETTERS = "batch_probes.letters:LETTERS"
GOOD = ["p.txt", "--model", "docs-linear", "--out", "t.parquet"]
REFUSED = {
    "unrecognized arguments: --bogus": ["--bogus", "3"],
    "did you mean '--retry-failed'": ["--retry-faild"],
    "invalid choice": ["--dtype", "int8"],
    "workers: at most": ["--workers", "99999"],
    "did you mean 'docs-linear'": ["--model", "docs-linaer"],
    "expected a file that ends in .parquet": ["--out", "t.csv"],
    "prompts: cannot read nowhere.txt": ["nowhere.txt"],
    "File name too long": ["--out", f"{'x' * 300}.parquet"],
}
"""Words of the answer -> what is added to GOOD."""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("ab\ncde\n")


def letters(model_folder, *more) -> int:
    return main(["analyse", LETTERS, "p.txt", "--model", model_folder, "--out", "t.parquet", *more])


def refused(capsys, status) -> str:
    captured = capsys.readouterr()
    assert status == 2 and captured.out == ""
    assert captured.err.startswith("kvlens: error: ") and captured.err.count("\n") == 1
    assert not list(Path().glob("t.parquet*"))
    return captured.err


def test_every_analysis_is_found_under_its_name():
    """In the text of the files are those that are there once everything is imported, each in the module that defines it."""
    found = {}
    for package in (analyses, explanation):
        for _, module, _ in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            held = vars(importlib.import_module(module)).values() if "__main__" not in module else ()
            found |= {f.__name__: f.__module__ for f in held if isinstance(f, FunctionType) and hasattr(f, "analysis")}
    assert found == ANALYSES
    assert all(load_analysis(name).name == name for name in ANALYSES)


@pytest.mark.parametrize("name", ANALYSES)
def test_every_analysis_has_help_with_its_columns_and_fields(name, capsys):
    analysis = load_analysis(name)
    assert analysis.name == name and analysis.summary and "\n" not in analysis.summary
    assert main(["analyse", name, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for column, (dtype, meaning) in analysis.columns.items():
        assert f"{column} {dtype} {meaning}".strip() in text
    for source in analysis.inputs.values():
        assert source.name in text
    for option in analysis.options:
        assert f"--{option.replace('_', '-')}" in text


@pytest.mark.parametrize("name", ANALYSES)
def test_the_example_in_the_help_of_an_analysis_is_its_own_and_runs(name, capsys):
    """With every field that it needs; a field of one's own is a column, where there is a record."""
    assert main(["analyse", name, "--help"]) == 0
    *lines, command = re.findall(r"^  (\{.*|kvlens .*)$", capsys.readouterr().out, re.MULTILINE)
    Path("prompts.jsonl").write_text("\n".join(lines))
    _, *words = shlex.split(command)
    assert words[:2] == ["analyse", name] and main(words) == 0
    table = pd.read_parquet("table.parquet")
    assert len(table) and (not lines or table["case"].tolist() == [1] * len(table))


def test_without_a_name_the_analyses_are_listed(capsys):
    assert main(["analyse"]) == 0
    listed = capsys.readouterr().out
    names = [line.split()[0] for line in listed.splitlines() if line.strip() and not line.startswith(" ")]  # others go on
    assert names[: len(ANALYSES)] == list(ANALYSES)


def test_a_function_keeps_its_name_when_its_module_is_imported():
    importlib.import_module("kvlens.analyses.bias.decomposition")
    assert callable(analyses.bias_by_head) and callable(analyses.prompt_effect)
    assert not hasattr(analyses, "bias_by_haed")


def test_a_table_is_written_with_status_0(model_folder, capsys):
    assert letters(model_folder, "--times", "2", "--upper") == 0
    assert capsys.readouterr().out == "Written to t.parquet: 10 rows of 2 prompts\n"
    table = pd.read_parquet("t.parquet")
    assert list(table.columns) == ["model", "prompt_id", "place", "letter", "layers"]
    assert "".join(table["letter"]) == "ABABCDECDE"


def test_status_1_when_something_gave_no_rows(model_folder, capsys):
    Path("p.txt").write_text("ab\n\n")
    assert letters(model_folder) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("p.txt:2: the line is empty\n")
    assert captured.out.splitlines()[1:] == ["1 line without a prompt: see t.parquet.errors.jsonl"]
    assert json.loads(Path("t.parquet.errors.jsonl").read_text())["prompt"] == "p.txt:2"


def test_rows_are_counted_of_the_prompts_that_have_them(model_folder, other_folder, capsys):
    Path("p.jsonl").write_text('{"prompt": "ab"}\n{"prompt": "cd", "breaks": 1}\n{"prompt": "e", "raises": 1}\n')
    command = ["analyse", LETTERS, "p.jsonl", "--model", model_folder]
    assert main([*command, "--out", "t.parquet"]) == 1
    told = capsys.readouterr().out
    assert "Written to t.parquet: 2 rows of 1 prompt\n2 of 3 prompts failed: see" in told
    assert main([*command, "--model", other_folder, "--out", "u.parquet"]) == 1
    told = capsys.readouterr().out
    assert "Written to u.parquet: 4 rows of 2 prompt runs on 2 models\n4 of 6 prompt runs failed: see" in told


def test_a_log_says_what_was_found_and_how_far_it_is(model_folder, capsys, monkeypatch):
    """Where stderr is no terminal, as here; half a minute lies between two lines."""
    Path("p.txt").write_text("a\nb\nc\nd\ne\nf\n")
    with monkeypatch.context() as patch:
        kept = []
        patch.setattr("kvlens.analyses.batch.parts.Parts.delete", lambda parts: kept.append(parts.folder) or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            letters(model_folder)
    for part in list(Path("t.parquet.partial").glob("0-*.parquet"))[:4]:
        part.unlink()
    times = iter(range(0, 1000, 20))
    monkeypatch.setattr("kvlens.analyses.batch.runner.time.monotonic", lambda: float(next(times)))
    capsys.readouterr()
    assert letters(model_folder) == 0
    assert capsys.readouterr().err.splitlines() == [
        "2 of 6 already done, in t.parquet.partial; 4 to run",
        "letters: 4 of 6; about 00:40 left",
        "letters: 6 of 6; about 00:00 left",
    ]


def test_a_rerun_after_failures_says_how_to_retry_and_a_retry_ends_well(model_folder, capsys, monkeypatch):
    Path("p.jsonl").write_text('{"prompt": "ab", "breaks": 1}\n{"prompt": "cd", "breaks": 1}\n')
    command = ["analyse", LETTERS, "p.jsonl", "--model", model_folder, "--out", "t.parquet"]
    assert main(command) == 1
    captured = capsys.readouterr()
    told = re.fullmatch(
        r"Written to t.parquet: 0 rows of 0 prompts\n2 of 2 prompts failed: see t.parquet.errors.jsonl\n"
        r"The first: (p.jsonl:1: ZeroDivisionError: a bug \(letters.py:\d+\))\n"
        r"The same command with --retry-failed runs only those again\n",
        captured.out,
    )
    assert told and f"{told[1]}; the batch continues with the others\n" in captured.err
    assert main(command) == 2
    assert "2 failed (t.parquet.errors.jsonl says why): pass --retry-failed" in capsys.readouterr().err
    assert main([*command, "--retry-failed"]) == 1
    monkeypatch.setattr("batch_probes.letters.ZeroDivisionError", lambda words: KeyboardInterrupt(), raising=False)
    assert main([*command, "--retry-failed"]) == 130


def test_status_130_on_ctrl_c_and_then_it_resumes(model_folder, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvlens.analyses.batch.workers.Worker.run", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert letters(model_folder) == 130
        assert "interrupted; finished prompts are kept, and the same command resumes the batch" in capsys.readouterr().err
        assert letters(model_folder, "--overwrite") == 130
        assert "and the same command without --overwrite resumes the batch" in capsys.readouterr().err
    assert letters(model_folder) == 0


@pytest.mark.parametrize(
    ("more", "words"),  # of an analysis of one's own; more words: REFUSED, and test_refusals.py
    [
        (["--tims", "2"], "unrecognized arguments: --tims 2; did you mean '--times'?"),
        (["--times", "two"], "argument --times: invalid int value: 'two'"),
        (["--workers", "0"], "workers must be at least 1"),
    ],
)
def test_bad_words(model_folder, capsys, more, words):
    assert words in refused(capsys, letters(model_folder, *more))


def test_bad_names_and_missing_words(capsys):
    assert "did you mean 'bias_by_head'?" in refused(capsys, main(["analyse", "bias_by_haed"]))
    assert "is called '--model'" in refused(capsys, main(["analyse", "--model", "m"]))
    assert "the following arguments are required: PROMPTS, --model, --out" in refused(capsys, main(["analyse", LETTERS]))


def test_python_m_runs_the_same_command(model_folder, capsys):
    environment = {**os.environ, "PYTHONWARNINGS": "error::RuntimeWarning"}  # runpy's, of a module that was imported before
    for words, status in (["--help"], 0), (["bias_by_haed"], 2):  # which import nothing that takes seconds
        done = subprocess.run([sys.executable, "-m", "analyses", *words], capture_output=True, text=True, env=environment)
        assert script.main(words) == done.returncode == status
        assert capsys.readouterr() == (done.stdout, done.stderr)
    command = ["bias_by_head", "p.txt", "--model", model_folder, "--out", "t.parquet"]
    assert script.main([*command, "--text", " c"]) == 0
    assert capsys.readouterr() == ("Written to t.parquet: 12 rows of 2 prompts\n", "")
    assert script.main(command) == 2


@pytest.mark.parametrize("words", REFUSED)
def test_bad_words_for_an_analysis_of_kvlens(words, capsys):
    given = GOOD[1:] if REFUSED[words] == ["nowhere.txt"] else GOOD
    assert words in refused(capsys, main(["analyse", "dual_losses", *given, *REFUSED[words]]))


def test_help_is_light_and_so_is_a_misspelt_name():
    code = """
import sys
from kvlens.cli import main
assert [main(["analyse", word]) for word in ("--help", "bias_by_haed")] == [0, 2]
assert not {"torch", "transformer_lens", "pandas", "numpy"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_weights_alone_need_no_prompts_and_run_once_a_model(capsys):
    models = ["--model", "docs-linear", "--model", "docs-shift"]
    assert main(["analyse", "composition", *models, "--kinds", "Q", "--out", "t.parquet"]) == 0
    assert capsys.readouterr().out == "Written to t.parquet: 432 rows of 2 models\n"
    assert main(["analyse", "composition", *models, "p.txt", "--kinds", "Q", "--out", "u.parquet"]) == 0
    told = capsys.readouterr()
    assert "composition reads the weights alone, and runs once per model; p.txt is not read" in told.err
    table = pd.read_parquet("t.parquet")
    pd.testing.assert_frame_equal(table, pd.read_parquet("u.parquet"))
    assert set(table["prompt_id"]) == {"none"} and not table.duplicated().any()


def test_other_analyses_say_that_prompts_are_missing(capsys):
    assert main(["analyse", "bias_by_head", "--model", "docs-linear", "--out", "t.parquet"]) == 2
    assert "required: PROMPTS" in capsys.readouterr().err


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
