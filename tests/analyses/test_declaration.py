"""One declaration of an analysis makes its frame, its docstring, its help, and its batch."""

import importlib
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
import torch
from analysis_models import pencil_model
from kvlens.analyses.batch.work import load_analysis
from tiny_text_model import tiny_text_model

from kvlens import KVLensError, analyses
from kvlens.analyses import ANALYSES, TEXT, Analysis, Columns, Field, Option, Record, declaration
from kvlens.cli import main

COLUMNS = Columns(place=("int64", "from 0"), word=("str", "or missing " * 12), rank=("Int64", ""), size=("float64", "in nats"))


def test_the_frame_has_the_declared_columns_in_their_order():
    values = {"size": torch.tensor([[0.5], [1.5]]), "rank": [3, pd.NA], "word": ["a", None], "place": range(2)}
    expected = pd.DataFrame({"place": [0, 1], "word": ["a", None], "rank": [3, pd.NA], "size": [0.5, 1.5]})
    expected = expected.astype({"rank": "Int64", "word": "str"})
    pd.testing.assert_frame_equal(COLUMNS.frame(values), expected)
    one_value = COLUMNS.frame({**values, "word": "b", "size": 0.25})
    assert one_value["word"].tolist() == ["b", "b"] and one_value["size"].tolist() == [0.25, 0.25]
    empty = COLUMNS.frame(dict.fromkeys(COLUMNS, ()))
    assert empty.dtypes.astype(str).to_dict() == COLUMNS.dtypes and len(empty) == 0
    shifted = pd.Series([1.0, 2.0], index=[7, 5])  # a column of another frame comes with that frame's index
    assert COLUMNS.frame({**values, "size": shifted})["size"].tolist() == [1.0, 2.0]


def test_the_docstring_gets_the_table_at_its_placeholder():
    @COLUMNS.document
    def function():
        """One line.

        Returns:
            One row per place:

            {columns}

        Raises:
            Nothing.
        """

    lines = inspect.getdoc(function).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("    ==="))
    assert lines[first + 1].split() == ["place", "int64", "from", "0"] and "{columns}" not in function.__doc__
    assert max(map(len, lines)) <= declaration.TABLE_WIDTH and lines[-1].strip() == "Nothing."
    assert " ".join(function.__doc__.split()).count("or missing") == 12


@pytest.mark.parametrize("name", [name for name in analyses.__all__ if name.islower() and name != "tokens_field"])
def test_every_public_function_documents_its_columns(name):
    function = getattr(analyses, name)
    assert "{columns}" not in function.__doc__
    if name in ANALYSES:
        for column, (dtype, _) in load_analysis(name).columns.items():
            assert f"{column} {dtype}" in " ".join(function.__doc__.split())


@pytest.mark.parametrize("name", analyses.__all__)
def test_no_module_is_named_as_what_it_holds(name):
    assert analyses._HOMES[name].rsplit(".", 1)[-1] != name
    assert hasattr(importlib.import_module(analyses._HOMES[name]), name)


def largest(model, text, answer=None, *, scale: float = 1.0, kinds=("a", "b"), limit: int | None = None):
    return COLUMNS.frame({"place": [0], "word": str(answer), "rank": [len(text)], "size": [scale * len(kinds)]})


def declared(**changes):
    options = {"scale": Option("x"), "kinds": Option("y", ("a", "b", "c"), many=True), "limit": Option("z", value_type=int)}
    inputs = {"text": TEXT, "answer": Field("answer", required=False)}
    settings = dict(name="largest", summary="s", function=largest, columns=COLUMNS, inputs=inputs, options=options)
    return Analysis(**{**settings, **changes})


def test_options_have_the_defaults_of_the_function_and_are_checked():
    analysis = declared()
    assert analysis.defaults == {"scale": 1.0, "kinds": ("a", "b"), "limit": None}
    assert analysis.read_options({"kinds": "c, a", "limit": 3}) == {"scale": 1.0, "kinds": ("c", "a"), "limit": 3}
    assert analysis.read_options({"kinds": "", "limit": None, "scale": 2}) == {"scale": 2, "kinds": ("a", "b"), "limit": None}
    for option, value, words in (
        ("kinds", "a,d", "kinds must be one of a, b, c, got 'd'"),
        ("limit", "3", "limit must be a whole number, got '3'"),
        ("scale", True, "scale must be a number, got True"),
    ):
        with pytest.raises(KVLensError, match=words):
            analysis.read_options({option: value})


def test_a_record_becomes_arguments():
    model, analysis = pencil_model(), declared()
    row = analysis.run(model, Record("a", "0", "1 0 1", {"answer": 7}), scale=0.5).iloc[0]
    assert (row["word"], row["rank"], row["size"]) == ("7", 3, 1.0)
    assert analysis.run(model, Record("a", "0", "1"))["word"].tolist() == ["None"]
    assert analysis.needs_text and not declared(inputs={"text": Field("prompt")}).needs_text
    with pytest.raises(KVLensError, match="needs a text"):
        analysis.run(model, Record("a", "0"))
    wrong = declared(function=lambda model, text: pd.DataFrame({"place": [0]}), options={}, inputs={"text": TEXT})
    with pytest.raises(TypeError, match="largest declares"):
        wrong.run(model, Record("a", "0", "1"))


def example() -> str:
    """The module that the docstring of :mod:`analyses.declaration` shows."""
    lines = declaration.__doc__.split("my_module.py``::")[1].split("Like the analyses of kvlens")[0]
    return textwrap.dedent(lines)


def test_the_docstrings_example_runs_in_a_batch(tmp_path, monkeypatch, capsys):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "my_module.py").write_text(example())
    tiny_text_model(dtype=torch.float64).save(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    Path("p.txt").write_text("ab\ncde\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    command = ["analyse", "my_package.my_module:largest_logits", "p.txt", "--model", "tiny", "--out", "t.parquet"]
    assert main([*command, "--text", "the widget", "--scale", "0.5"]) == 0
    table = pd.read_parquet("t.parquet")
    model = tiny_text_model(dtype=torch.float64)
    prompt, text = model.to_tokens("ab"), model.to_tokens("the widget", prepend_bos=False)
    expected = 0.5 * model(torch.cat([prompt, text], dim=1))[0, prompt.shape[1] :].amax(dim=-1)
    found = torch.tensor(table["largest_logit"].to_numpy()[: text.shape[1]])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    assert table["prompt_id"].nunique() == 2
    assert main([*command[:2], "--help"]) == 0
    assert "largest_logit float64 of the next token" in " ".join(capsys.readouterr().out.split())


def test_the_package_is_light():
    code = "import sys; from kvlens import analyses; analyses.ANALYSES; print({'torch', 'pandas', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n"
