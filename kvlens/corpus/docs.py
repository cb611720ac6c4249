"""The docs corpus: a few megabytes of English and code that every installation already contains, so nothing is downloaded.

It consists of Python's language reference (`pydoc_data.topics`) and the docstrings of the standard library, numpy, torch and
transformers, one `Document` per module. Documentation suits small models: names recur a few lines after their definition
(induction), code is indented and bracketed (structure), and people can read it when they look at an attention pattern.

Three choices make a loss on it meaningful:

- *No repetition.* transformers has the same paragraphs in hundreds of modules. Each paragraph is kept once in the whole corpus,
  ignoring case and white space; a paragraph most of whose lines occurred elsewhere (ignoring digits) is a near-copy and is
  dropped as well. Lines shorter than `MIN_REPEAT_CHARS` ("Returns:", ">>> import torch") do not count as content: they may
  repeat, but are kept only before a paragraph that is kept.
- *Split by module.* A stable hash of the module's name puts about 5 % of the modules in the held-out part, the same ones on
  every machine. After deduplication no held-out paragraph of that length is also a training paragraph.
- *Balance.* torch and transformers would be four fifths of the text; `MAX_CHARS` limits them, keeping public modules.

The text depends on the installed versions: `DocsCorpus.summary` names them, and `DocsCorpus.corpus_hash` identifies the corpus.

Docstrings are parsed with ``ast`` from source files, which are never imported, so that no package code runs. A
module's documentation consists of its docstring, those of its classes, their methods and its functions (also inside ``if`` and
``try``), and the texts that C extensions receive from Python through calls such as ``add_docstr(torch.abs, "...")``; the
reference pages of ``torch.add`` and ``numpy.ndarray`` exist only there. Functions inside functions are left out. Test folders,
test modules and caches are not documentation. Private modules are, but come last (`module_order`), so that a package cut at a
number of characters keeps its public modules.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import platform
import re
import sysconfig
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvlens.errors import KVLensError

SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "turtledemo", "lib2to3"}
)
_DOCSTRING_CALLS = frozenset({"add_docstr", "add_docstr_all", "add_newdoc", "add_newdoc_for_scalar_type"})
_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Docstring:
    """One docstring: ``name`` is qualified (``json.decoder.JSONDecoder.decode``), ``text`` is `inspect.cleandoc`-ed."""

    name: str
    text: str


def stable_fraction(name: str, salt: str) -> float:
    """Return a number in [0, 1) that depends on ``name`` and ``salt`` alone, the same on every machine and in every run."""
    digest = hashlib.sha256(f"{salt}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def module_order(name: str) -> tuple[bool, float, str]:
    """Sort key of a module: public before private, then by a hash of the name, so that the selection is not alphabetical.

    A module is private if a part of its name starts with one underscore, except modules that contain only the documentation of
    public objects (``torch._torch_docs``).
    """
    parts = name.split(".")
    private = any(part.startswith("_") and not part.endswith(("_docs", "_newdocs")) for part in parts)
    return private, stable_fraction(name, "order"), name


def find_modules(root: Path, package: str = "") -> dict[str, Path]:
    """Return ``{qualified module name: source file}`` below ``root``, without tests and caches.

    Args:
        root: a package's folder, or a folder of modules such as the standard library's.
        package: prefix of each name (``"numpy"``); empty for a folder of modules.
    """
    modules, found = {}, []
    for folder, below, files in os.walk(root):
        below[:] = [name for name in below if name.isidentifier() and name not in SKIPPED_FOLDERS]  # os.walk skips the others
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    for path in sorted(found):
        if not path.stem.isidentifier() or path.stem in {*SKIPPED_FOLDERS, "conftest"} or path.stem.startswith("test_"):
            continue
        relative = path.relative_to(root).with_suffix("")
        parts = [package, *relative.parts] if package else [*relative.parts]
        if parts[-1] == "__init__":
            parts.pop()
        if parts:
            modules[".".join(parts)] = path
    return modules


def read_docstrings(path: Path, module: str) -> list[Docstring]:
    """Return the docstrings of one source file, in the order of the file; [] if this Python cannot parse it.

    Args:
        path: the source file.
        module: the module's qualified name, the prefix of each docstring's name.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's docstrings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    found = [Docstring(module, text)] if (text := ast.get_docstring(tree)) else []
    found.extend(_body_docstrings(tree.body, module))
    return found


def _body_docstrings(body: list[ast.stmt], prefix: str) -> Iterator[Docstring]:
    for node in body:
        if isinstance(node, _DEFINITIONS):
            name = f"{prefix}.{node.name}"
            if text := ast.get_docstring(node):
                yield Docstring(name, text)
            if isinstance(node, ast.ClassDef):
                yield from _body_docstrings(node.body, name)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _call_docstrings(node.value)
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _body_docstrings(getattr(node, block, []), prefix)
            for handler in getattr(node, "handlers", []):
                yield from _body_docstrings(handler.body, prefix)


def _call_docstrings(call: ast.Call) -> Iterator[Docstring]:
    """The text of ``add_docstr(torch.abs, "...")`` or ``add_newdoc("numpy", "ndarray", ("all", "..."))``."""
    if ast.unparse(call.func).rpartition(".")[2] not in _DOCSTRING_CALLS or len(call.args) < 2:
        return
    *subject, last = call.args
    if isinstance(last, ast.Tuple) and last.elts:
        *attribute, last = last.elts
        subject += attribute
    while isinstance(last, ast.Call | ast.Attribute):  # "...".format(**common_args), "...".replace(a, b)
        last = last.func if isinstance(last, ast.Call) else last.value
    text = _literal_text(last)
    if text is not None:
        yield Docstring(".".join(_literal_text(part) or ast.unparse(part) for part in subject), inspect.cleandoc(text))


def _literal_text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


LICENCES = {"stdlib": "PSF-2.0", "numpy": "BSD-3-Clause", "torch": "BSD-3-Clause", "transformers": "Apache-2.0"}
MAX_CHARS = {"stdlib": 2_500_000, "numpy": 2_000_000, "torch": 2_500_000, "transformers": 2_000_000}
MIN_DOCSTRING_CHARS = 40
MIN_REPEAT_CHARS = 32
MAX_REPEATED_SHARE = 0.5  # of a paragraph's characters in lines that occurred elsewhere
MAX_NON_ASCII = 0.1
HELDOUT_FRACTION = 0.05
SPLIT_SALT = "held-out"  # chosen so that no single huge module is held out: each package gives 3 to 6 % of its text
_TOPICS = "pydoc_data.topics"


@dataclass(frozen=True)
class Document:
    """One module's documentation, or one topic of the language reference.

    Attributes:
        name: the module's qualified name (``"json.decoder"``), or ``"pydoc_data.topics.<topic>"``.
        package: its package.
        text: docstrings joined by blank lines, each below its qualified name, which is a separate paragraph.
    """

    name: str
    package: str
    text: str


@dataclass
class PackageCounts:
    """Counts of a package: characters of docstrings read, characters of text kept, documents kept, modules left unread."""

    read_chars: int = 0
    kept_chars: int = 0
    documents: int = 0
    modules_over_the_cap: int = 0


@dataclass(frozen=True)
class DocsCorpus:
    """Training and held-out documents, each sorted by package and name.

    Attributes:
        train, heldout: the documents; no module and no paragraph of `MIN_REPEAT_CHARS` or more is in both.
        counts: counts for each package.
        versions: versions of Python and of each package, as strings.
        licences: SPDX name for each package.
        build_seconds: wall-clock time of the build.
    """

    train: list[Document]
    heldout: list[Document]
    counts: dict[str, PackageCounts]
    versions: dict[str, str]
    licences: dict[str, str]
    build_seconds: float = field(compare=False)

    @property
    def corpus_hash(self) -> str:
        """sha256 (hexadecimal) of split, names and texts, equal for equal corpora."""
        digest = hashlib.sha256()
        for split, documents in (("train", self.train), ("heldout", self.heldout)):
            for document in documents:
                for part in (split, document.name, document.text):
                    raw = part.encode()
                    digest.update(len(raw).to_bytes(8, "big") + raw)
        return digest.hexdigest()

    def summary(self) -> dict[str, object]:
        """Return sizes (documents, characters), counts per package, hash, versions and licences, as JSON values."""
        return {
            "documents": {"train": len(self.train), "heldout": len(self.heldout)},
            "characters": {"train": _n_chars(self.train), "heldout": _n_chars(self.heldout)},
            "packages": {name: dict(vars(counts)) for name, counts in self.counts.items()},
            "corpus_hash": self.corpus_hash,
            "versions": dict(self.versions),
            "licences": dict(self.licences),
            "build_seconds": round(self.build_seconds, 2),
        }


class ParagraphFilter:
    """Passes each paragraph once: copies and near-copies of earlier paragraphs are dropped."""

    def __init__(self) -> None:
        self._paragraphs: set[bytes] = set()
        self._lines: set[bytes] = set()

    def new_paragraphs(self, text: str) -> list[str]:
        """Return the paragraphs of ``text`` that are new; short ones only if the paragraph after them is returned."""
        paragraphs = split_paragraphs(text)
        is_kept = [self._is_new(paragraph) for paragraph in paragraphs]
        for i in reversed(range(len(paragraphs) - 1)):
            if len(normalize(paragraphs[i])) < MIN_REPEAT_CHARS:
                is_kept[i] = is_kept[i + 1]
        return [paragraph for paragraph, kept in zip(paragraphs, is_kept, strict=True) if kept]

    def _is_new(self, paragraph: str) -> bool:
        key = normalize(paragraph)
        if len(key) < MIN_REPEAT_CHARS or (digest := _digest(key)) in self._paragraphs:
            return False
        lines = [re.sub(r"\d+", "0", normalize(line)) for line in paragraph.splitlines()]
        lines = [line for line in lines if len(line) >= MIN_REPEAT_CHARS]
        digests = [_digest(line) for line in lines]
        repeated = sum(len(line) for line, seen in zip(lines, digests, strict=True) if seen in self._lines)
        if repeated > MAX_REPEATED_SHARE * sum(map(len, lines)):
            return False
        self._paragraphs.add(digest)
        self._lines.update(digests)
        return True


def normalize(text: str) -> str:
    """Return ``text`` in lower case with each run of white space as one blank, the form in which texts are compared."""
    return " ".join(text.casefold().split())


def split_paragraphs(text: str) -> list[str]:
    """Return the blocks of ``text`` between blank lines."""
    return [block.strip("\n").rstrip() for block in re.split(r"\n[^\S\n]*\n", text) if block.strip()]


def is_heldout(name: str) -> bool:
    """Return whether the module of this name is held out, the same on every machine."""
    return stable_fraction(name, SPLIT_SALT) < HELDOUT_FRACTION


def docs_versions(packages: Iterable[str] = MAX_CHARS) -> dict[str, str]:
    """The versions of Python and of the packages, which decide the text."""
    return {"python": platform.python_version()} | {name: _version(name) for name in packages if name != "stdlib"}


def build_docs_corpus() -> DocsCorpus:
    """Build the corpus from the installed packages: deterministic, offline, without importing them (about ten seconds).

    Returns:
        The corpus, which `DocsCorpus.summary` describes. Earlier packages keep the first copy of a shared paragraph.

    Raises:
        KVLensError: a package is not installed.
    """
    return corpus_of({package: _sources(package) for package in MAX_CHARS})


def corpus_of(packages: Mapping[str, Mapping[str, Path | str]]) -> DocsCorpus:
    """The corpus of packages, each given by its modules: name -> file, or the text itself."""
    started = time.perf_counter()
    new_paragraphs, documents, counts = ParagraphFilter(), [], {}
    for package, sources in packages.items():
        counts[package] = PackageCounts()
        documents += _documents(package, sources, MAX_CHARS.get(package), new_paragraphs, counts[package])
    documents.sort(key=lambda document: (document.package, document.name))
    return DocsCorpus(
        train=[document for document in documents if not is_heldout(document.name)],
        heldout=[document for document in documents if is_heldout(document.name)],
        counts=counts,
        versions=docs_versions(counts),
        licences={package: LICENCES.get(package, "unknown") for package in counts},
        build_seconds=time.perf_counter() - started,
    )


def _documents(
    package: str,
    sources: Mapping[str, Path | str],
    limit: int | None,
    new_paragraphs: ParagraphFilter,
    counts: PackageCounts,
) -> list[Document]:
    documents = []
    for name in sorted(sources, key=module_order):
        if limit is not None and counts.kept_chars >= limit:
            counts.modules_over_the_cap += 1
            continue
        source = sources[name]
        docstrings = [Docstring(name, source)] if isinstance(source, str) else read_docstrings(source, name)
        counts.read_chars += sum(len(docstring.text) for docstring in docstrings)
        if text := _document_text(docstrings, new_paragraphs):
            documents.append(Document(name, package, text))
            counts.kept_chars += len(text)
            counts.documents += 1
    return documents


def _document_text(docstrings: Iterable[Docstring], new_paragraphs: ParagraphFilter) -> str:
    blocks = []
    for docstring in docstrings:
        text = docstring.text.encode(errors="replace").decode()  # a lone surrogate cannot be encoded
        non_ascii = sum(not character.isascii() for character in text)
        if len(text) < MIN_DOCSTRING_CHARS or non_ascii > MAX_NON_ASCII * len(text):
            continue
        if kept := new_paragraphs.new_paragraphs(text):
            blocks += [docstring.name, *kept]
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _sources(package: str) -> dict[str, Path | str]:
    """``{module: its file}``; for the standard library also ``{topic: its text}``."""
    if package == "stdlib":
        from pydoc_data.topics import topics  # data, not code

        modules = find_modules(Path(sysconfig.get_paths()["stdlib"]))
        modules.pop(_TOPICS, None)
        return {**modules, **{f"{_TOPICS}.{name}": text.strip() for name, text in topics.items()}}
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise KVLensError(f"build_docs_corpus: package {package!r} is not installed")
    return dict(find_modules(Path(next(iter(spec.submodule_search_locations))), package))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def _n_chars(documents: Iterable[Document]) -> int:
    return sum(len(document.text) for document in documents)
