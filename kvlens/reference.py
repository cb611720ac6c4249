"""The API reference: one HTML page per package, paper and experiment, built from the docstrings by pdoc; it works offline.

A page shows a package's public names with their signatures (including shapes), docstrings and source. Formulas between dollar
signs become MathML, which browsers render themselves. Every warning of pdoc (such as a name that does not resolve, or an
annotation that cannot be read) is an error here.
"""

import importlib
import inspect
import json
import pkgutil
import re
import typing
import warnings
from collections.abc import Collection
from pathlib import Path
from typing import Any

import kvlens
from kvlens.errors import KVLensError
from kvlens.files import FolderKind, check_folder, listed_in, write_folder

PACKAGES = ("kvlens", "kvlens.analyses")
A_PAGE_PER_MODULE = ("kvlens.ops", "kvlens.papers", "kvlens.analyses.declaration")
"""In these, every module has its own page; elsewhere a package's page shows its public names."""
WITHOUT_A_PAGE = ("cli", "bias", "heads")
"""Packages without public names: commands have --help, and the analyses are on the page of kvlens.analyses."""

FORMAT, MANIFEST = "kvlens.pages", "reference.json"
REFERENCE_FOLDER = FolderKind("a reference of kvlens", listed_in(MANIFEST, FORMAT, "files"))

DECORATORS = ("dataclass", "classmethod", "staticmethod", "abstractmethod", "contextmanager")
"""Decorators that affect how something is called or what it returns; others (checks, gradients, caches) are not shown."""

_OBJECT = re.compile(r"<(?:class '([^<>]*)'|function ((?:[\w.]|<\w+>)+)|built-in method (\w+)[^<>]*)>")
_RULE = re.compile(r"=+(?: =+)+")


def build_reference(folder: str | Path, *, overwrite: bool = False) -> list[str]:
    """Write the reference to a folder, completely or not at all; start reading at ``index.html``.

    Args:
        folder: path; parent folders are created.
        overwrite: replace an existing reference; other files are never replaced.

    Returns:
        The modules that got a page.

    Raises:
        KVLensError: the folder is in use or not writable, or something in the docstrings or annotations cannot
            be rendered.
    """
    check_folder(folder, REFERENCE_FOLDER, overwrite=overwrite)
    import latex2mathml  # noqa: F401  (pdoc's markdown asks for it when it meets a formula)
    import pdoc.doc
    import pdoc.render
    import pdoc.render_helpers

    names = pages()
    _settle_lazy_names(names)
    _settle_inherited_annotations()
    pdoc.render_helpers.markdown_extensions["latex"] = None
    pdoc.render.configure(docformat="google", footer_text=f"kvlens {kvlens.__version__}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        documented = {name: pdoc.doc.Module.from_name(name) for name in names}
        for name, module in documented.items():
            module.__dict__["submodules"] = [documented[child] for child in names if child.rpartition(".")[0] == name]
            _prepare(module)
        _adopt_members_without_a_page(documented.values())
        files = {_file_of(name): pdoc.render.html_module(module, documented) for name, module in documented.items()}
        files["search.js"] = pdoc.render.search_index(documented)
    if caught:
        raise KVLensError("the reference cannot be built:\n" + "\n".join(sorted({str(each.message) for each in caught})))
    files["index.html"] = '<!doctype html><html lang="en"><meta http-equiv="refresh" content="0; url=kvlens.html"></html>\n'
    files[MANIFEST] = json.dumps({"format": FORMAT, "files": sorted(files)}, indent=2) + "\n"

    def fill(temporary: Path) -> None:
        for name, text in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")

    write_folder(folder, fill, REFERENCE_FOLDER, overwrite=overwrite)
    return names


def pages() -> list[str]:
    """The modules that get a page, by name."""
    found = list(PACKAGES)
    for name in found:  # the list grows during the loop
        for info in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", []), f"{name}."):
            last = info.name.rpartition(".")[2]
            wanted = info.name.startswith(A_PAGE_PER_MODULE) or (info.ispkg and last not in WITHOUT_A_PAGE)
            if wanted and not last.startswith("_"):
                found.append(info.name)
    return sorted(found)


def markdown_tables(text: str) -> str:
    """Convert a docstring's tables, with columns under rules of ``=``, to Markdown."""
    lines = text.splitlines()
    table: list[str] = []
    done: list[str] = []
    for number, line in enumerate(lines):
        if not table and not _RULE.fullmatch(line.strip()):
            done.append(line)
            continue
        table.append(line)
        ends = number + 1 == len(lines) or not lines[number + 1].strip()
        if len(table) > 1 and ends and _RULE.fullmatch(line.strip()):
            done += _markdown_table(table)
            table = []
    return "\n".join([*done, *table])


def _markdown_table(lines: list[str]) -> list[str]:
    margin = lines[0][: -len(lines[0].lstrip())] if lines[0].startswith(" ") else ""
    starts = [match.start() for match in re.finditer(r"=+", lines[0])]
    spans = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    rows: list[list[str]] = []
    header = [""] * len(spans)
    for line in lines[1:-1]:
        cells = [line[span].strip().replace("|", r"\|") for span in spans]
        if _RULE.fullmatch(line.strip()):
            header = rows.pop()
        elif cells[0] or not rows:
            rows.append(cells)
        else:  # continues the previous row
            rows[-1] = [f"{before} {more}".strip() for before, more in zip(rows[-1], cells, strict=True)]
    return [f"{margin}| {' | '.join(row)} |" for row in [header, ["---"] * len(spans), *rows]]


def _prepare(documented: Any) -> None:
    """Change what pdoc shows of an object and its members to what a caller would write and read."""
    docstring = documented.docstring
    if documented.kind in ("function", "class"):
        documented.__dict__["decorators"] = [line for line in documented.decorators if _name_of(line) in DECORATORS]
    if documented.kind == "function":
        if documented.taken_from[0].partition(".")[0] in PACKAGES:  # TransformerLens' own signatures may name missing modules
            documented.__dict__["signature"] = _written_out(documented.signature)
        if "." not in documented.qualname:  # pdoc bypasses the decorator that adds the table of columns
            decorated = getattr(importlib.import_module(documented.modulename), documented.name, None)
            docstring = inspect.getdoc(decorated) or docstring
        elif documented.name == "__init__":  # the class documents its arguments; pdoc would repeat the base class
            docstring = inspect.cleandoc(documented.obj.__doc__ or "") if documented.obj is not object.__init__ else ""
    if documented.kind == "variable":
        documented.__dict__["default_value_str"] = _OBJECT.sub(_name_alone, documented.default_value_str)
        docstring = "" if docstring.startswith("Alias for field number") else docstring  # Python's own, for named tuples
    documented.__dict__["docstring"] = markdown_tables(docstring.replace("`~", "`"))  # Sphinx' mark for a short name
    for member in getattr(documented, "members", {}).values():
        _prepare(member)


def _name_of(decorator: str) -> str:
    return decorator.removeprefix("@").partition("(")[0].rpartition(".")[2]


def _name_alone(found: re.Match[str]) -> str:
    name = next(name for name in found.groups() if name is not None)
    return name.replace("<locals>.", "").replace("<lambda>", "lambda")


class _Written:
    """A placeholder in a signature that is shown as text."""

    def __init__(self, text: str):
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _written_out(signature: inspect.Signature) -> inspect.Signature:
    """A signature that shows classes and functions by name."""
    parameters = []
    for parameter in signature.parameters.values():
        default = parameter.default
        if inspect.isfunction(default) or (inspect.isclass(default) and default is not inspect.Parameter.empty):
            parameter = parameter.replace(default=_Written(default.__qualname__))
        parameters.append(parameter)
    return signature.replace(parameters=parameters)


def _adopt_members_without_a_page(modules: Collection[Any]) -> None:
    """Show methods inherited from our base classes without a page as the class's own; pdoc would list only their names."""
    classes = [member for module in modules for member in module.members.values() if member.kind == "class"]
    shown = {each.taken_from for each in classes}
    for each in classes:
        for member in each.members.values():
            home, (base, _, _) = member.taken_from[0], member.taken_from[1].rpartition(".")
            if home.partition(".")[0] in PACKAGES and (home, base) not in shown:
                member.taken_from = (each.taken_from[0], f"{each.taken_from[1]}.{member.name}")


def _settle_lazy_names(names: list[str]) -> None:
    """Import the names that a package imports lazily, so that pdoc finds them."""
    for name in names:
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            setattr(module, public, getattr(module, public))


def _settle_inherited_annotations() -> None:
    """Resolve the annotations that our dataclass inherits from TransformerLens, which are only valid in its module."""
    config: Any = kvlens.HookedKVTransformerConfig
    of_init, hints = config.__init__.__annotations__, typing.get_type_hints(config)
    of_init.update({name: hints[name] for name, hint in of_init.items() if isinstance(hint, str)})


def _file_of(module: str) -> str:
    return f"{module.replace('.', '/')}.html"
