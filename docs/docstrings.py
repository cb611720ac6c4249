"""What Sphinx shows of kvlens' docstrings: they are Markdown with Google sections, roles, and tables under rules of ``=``.

autodoc hands each docstring over; here it becomes Markdown that MyST reads, with a link wherever a name of kvlens stands
between backticks. A name that leads nowhere is left to Sphinx, which warns.
"""

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

from docutils import nodes
from myst_parser.mdit_to_docutils.sphinx_ import SphinxRenderer
from myst_parser.parsers.mdit import create_md_parser
from sphinx import addnodes
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

DOCUMENTED: dict[Any, str] = {}
"""Classes and functions (by identity) and modules (by name) -> the name under which the reference shows them."""

_RULE = re.compile(r"=+(?: =+)+")
_FENCE = re.compile(r"^( *)```.*?^\1```", re.M | re.S)
_ROLE = re.compile(r":(\w+):`([^`]+)`")
_NAME = re.compile(r"(?<![`\w}\[])`~?(kvlens(?:\.\w+)+)(\(\))?`(?!`)")


def markdown(text: str) -> str:
    """A docstring as Markdown of MyST; sections become lists of fields."""
    config = Config(napoleon_use_ivar=True, napoleon_use_rtype=False, napoleon_use_admonition_for_examples=False)
    text = re.sub(r"^Returns:\n +", ":returns: ", text, flags=re.M)  # what stands before a colon there is no type
    fields = re.sub(r"(?<=:)(param|ivar) ([^:\n]*, [^:\n]*):", _several, str(GoogleDocstring(text, config)))
    return linked(tables(fenced(fields)))


def _several(found: re.Match[str]) -> str:
    """Names of one field, joined so that Sphinx does not take all but the last for a type."""
    return f"{found[1]} " + found[2].replace(", ", ",\u200b") + ":"


def linked(text: str) -> str:
    """``text`` with roles in MyST's form, and with roles around the names of kvlens; code blocks stay as they are."""
    parts = []
    end = 0
    for fence in _FENCE.finditer(text):
        parts += [_linked(text[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _linked(text[end:])])


def _linked(text: str) -> str:
    text = _ROLE.sub(lambda found: f"{{py:obj}}`{found[2]}`", text)
    return _NAME.sub(lambda found: f"{{py:obj}}`{found[1]}{found[2] or ''}`", text)


def fenced(text: str) -> str:
    """Examples after ``>>>``, which Markdown would read as quotations, and code after ``::``, as code blocks."""
    text = re.sub(r"::\n(?=\n +\S)", ":\n", text)
    return re.sub(
        r"(?:^|(?<=\n\n))((?P<margin> *)>>> .*?)(?=\n *\n|\Z)",
        lambda found: f"{found['margin']}```python\n{found[1]}\n{found['margin']}```",
        text,
        flags=re.S,
    )


def tables(text: str) -> str:
    """The tables of a docstring, columns under rules of ``=``, as Markdown."""
    lines = text.splitlines()
    done: list[str] = []
    table: list[str] = []
    for number, line in enumerate(lines):
        if not table and not _RULE.fullmatch(line.strip()):
            done.append(line)
            continue
        table.append(line)
        ends = number + 1 == len(lines) or not lines[number + 1].strip()
        if len(table) > 1 and ends and _RULE.fullmatch(line.strip()):
            done += _table(table)
            table = []
    return "\n".join([*done, *table])


def _table(lines: list[str]) -> list[str]:
    margin = lines[0][: -len(lines[0].lstrip())]
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


class Markdown(SphinxDirective):
    """A docstring inside what autodoc writes, read by MyST."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """The nodes of the text."""
        parser = create_md_parser(self.env.myst_config, SphinxRenderer)
        found = nodes.container()
        parser.options["document"], parser.options["current_node"] = self.state.document, found
        parser.renderer.setup_render(parser.options, {})
        parser.renderer.nested_render_text("\n".join(self.content), self.lineno, inline=False)
        return found.children


def process_docstring(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Wrap a docstring for the directive above; names in it are those of the file that it stands in.

    Python's own for named tuples says nothing.
    """
    text = "\n".join(lines)
    if not text.strip() or text.startswith("Alias for field number"):
        lines[:] = []
        return
    found = getattr(found, "fget", None) or found
    home = getattr(inspect.unwrap(found) if callable(found) else found, "__module__", None)
    home = [f".. py:currentmodule:: {home}", ""] if str(home).startswith("kvlens") else []
    lines[:] = [*home, ".. markdown::", "", *(f"   {line}" for line in markdown(text).splitlines()), ""]


def process_signature(app: Any, what: str, name: str, found: Any, options: Any, signature: str, returned: str) -> Any:
    """Leave out the ranges of arguments, which `kvlens.checks` compares."""
    return (_without_ranges(signature), _without_ranges(returned))


def _without_ranges(text: str | None) -> str | None:
    return text and re.sub(r"Annotated\[((?:[^\[\]]|\[[^\[\]]*\])*?), \w*\.?Within\([^()]*\)\]", r"\1", text)


def resolve(name: str) -> tuple[Any, list[str]]:
    """The module of a dotted name, as long as one can be imported, and what follows."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            return importlib.import_module(".".join(parts[:cut])), parts[cut:]
        except ModuleNotFoundError:
            continue
    raise AttributeError(name)


def documented(name: str) -> list[str]:
    """Names under which the reference may show what ``name`` means, the best first.

    Raises:
        AttributeError: it means nothing.
    """
    module, path = resolve(name)
    if not path:
        return [module.__name__]
    first = getattr(module, path[0])
    home = DOCUMENTED.get(id(first), f"{module.__name__}.{path[0]}")
    found = [".".join([home, *path[1:]])]
    if len(path) > 1:
        if not hasattr(first, path[1]) and path[1] not in inspect.get_annotations(first):
            bases = inspect.getmro(first) if inspect.isclass(first) else ()
            if not any(path[1] in vars(base).get("__annotations__", {}) for base in bases):
                raise AttributeError(name)
        for base in inspect.getmro(first) if inspect.isclass(first) else ():
            found.append(".".join([DOCUMENTED.get(id(base), base.__qualname__), *path[1:]]))
        found.append(home)
    elif inspect.getmodule(first) is not None:
        found.append(f"{inspect.getmodule(first).__name__}.{getattr(first, '__qualname__', path[0])}")
    return [*found, getattr(inspect.getmodule(first), "__name__", module.__name__), module.__name__]


def drop_foreign_types(app: Any, doctree: nodes.document) -> None:
    """Make plain text of the types of other libraries in signatures: nothing of ours is there to link, and a search is long."""
    for node in list(doctree.findall(addnodes.pending_xref)):
        if node.get("reftype") == "class" and not node["reftarget"].startswith("kvlens"):
            node.replace_self(node.children)


def missing_reference(app: Any, env: Any, node: Any, contnode: Any) -> Any:
    """Link a name that is imported elsewhere, inherited, or a field of a class, to where it is shown."""
    if node.get("refdomain") != "py":
        return None
    target, module, of_class = node["reftarget"].removesuffix("()"), node.get("py:module"), node.get("py:class")
    objects = env.domains["py"].objects
    for name in _meanings(target, module, of_class):
        try:
            found = documented(name)
        except (AttributeError, ValueError, TypeError):
            continue
        for each in found:
            if each in objects:
                entry = objects[each]
                return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode, each)
        if not found[0].startswith("kvlens"):
            return contnode  # of another library
    return None


def _meanings(target: str, module: str | None, of_class: str | None) -> list[str]:
    """What a name may stand for: of its class, its module or the packages above, or as it is written."""
    parts = (module or "").split(".")
    above = [".".join(parts[:n]) for n in range(len(parts), 0, -1)] if module else []
    return [*([f"{module}.{of_class}.{target}"] if of_class else []), *(f"{each}.{target}" for each in above), target]


def math_renderers() -> tuple[Callable, Callable]:
    """What draws formulas in a line and as blocks: MathML, which browsers draw themselves, without a script."""
    from latex2mathml.converter import convert

    def inline(self: Any, node: Any) -> None:
        self.body.append(convert(node.astext()))
        raise nodes.SkipNode

    def block(self: Any, node: Any) -> None:
        self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
        raise nodes.SkipNode

    return inline, block
