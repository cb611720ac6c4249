"""Write NAME.ipynb beside each notebook NAME.py, with its results: `python make.py`, or `python make.py 03 05` for some.

GitHub shows tables and pictures of a stored notebook but no scripts, which would take a megabyte a figure: figures that have a
static picture are stored as that, the others as text. Who runs a notebook sees the figures themselves.
"""

import inspect
import sys
import zlib
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"


def static() -> None:
    """What a kernel does first: show pictures and words where it would show scripts."""
    from html import escape

    from IPython import get_ipython

    html, png, plain = (get_ipython().display_formatter.formatters[kind] for kind in ("text/html", "image/png", "text/plain"))
    note = "A figure of circuitsvis, which scripts draw: run this cell to see it."
    html.for_type_by_name("circuitsvis.utils.render", "RenderedHTML", lambda figure: None)
    plain.for_type_by_name("circuitsvis.utils.render", "RenderedHTML", lambda figure, printer, cycle: printer.text(note))
    html.for_type_by_name("kvlens.viz.page", "Piece", lambda piece: None)
    png.for_type_by_name("kvlens.viz.page", "Piece", lambda piece: piece.figure and of_64_colors(piece._drawn("png", dpi=110)))

    def of_64_colors(picture: bytes) -> bytes:  # a third of the size
        from io import BytesIO

        from PIL import Image

        Image.open(BytesIO(picture)).convert("RGB").quantize(64).save(small := BytesIO(), "png", optimize=True)
        return small.getvalue()

    def in_words(found: object) -> str:
        return "".join(f"<p>{paragraph}</p>" for paragraph in escape(str(found)).split("\n\n"))

    html.for_type_by_name("kvlens.explanation.view", "Explained", in_words)


def make(script: Path) -> Path:
    """Run a notebook and write it with its results; the same results give the same bytes.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell failed; nothing was written.
    """
    notebook = jupytext.read(script)
    for cell in notebook.cells:
        cell.id = f"{zlib.crc32(cell.source.encode()):08x}"  # as long as its text is the same
    first = [f"--IPKernelApp.exec_lines={[inspect.getsource(static) + 'static()']!r}"]
    folder = {"metadata": {"path": str(script.parent)}}
    options = {"timeout": None, "record_timing": False, "store_widget_state": False}  # widgets: of progress bars that are gone
    NotebookClient(notebook, **options, extra_arguments=first, resources=folder).execute()
    for cell in notebook.cells:  # a progress bar shows on a slow machine only
        if "outputs" in cell:
            cell.outputs = [shown for shown in cell.outputs if WIDGET not in shown.get("data", {})]
    notebook.metadata.language_info = {"name": "python"}  # this Python's version is no part of it
    notebook.metadata.jupytext.pop("text_representation")
    path = script.with_suffix(".ipynb")
    nbformat.write(notebook, path)
    return path


if __name__ == "__main__":
    wanted = tuple(sys.argv[1:]) or ("",)
    for script in sorted(Path(__file__).resolve().parent.glob("[0-9]*.py")):
        if script.name.startswith(wanted):
            print(f"{script.name} ...", flush=True)
            print(f"{make(script).stat().st_size / 1000:,.0f} kB", flush=True)
