"""The reference builds without a warning, shows the mathematics, and what the docstrings name exists.

Every notebook runs from top to bottom without an error or a red cell, stays small, and is in the index.
"""

import html
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvlens import reference
from kvlens.analyses import ANALYSES
from kvlens.cli import main
from kvlens.errors import KVLensError
from kvlens.files import files_in

PAPERS = ("iclca", "kvsa", "dual", "lecture")


def resolve(name: str):
    """The object of a dotted name, the module part of which is as long as can be imported."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        for part in parts[cut:]:
            found = found.__annotations__[part] if part in getattr(found, "__annotations__", {}) else getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def names_in(text: str) -> list[str]:
    """Text in backticks that begins with our package, without file names and calls."""
    return re.findall(r"`~?(kvlens(?:\.\w+)+)(?=[`(])", text)


def test_names_are_found_and_resolved():
    assert names_in("`kvlens.KVBias`, ``kvlens.no.such()`` and `kvlens analyse`") == ["kvlens.KVBias", "kvlens.no.such"]
    with pytest.raises(AttributeError):
        resolve("kvlens.ops.no_such_function")


@pytest.mark.parametrize("paper", PAPERS)
def test_every_name_on_a_papers_page_exists(paper):
    page = importlib.import_module(f"kvlens.papers.{paper}").__doc__
    names = names_in(page)
    assert len(names) >= 5
    for name in names:
        resolve(name)


def test_every_name_in_the_public_docstrings_exists():
    missing = []
    for page in reference.pages():
        module = importlib.import_module(page)
        members = [value for key, value in vars(module).items() if not key.startswith("_") and callable(value)]
        for member in [module, *members]:
            for name in names_in(inspect.getdoc(member) or ""):
                try:
                    resolve(name)
                except (ImportError, AttributeError):
                    missing.append(f"{page}: {name}")
    assert not missing


def test_there_is_a_page_for_each_family_and_none_for_what_is_private():
    pages = reference.pages()
    assert {"kvlens", "kvlens.ops.linear_attention", "kvlens.papers.kvsa", "kvlens.analyses"} <= set(pages)
    assert not [name for name in pages if "._" in name or name.startswith("kvlens.cli")]


def test_tables_become_markdown():
    text = """Rows:

    ===== ====== =========
    name  dtype  meaning
    ===== ====== =========
    a     int64  |x|, and
                 more
    b     str
    ===== ====== =========

    After."""
    assert reference.markdown_tables(text).splitlines()[2:6] == [
        "    | name | dtype | meaning |",
        "    | --- | --- | --- |",
        r"    | a | int64 | \|x\|, and more |",
        "    | b | str |  |",
    ]
    assert reference.markdown_tables("no = table\n== ==") == "no = table\n== =="


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what pdoc warns of is told as an error by build_reference itself
def test_the_reference_builds(tmp_path, capsys, monkeypatch):
    pygments = pytest.importorskip("pygments", reason='needs the extra: pip install -e ".[docs]"')
    pytest.importorskip("pdoc", reason='needs the extra: pip install -e ".[docs]"')
    pytest.importorskip("latex2mathml", reason='needs the extra: pip install -e ".[docs]"')
    # highlighting the source is not ours, and takes a third of the time
    monkeypatch.setattr(pygments, "highlight", lambda source, lexer, formatter: f"<pre>{html.escape(source)}</pre>")
    assert main(["reference", "--out", str(tmp_path)]) == 0
    assert "index.html" in capsys.readouterr().out
    assert main(["reference", "--out", str(tmp_path)]) == 2
    assert "already holds a reference of kvlens; pass --overwrite" in capsys.readouterr().err
    assert reference.REFERENCE_FOLDER.own_files(tmp_path) == files_in(tmp_path)
    page = (tmp_path / "kvlens/papers/iclca.html").read_text()
    assert page.count("<math") > 20
    assert "$" not in re.sub(r"<script.*?</script>|<pre.*?</pre>", "", page, flags=re.DOTALL)  # every formula was rendered
    assert 'href="../ops/linear_attention.html#carry_state"' in page
    page = (tmp_path / "kvlens.html").read_text()
    assert "convert_prompt" in page
    assert 'id="HookedKVTransformer.from_pretrained"' in page  # a method of a base that has no page
    assert 'id="HookedKVTransformer.reset_hooks"' not in page  # TransformerLens' own are named, not told again
    assert "<td>ablation_kl</td>" in (tmp_path / "kvlens/analyses.html").read_text()  # the table that a decorator wrote
    everything = [path.read_text() for path in tmp_path.rglob("*.html")]
    shown = [re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL) for text in everything]  # without the source
    decorators = ("@checked", ".document<", "@torch")
    by_others = ("Initialize self", "Alias for field", "Model initialization")  # Python and TransformerLens
    for internal in (*decorators, *by_others, "&lt;class", "&lt;function", "~kvlens"):
        assert not [text for text in shown if internal in text], internal
    assert any("@dataclass" in text for text in shown)
    signature = re.search(r'id="convert_prompt".*?</section>', page, flags=re.DOTALL)[0]
    assert re.search(r"method: .*ConversionMethod = .*exact", re.sub("<[^>]*>", "", signature))
    assert not [text for text in everything if re.search(r'(?:src|href)="https?://(?!pdoc\.dev)[^"]+\.(?:js|css)', text)]


def test_a_docstring_that_cannot_be_rendered_is_an_error(tmp_path, monkeypatch):
    pdoc_doc = pytest.importorskip("pdoc.doc", reason='needs the extra: pip install -e ".[docs]"')
    pytest.importorskip("latex2mathml", reason='needs the extra: pip install -e ".[docs]"')
    real = pdoc_doc.Module.from_name.__func__

    def warn(cls, name):
        warnings.warn(f"{name} has an annotation that means nothing", stacklevel=1)
        return real(cls, name)

    monkeypatch.setattr(pdoc_doc.Module, "from_name", classmethod(warn))
    monkeypatch.setattr(reference, "pages", lambda: ["kvlens.papers"])
    with pytest.raises(KVLensError, match=r"kvlens\.papers has an annotation that means nothing"):
        reference.build_reference(tmp_path / "out")
    assert not (tmp_path / "out").exists()


FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("[0-9]*.py"))
(COMMAND,) = re.findall(r"`python (make.py \d+)`", (FOLDER / "README.md").read_text(encoding="utf-8"))
MADE = COMMAND.split()[-1]
"""The number of the notebook that is made, in a kernel of its own."""
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
@pytest.mark.parametrize("path", [path for path in NOTEBOOKS if not path.name.startswith(MADE)], ids=lambda path: path.stem)
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
    told = re.sub(r"\r[^\r\n]*", "", result["stderr"])  # bars are drawn where the machine is slow
    assert (result["error"], told) == (None, "")
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
