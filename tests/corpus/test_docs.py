"""Laws of the docs corpus, on small packages made here: no repetition, a disjoint split, the same result twice."""

from pathlib import Path

import pytest

from kvlens.corpus import docs
from kvlens.corpus.docs import (
    MAX_CHARS,
    MIN_REPEAT_CHARS,
    ParagraphFilter,
    _sources,
    corpus_of,
    find_modules,
    is_heldout,
    module_order,
    normalize,
    read_docstrings,
    split_paragraphs,
)

SHARED = "This paragraph is printed word for word in every module of the package."


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "pack"
    (root / "sub").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "__init__.py").write_text('"""The package that exists for these tests and for nothing else."""')
    (root / "tests" / "test_it.py").write_text('"""A test module, whose docstring is long enough to be kept."""')
    for i in range(40):
        folder = root / "sub" if i % 2 else root
        (folder / f"m{i}.py").write_text(
            f'"""Module number {i} speaks of {"abcdefghijklmnopqrstuvwxyz"[i % 26] * (7 + i)} only.\n\n{SHARED}\n"""\n'
        )
    return root


def paragraphs(documents: list) -> list[str]:
    found = [normalize(paragraph) for document in documents for paragraph in split_paragraphs(document.text)]
    return [paragraph for paragraph in found if len(paragraph) >= MIN_REPEAT_CHARS]


@pytest.fixture(autouse=True)
def _a_third_is_held_out(monkeypatch):
    monkeypatch.setattr(docs, "HELDOUT_FRACTION", 0.3)


def built(root: Path):
    return corpus_of({"pack": find_modules(root, "pack")})


def test_no_paragraph_occurs_twice_in_both_splits_together_and_shared_ones_occur_once(package):
    corpus = built(package)
    everything = paragraphs(corpus.train + corpus.heldout)
    assert len(everything) == len(set(everything))
    assert everything.count(normalize(SHARED)) == 1
    names = [[d.name for d in part] for part in (corpus.train, corpus.heldout)]
    assert all(names) and not set(names[0]) & set(names[1])
    assert names == [sorted(part) for part in names]
    assert all(is_heldout(name) for name in names[1])


def test_the_split_of_a_module_does_not_depend_on_the_other_modules(package):
    before = {d.name for d in built(package).heldout}
    (package / "newcomer.py").write_text('"""A newcomer with a docstring of its own, of sufficient length."""')
    assert before <= {d.name for d in built(package).heldout}


def test_two_builds_are_equal_and_a_changed_word_changes_the_hash(package):
    first, second = built(package), built(package)
    assert first == second
    assert first.corpus_hash == second.corpus_hash
    (package / "m0.py").write_text('"""Module zero says something else now, and at sufficient length."""')
    assert built(package).corpus_hash != first.corpus_hash


def test_the_cap_stops_after_the_module_that_reaches_it(package, monkeypatch):
    whole = built(package)
    monkeypatch.setitem(MAX_CHARS, "pack", 500)
    cut = built(package)
    longest = max(len(document.text) for document in whole.train + whole.heldout)
    assert 500 <= cut.counts["pack"].kept_chars < 500 + longest
    assert cut.counts["pack"].modules_over_the_cap == 41 - cut.counts["pack"].documents
    assert {d.name for d in cut.train} < {d.name for d in whole.train}


def test_summary_adds_up(package):
    corpus = built(package)
    summary = corpus.summary()
    assert sum(summary["characters"].values()) == summary["packages"]["pack"]["kept_chars"]
    assert sum(summary["documents"].values()) == summary["packages"]["pack"]["documents"] == 41
    assert summary["corpus_hash"] == corpus.corpus_hash
    assert summary["versions"]["pack"] == summary["licences"]["pack"] == "unknown"


def test_every_kind_of_docstring_is_found_under_its_qualified_name(tmp_path):
    source = tmp_path / "m.py"
    source.write_text(
        '"""Module."""\n'
        'class A:\n    """Class."""\n    def f(self):\n        """Method."""\n        def g():\n            """Inner."""\n'
        'if 1:\n    async def h():\n        """Conditional."""\n'
        'try:\n    pass\nexcept ImportError:\n    def k():\n        """Fallback."""\n'
        'add_docstr(torch.abs, r"""Added.""" + "")\n'
        'add_docstr(torch.cos, r"""Formatted {x}.""".format(**common))\n'
        'add_newdoc("numpy", "ndarray", ("all", """Tuple."""))\n'
        'print("no", "docstring")\n'
    )
    assert [(d.name, d.text) for d in read_docstrings(source, "m")] == [
        ("m", "Module."),
        ("m.A", "Class."),
        ("m.A.f", "Method."),
        ("m.h", "Conditional."),
        ("m.k", "Fallback."),
        ("torch.cos", "Formatted {x}."),
        ("numpy.ndarray.all", "Tuple."),
    ]


def test_sources_that_do_not_parse_are_passed_over(tmp_path):
    (tmp_path / "bad.py").write_text("def (:\n")
    (tmp_path / "null.py").write_bytes(b"x = '\0'")
    assert read_docstrings(tmp_path / "bad.py", "bad") == read_docstrings(tmp_path / "null.py", "null") == []


def test_short_foreign_and_surrogate_docstrings(tmp_path):
    (tmp_path / "short.py").write_text('"""Too short."""')
    (tmp_path / "greek.py").write_text('"""' + "αβγδ εζηθ " * 20 + '"""', encoding="utf-8")
    (tmp_path / "odd.py").write_text('"""A lone surrogate \\ud800 stands in a text that is otherwise quite ordinary."""')
    corpus = built(tmp_path)
    assert [d.name for d in corpus.train + corpus.heldout] == ["pack.odd"]
    assert len(corpus.corpus_hash) == 64


def test_near_copies_are_dropped_and_headings_stay_only_before_what_stays():
    keep = ParagraphFilter()
    lines = [f"argument_{word}: the {word} of the layer, an integer (default 12)" for word in ("width", "depth", "height")]
    first = "Args:\n\n" + "\n".join(lines)
    assert keep.new_paragraphs(first) == ["Args:", "\n".join(lines)]
    assert keep.new_paragraphs(first.upper().replace("\n", "\n  ")) == []
    near = "\n".join([*lines[:2], "another_argument: the color of the layer, a string"]).replace("12", "768")
    assert keep.new_paragraphs("Args:\n\n" + near) == []
    far = "\n".join([lines[0], "another_argument: the color of the layer", "a_third_one: the weight of the layer, in kg"])
    assert keep.new_paragraphs("Returns:\n\n" + far) == ["Returns:", far]


def test_public_modules_come_first():
    names = ["p._private", "p.public", "p._all_docs", "p.__init__x"]
    assert set(sorted(names, key=module_order)[:2]) == {"p.public", "p._all_docs"}


def test_find_modules_names_packages_and_modules(package):
    modules = find_modules(package, "pack")
    assert modules["pack"] == package / "__init__.py"
    assert modules["pack.sub.m1"] == package / "sub" / "m1.py"
    assert not any("test" in name for name in modules)


@pytest.mark.parametrize(
    "place",
    ["tests/helpers.py", "sub/site-packages/m.py", "sub/not-a-name/m.py", "conftest.py", "test_m.py", "tests.py", "a.b.py"],
)
def test_tests_caches_and_names_that_cannot_be_imported_are_no_modules(package, place):
    before = find_modules(package, "pack")
    (package / place).parent.mkdir(parents=True, exist_ok=True)
    (package / place).write_text('"""Text that nobody is to learn from, and of sufficient length for it."""')
    assert find_modules(package, "pack") == before


def test_the_standard_library_smoke(monkeypatch):
    monkeypatch.setitem(MAX_CHARS, "stdlib", 60_000)
    corpus = corpus_of({"stdlib": _sources("stdlib")})
    assert corpus.licences == {"stdlib": "PSF-2.0"}
    assert corpus.counts["stdlib"].kept_chars >= 60_000
    assert "python" in corpus.versions
