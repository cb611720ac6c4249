"""Every notebook runs from top to bottom, without an error or a red cell."""

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.py"))


@pytest.mark.filterwarnings("ignore")  # of the Jupyter machinery, in this process; the notebook's own go to its stderr
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path):
    jupytext = pytest.importorskip("jupytext", reason="needs the extra: pip install kvlens[notebooks]")
    nbclient = pytest.importorskip("nbclient", reason="needs the extra: pip install kvlens[notebooks]")
    pytest.importorskip("ipykernel", reason="needs the extra: pip install kvlens[notebooks]")
    notebook = jupytext.read(path)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs
    assert not [output for output in outputs if output.output_type == "error"]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]
