"""Docstrings read from source files: parsed with ``ast``, never imported, so that no package code runs.

A module's documentation consists of the docstrings that `ast` finds: of the module, its classes, their methods and its
functions (also those inside ``if`` and ``try``), and the texts that C extensions receive from Python through calls such as
``add_docstr(torch.abs, "...")``; the reference pages of ``torch.add`` and ``numpy.ndarray`` exist only there. Functions inside
functions are left out.

Test folders, test modules and caches are not documentation. Private modules are, but come last (`module_order`), so that a
package cut at a number of characters keeps its public modules.
"""

import ast
import hashlib
import inspect
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
