"""Every notebook runs from top to bottom without an error or a red cell, stays small, and is in the index."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvlens.analyses import ANALYSES

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.py"))
(COMMAND,) = re.findall(r"`(jupytext --to ipynb --execute \S+)`", (FOLDER / "README.md").read_text(encoding="utf-8"))
REAL = "10_a_real_model.py"
LARGEST = 300_000
"""Bytes that a notebook shows, but for those that show a circuitsvis view, which brings 1.3 MB of script."""


def run_cells(cells: list[str], folder: Path) -> dict[str, object]:
    """Run the code of a notebook in an IPython shell, as a kernel does: the error that ended it, stderr, what it showed."""
    import matplotlib
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    os.chdir(folder)
    warnings.resetwarnings()
    shell = InteractiveShell.instance()
    shell.history_manager.enabled = False
    matplotlib.use("module://matplotlib_inline.backend_inline", force=True)
    error, shown, stderr = None, [], ""
    for cell in cells:
        with capture_output() as captured:
            error = shell.run_cell(cell).error_in_exec
        stderr += captured.stderr
        shown += [captured.stdout, *(str(output.data) for output in captured.outputs)]
        if error is not None:
            break
    return {"error": None if error is None else f"{type(error).__name__}: {error}", "stderr": stderr, "shown": "".join(shown)}


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if path.name not in COMMAND], ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    """In a fork, which has imported torch; the other one is run in a kernel of its own below."""
    jupytext = pytest.importorskip("jupytext", reason='needs the extra: pip install -e ".[notebooks]"')
    pytest.importorskip("ipykernel", reason='needs the extra: pip install -e ".[notebooks]"')
    if path.name == REAL and not Path(os.environ.get("KVLENS_REAL_MODELS", "nowhere"), "smollm2.gguf").is_file():
        pytest.skip("no real model here: KVLENS_REAL_MODELS names a folder with smollm2.gguf, which .ci/run downloads")
    monkeypatch.setenv("KVLENS_NOTEBOOK_VALUES", "1")  # of the five of each kind of fact in the notebook of the real model
    cells = [cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"]
    found = tmp_path / "found.json"
    child = os.fork()
    if child == 0:
        try:
            found.write_text(json.dumps(run_cells(cells, tmp_path)), encoding="utf-8")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    result = json.loads(found.read_text(encoding="utf-8"))
    assert (result["error"], result["stderr"]) == (None, "")
    assert 0 < len(result["shown"]) < LARGEST or "CircuitsVis" in result["shown"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_asks_shows_and_asserts(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^# \*[^*]+\?\*|\*[^*]+\?\*", text, flags=re.M), "a notebook begins with a question"
    assert text.count("\nassert ") + text.count("    assert ") >= 3
    assert "def forward" not in text  # no logic of its own
    assert not re.search(r"^# [!%](?!%)", text, flags=re.M), "Jupyter alone runs this line"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_header_is_a_header_to_jupytext(path):
    jupytext = pytest.importorskip("jupytext", reason='needs the extra: pip install -e ".[notebooks]"')
    notebook = jupytext.read(path)
    assert notebook.metadata["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


@pytest.mark.slow
def test_the_command_of_the_index_makes_a_notebook_with_its_results(tmp_path):
    for package in ("jupytext", "nbconvert", "ipykernel"):
        pytest.importorskip(package, reason='needs the extra: pip install -e ".[notebooks]"')
    words = COMMAND.split()
    name = words[-1]
    (tmp_path / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made = json.loads((tmp_path / name).with_suffix(".ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in made["cells"] if cell["cell_type"] == "code"]
    assert code and all(cell["execution_count"] for cell in code)
    shown = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in shown if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert 0 < len(json.dumps(shown)) < LARGEST or "CircuitsVis" in json.dumps(shown)


def test_the_index_names_every_notebook_once():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[[^\]]+\]\((\d\d_\w+\.py)\)", index) == [path.name for path in NOTEBOOKS]


def test_the_index_says_which_notebook_shows_which_analysis():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in index.splitlines() if row.startswith("| `")]
    shown = {name: row[-1].split() for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(shown) == set(ANALYSES)
    for name, numbers in shown.items():
        for number in numbers:
            (path,) = [path for path in NOTEBOOKS if path.name.startswith(number)]
            assert re.search(rf"{name}\(|analyse {name} ", path.read_text(encoding="utf-8")), (name, number)
