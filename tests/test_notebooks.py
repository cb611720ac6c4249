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
(COMMAND,) = re.findall(r"`python (make.py \d+)`", (FOLDER / "README.md").read_text(encoding="utf-8"))
MADE = COMMAND.split()[-1]
"""The number of the notebook that is made, in a kernel of its own."""
REAL = "10_a_real_model.py", "11_circuits.py"
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
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if not path.name.startswith(MADE)], ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    """In a fork, which has imported torch; the other one is run in a kernel of its own below."""
    jupytext = pytest.importorskip("jupytext", reason='needs the extra: pip install -e ".[notebooks]"')
    pytest.importorskip("ipykernel", reason='needs the extra: pip install -e ".[notebooks]"')
    if path.name in REAL and not Path(os.environ.get("KVLENS_REAL_MODELS", "nowhere"), "smollm2.gguf").is_file():
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
    told = re.sub(r"\r[^\r\n]*", "", result["stderr"])  # bars are drawn where the machine is slow
    assert (result["error"], told) == (None, "")
    assert 0 < len(result["shown"]) < LARGEST or "CircuitsVis" in result["shown"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_asks_shows_and_asserts(path):
    text = path.read_text(encoding="utf-8")
    assert re.search(r"^# \*[^*]+\?\*|\*[^*]+\?\*", text, flags=re.M), "a notebook begins with a question"
    assert re.findall(r"^# (#+ .*)", text, flags=re.M)[-1] == "## Answer", "a notebook ends with its answer"
    assert text.count("\nassert ") + text.count("    assert ") >= 3
    assert "def forward" not in text  # no logic of its own
    assert not re.search(r"^# [!%](?!%)", text, flags=re.M), "Jupyter alone runs this line"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_header_is_a_header_to_jupytext(path):
    jupytext = pytest.importorskip("jupytext", reason='needs the extra: pip install -e ".[notebooks]"')
    notebook = jupytext.read(path)
    assert notebook.metadata["kernelspec"] == {"display_name": "Python 3", "language": "python", "name": "python3"}
    assert notebook.metadata["jupytext"]["formats"] == "ipynb,py:percent"  # Jupyter keeps both files the same
    assert notebook.cells[0].cell_type == "markdown" and notebook.cells[0].source.startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_stored_is_this_notebook_run_from_top_to_bottom(path):
    jupytext = pytest.importorskip("jupytext", reason='needs the extra: pip install -e ".[notebooks]"')
    text = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    stored = jupytext.reads(text, "ipynb")
    cells = [(cell.cell_type, cell.source) for cell in jupytext.read(path).cells]
    assert [(cell.cell_type, cell.source) for cell in stored.cells] == cells, f"run: python notebooks/make.py {path.name[:2]}"
    code = [cell for cell in stored.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    shown = [output for cell in code for output in cell.outputs]
    assert shown and not [output for output in shown if output.output_type == "error" or output.get("name") == "stderr"]
    assert not re.search(r"<script|<iframe|widget-view", text) and len(text) < 400_000  # GitHub shows no scripts
    assert not re.search(r"[\"' (](/[a-z]+){2,}| at 0x", "".join(map(str, shown))), "of one machine: a path or an address"


@pytest.mark.slow
def test_the_command_of_the_index_makes_what_is_stored(tmp_path):
    for package in ("jupytext", "nbclient", "ipykernel"):
        pytest.importorskip(package, reason='needs the extra: pip install -e ".[notebooks]"')
    command, (path,) = COMMAND.split(), [path for path in NOTEBOOKS if path.name.startswith(MADE)]
    for name in (command[0], path.name):
        (tmp_path / name).write_text((FOLDER / name).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made, stored = (
        json.loads((folder / path.with_suffix(".ipynb").name).read_text(encoding="utf-8")) for folder in (tmp_path, FOLDER)
    )
    for cell in made["cells"] + stored["cells"]:  # numbers are a processor's, in tables and pictures
        for output in cell.get("outputs", []):
            output["data"] = sorted(output.get("data", []))
            output.pop("text", None)
    assert made == stored


def test_the_index_names_every_notebook_once():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    for kind in ("py", "ipynb"):
        assert re.findall(rf"\[[^\]]+\]\((\d\d_\w+\.{kind})\)", index) == [
            path.with_suffix(f".{kind}").name for path in NOTEBOOKS
        ]


def test_the_index_says_which_notebook_shows_which_analysis():
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = [row.split("|")[1:-1] for row in index.splitlines() if row.startswith("| `")]
    shown = {name: row[-1].split() for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(shown) == set(ANALYSES)
    for name, numbers in shown.items():
        for number in numbers:
            (path,) = [path for path in NOTEBOOKS if path.name.startswith(number)]
            assert re.search(rf"{name}\(|analyse {name} ", path.read_text(encoding="utf-8")), (name, number)
