"""The reference builds without a warning, shows the mathematics, and what the docstrings name exists."""

import html
import importlib
import inspect
import re
import warnings

import pytest

from kvlens import reference
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
