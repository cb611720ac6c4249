"""Every notebook runs from top to bottom, without an error or a red cell, stays small, and stands in the index."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.py"))
LARGEST = 300_000
"""Bytes of an executed notebook, but for those that show a circuitsvis view, which brings 1.3 MB of script."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the Jupyter machinery, in this process; the notebook's own go to its stderr
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    jupytext = pytest.importorskip("jupytext", reason='needs the extra: pip install -e ".[notebooks]"')
    nbclient = pytest.importorskip("nbclient", reason='needs the extra: pip install -e ".[notebooks]"')
    pytest.importorskip("ipykernel", reason='needs the extra: pip install -e ".[notebooks]"')
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"]
    executed = json.dumps(notebook)
    assert len(executed) < LARGEST or "CircuitsVis" in executed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_asks_shows_and_asserts(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^# \*[^*]+\?\*|\*[^*]+\?\*", text, flags=re.M), "a notebook begins with a question"
    assert text.count("\nassert ") + text.count("    assert ") >= 3
    assert "def forward" not in text  # no logic of its own


def test_the_index_names_every_notebook_once():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[[^\]]+\]\((\d\d_\w+\.py)\)", index) == [path.name for path in NOTEBOOKS]
