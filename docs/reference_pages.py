"""The pages of the reference, one for each package: the docstrings of its modules, and every public object once.

An object is shown under the shortest name by which it can be imported. What a package does not export is its modules' own; a
link to it leads to the module.
"""

import functools
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from docstrings import DOCUMENTED, linked, markdown
from sphinx.pycode import ModuleAnalyzer

WITHOUT_A_PAGE = ("kvlens.cli", "kvlens.app", "kvlens.__main__", "kvlens.analyses.__main__")
"""Commands, which have --help."""
OPEN = ("kvlens", "kvlens.analyses")
"""Packages that export what most people need; their modules offer more to who writes an analysis."""


@functools.cache
def modules() -> dict[str, list[str]]:
    """The modules of each page, by package; those that lie directly in ``kvlens`` share a page of their own."""
    found: dict[str, list[str]] = {"kvlens": []}
    _walk("kvlens", found)
    return found


def _walk(package: str, found: dict[str, list[str]]) -> None:
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if info.name in WITHOUT_A_PAGE or info.name.rpartition(".")[2].startswith("_"):
            continue
        if hasattr(importlib.import_module(info.name), "__path__"):
            found[info.name] = []
            _walk(info.name, found)
        else:
            found[package].append(info.name)


def public(module: str) -> list[str]:
    """The classes and functions that a module offers: those of ``__all__``, or those that it defines."""
    of = importlib.import_module(module)
    if hasattr(of, "__all__"):
        return [name for name in of.__all__ if _is_shown(getattr(of, name))]
    if _is_closed(module):
        return []
    return [
        name for name, each in vars(of).items() if not name.startswith("_") and _is_shown(each) and each.__module__ == module
    ]


def _is_closed(module: str) -> bool:
    """Whether the package above says what is public of its modules, or they are experiments, which commands run."""
    package = module.rpartition(".")[0]
    says = package not in ("", *OPEN) and hasattr(importlib.import_module(package), "__all__")
    return says or re.fullmatch(r"kvlens\.papers\.(?!harness)\w+", package) is not None


def _is_shown(each: Any) -> bool:
    return (inspect.isclass(each) or inspect.isroutine(each)) and getattr(each, "__module__", "").startswith("kvlens")


def constants(module: str) -> list[str]:
    """The documented constants of a module."""
    found = ModuleAnalyzer.for_module(module).find_attr_docs()
    return [name for scope, name in found if not scope and not name.startswith("_")]


@functools.cache
def objects() -> dict[str, list[tuple[str, str]]]:
    """What is shown under each module: kind and name of everything that no module before it shows."""
    order = sorted([*modules(), *(each for those in modules().values() for each in those)], key=lambda name: name.count("."))
    shown: dict[str, list[tuple[str, str]]] = {}
    for module in order:
        shown[module] = []
        for name in public(module):
            each = getattr(importlib.import_module(module), name)
            if id(each) not in DOCUMENTED:
                DOCUMENTED[id(each)] = f"{module}.{name}"
                kind = "exception" if inspect.isclass(each) and issubclass(each, Exception) else "class"
                shown[module].append((kind if inspect.isclass(each) else "function", name))
        shown[module] += [("data", name) for name in constants(module)]
    return shown


def write(folder: Path) -> None:
    """Write the pages as Markdown; one that is as it was stays untouched, so that a second build reads it from its cache."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {f"{package}.md": page(package) for package in modules() if package != "kvlens"}
    pages["kvlens.md"] = _section("kvlens", "#")
    pages["modules.md"] = "\n".join(["# Single modules", *(_section(each, "##") for each in modules()["kvlens"])])
    for name, text in pages.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    for path in folder.glob("*.md"):
        if path.name not in pages:
            path.unlink()


def page(package: str) -> str:
    """The page of a package and the modules in it."""
    return "\n".join([_section(package, "#"), *(_section(each, "##") for each in modules()[package])])


def _section(module: str, level: str) -> str:
    text = markdown(inspect.getdoc(importlib.import_module(module)) or "")
    text = re.sub(r"^#(?=#* )", f"{level}#", text, flags=re.M)
    directives = [f".. auto{kind}:: {module}.{name}\n{_options(module, kind, name)}" for kind, name in objects()[module]]
    shown = "\n".join(["```{eval-rst}", f".. py:currentmodule:: {module}\n", *directives, "```"])
    return f"{level} `{module}`\n\n```{{py:module}} {module}\n```\n\n{text}\n\n{shown}\n"


def _options(module: str, kind: str, name: str) -> str:
    """A constant that takes more than a line is shown without its value."""
    is_long = kind == "data" and len(repr(getattr(importlib.import_module(module), name))) > 120
    return "   :no-value:\n" if is_long else ""


def fill(app: Any, docname: str, source: list[str]) -> None:
    """On pages that are written by hand: link the names of kvlens, and put in the tables that are made from the code."""
    if not docname.startswith("docs/") or "/api/" in docname:
        return
    text = source[0].replace("<!-- hook points -->", hook_points())
    text = text.replace("<!-- what kvlens.components says -->", _table_of("kvlens.components", "hook point"))
    for paper in re.findall(r"<!-- misprints of ([\w.]+) -->", text):
        text = text.replace(f"<!-- misprints of {paper} -->", _table_of(paper, "place"))
    source[0] = linked(text)


def _table_of(module: str, first: str) -> str:
    """The Markdown table of a docstring whose first column has this name."""
    (found,) = re.findall(rf"^\| {first} \|(?:.*\n?\|)*.*", importlib.import_module(module).__doc__ or "", re.M)
    return found


AXES = {
    11: "batch", 5: "pos", 6: "heads", 3: "kv_heads", 4: "d_head", 8: "d_phi", 17: "keys", 12: "window", 13: "window + 1",
    24: "d_model", 23: "d_mlp", 29: "d_vocab",
}  # fmt: skip
"""What an axis of so many numbers is in the models below: no two axes are of one length."""


@functools.cache
def hook_points() -> str:
    """A table of all hook points with their shapes, from passes of models with linear attention, softmax, and KV shift."""
    of_models = {name: _shapes(**options) for name, options in _models().items()}
    order = list(dict.fromkeys(hook for shapes in reversed(of_models.values()) for hook in shapes))
    rows = ["```{index} " + ", ".join(sorted({"! " + hook.rpartition(".")[2] for hook in order})) + "\n```\n"]
    rows += [f"| hook point | {' | '.join(of_models)} |", "|---" * (1 + len(of_models)) + "|"]
    for hook in order:
        rows.append(f"| `{hook}` | {' | '.join(shapes.get(hook, '') for shapes in of_models.values())} |")
    return "\n".join(rows)


def _models() -> dict[str, dict[str, Any]]:
    from kvlens import KVShiftConfig

    linear = {"attention": "linear", "feature_map": "hedgehog", "rotary_placement": "before"}
    return {"linear": linear, "softmax": {}, "softmax with KV shift": {"kv_shift": KVShiftConfig(queries=True, window=12)}}


def _shapes(**options: Any) -> dict[str, str]:
    import torch

    from kvlens import HookedKVTransformer, HookedKVTransformerConfig, convert_prompt

    size = dict(n_layers=1, d_model=24, n_heads=6, d_head=4, n_key_value_heads=3, d_mlp=23, d_vocab=29, n_ctx=64, act_fn="gelu")
    rotary = dict(positional_embedding_type="rotary", rotary_dim=4)
    model = HookedKVTransformer(HookedKVTransformerConfig(**size, **rotary, **options))
    with torch.no_grad(), model.kv_bias(convert_prompt(model, torch.arange(17))):
        _, cache = model.run_with_cache(torch.arange(55).reshape(11, 5) % 29)
    return {
        name.replace("blocks.0.", "blocks.{layer}."): "[" + ", ".join(AXES.get(n, str(n)) for n in tensor.shape) + "]"
        for name, tensor in cache.items()
    }


def shorten(app: Any, pagename: str, templatename: str, context: dict[str, Any], doctree: Any) -> None:
    """Leave out Sphinx' marks around each word of a signature or a name, a quarter of a page, and around each blank."""
    if "body" in context:
        context["body"] = re.sub(r'<span class="(?:pre">([^<]*)|w">( *))</span>', r"\1\2", context["body"])


def finish(app: Any, error: Exception | None) -> None:
    """The first page, which leads to that of the documentation."""
    if error is None and app.builder.format == "html":
        leads = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        page = f'<!doctype html><html lang="en"><title>kvlens</title>{leads}</html>\n'
        (Path(app.outdir) / "index.html").write_text(page, encoding="utf-8")
