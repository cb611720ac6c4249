"""Chat templates, which come with a model, run within bounds: :func:`written_by_template`.

A template is a program. Transformers runs it in jinja2's sandbox, where it can reach no file and no code, but can take all the
time and memory there is: ``{{ 'a' * 10**10 }}``. Here it runs in the same sandbox, with the same names, and writes the same
text, but

- every value that it makes is held against `Bounds` and paid for: operands of ``~``, elements of lists, what is written, what a
  filter or a call returns; what could be long at once (``*``, ``%``, ``replace``, ``join``) before it is made;
- every pass of a loop, filter, test and call looks at the clock of this thread's processor time. No step between two looks is
  long, as no value is;
- filters and methods that no chat template needs, and for which one of these does not hold, are refused.

No process or timer is needed, so this holds in every thread and on every system.
"""

import re
import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter, SecurityError
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

SECONDS = 2.0
"""Of processor time. Templates of real models take a few milliseconds for a hundred messages."""
LONGEST_SOURCE = 2**17
"""Characters of a template: ten times the longest of real models."""
SHORTEST, TIMES_THE_MESSAGES, VALUES = 10**6, 10, 100
"""The characters that a value may have, whatever the messages; how many more for each of theirs; how many such values."""
AN_OBJECT, DEEPEST, WIDEST, LONGEST_NUMBER = 16, 100, 9999, 10_000
"""Characters that an object costs; levels of lists in lists; the width of a formatted field; the bits of a whole number."""
ALLOWED_FILTERS = frozenset(
    """
    abs attr capitalize count d default dictsort e escape first float forceescape format groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string sum title tojson
    trim truncate unique upper urlencode wordcount
    """.split()  # noqa: SIM905
)
_OF_STRINGS = """
    capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
    istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split
    splitlines startswith strip swapcase title upper
    """
ALLOWED_METHODS: dict[type | tuple[type, ...], frozenset[str]] = {
    str: frozenset(_OF_STRINGS.split()),
    (bytes, int, float): frozenset(),
    (list, tuple): frozenset({"copy", "count", "index", "grouper", "list"}),  # the last two are of groupby's tuples
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
}
"""By type, what a template may ask of a value; of other types, what the sandbox allows."""


class Bounds:
    """What one template may still make.

    Args:
        messages: what it is given.
    """

    def __init__(self, messages: Sequence[Mapping[str, object]]) -> None:
        given = sum(len(value) for message in messages for value in message.values() if isinstance(value, str))
        self.most = SHORTEST + TIMES_THE_MESSAGES * given
        self.left, self.until = VALUES * self.most, time.thread_time() + SECONDS

    def pay(self, n: int = 1) -> None:
        """Raise SecurityError unless a value of n characters may be made now."""
        self.left -= n
        if n > self.most or self.left < 0:
            raise SecurityError(f"it makes more than {self.most:,} characters of them")
        if time.thread_time() > self.until:
            raise SecurityError(f"it takes more than {SECONDS:g} seconds")

    def size(self, value: object) -> int:
        """The characters of a value with all that is in it; stops where it is too much."""
        total, parts = 0, [(value, 0)]
        while parts:
            part, depth = parts.pop()
            total += len(part) if isinstance(part, str) else AN_OBJECT
            if depth > DEEPEST or total > self.most:
                self.pay(self.most + 1)
            parts += [(inner, depth + 1) for inner in _inside(part)]
        return total


_bounds: ContextVar[Bounds | None] = ContextVar("bounds of the template that runs", default=None)


def written_by_template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, object]], **options: Any) -> Any:
    """What ``tokenizer.apply_chat_template`` returns for these messages.

    Args:
        tokenizer: its template is run within :class:`Bounds`.
        messages: the chat.
        options: as ``apply_chat_template`` takes them.

    Raises:
        Exception: whatever the template raises; a SecurityError of jinja2 where it makes or takes too much.
    """
    bounds = Bounds(messages)
    before = _bounds.set(bounds)
    try:
        text = tokenizer.apply_chat_template(messages, **options)
    finally:
        _bounds.reset(before)
    if isinstance(text, str):
        bounds.pay(len(text))
    return text


_theirs = chat_template_utils._compile_jinja_template


def _compiled(template: str) -> Template:
    return _theirs(template) if _bounds.get() is None else _compiled_here(template)


chat_template_utils._compile_jinja_template = _compiled  # of every thread, only what written_by_template runs is compiled here


@lru_cache(maxsize=32)
def _compiled_here(template: str) -> Template:
    if len(template) > LONGEST_SOURCE:
        raise SecurityError(f"it has {len(template):,} characters, expected at most {LONGEST_SOURCE:,}")
    environment = _theirs("").environment.overlay(optimized=False)  # or the compiler would compute what is constant
    environment.__class__ = _Environment
    kept = {name: _paid(name, function) for name, function in environment.filters.items() if name in ALLOWED_FILTERS}
    environment.filters = {**kept, _PAID: _paid_value, _EACH: _each_value}
    environment.tests = {name: _paid(name, function) for name, function in environment.tests.items()}
    environment.globals = {name: value for name, value in environment.globals.items() if name != "lipsum"}
    return environment.from_string(template)


def _now() -> Bounds:
    bounds = _bounds.get()
    assert bounds is not None, "a template compiled here runs in written_by_template alone"
    return bounds


def _paid_for(value: object) -> object:
    bounds = _now()
    bounds.pay(bounds.size(value))
    return value


def _each(values: Iterable[object]) -> Iterator[object]:
    """The same in the same order, with a look at the clock at each."""
    bounds = _now()

    def looked(iterator: Iterator[object]) -> Iterator[object]:
        for value in iterator:
            bounds.pay()
            yield value

    return looked(iter(values))


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, Namespace):
        return tuple(object.__getattribute__(value, "__dict__").values())
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    return value if isinstance(value, list | tuple | set | frozenset | KeysView | ValuesView | ItemsView) else ()


# --- what is compiled ---------------------------------------------------------------------------------------------------------

_PAID, _EACH = " paid", " each"  # filters that no template can name


@pass_context  # the compiler computes no filter of this kind
def _paid_value(context: Context, value: object) -> object:
    return _paid_for(value)


@pass_context
def _each_value(context: Context, values: Iterable[object]) -> object:
    return _each(values)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)


class _Payments(NodeTransformer):
    """Puts a filter around what is joined, collected or written, and around what loops go through."""

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, _PAID) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, _PAID) for part in node.nodes]
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") == "load":
            node.items = [_filtered(part, _PAID) for part in node.items]
        return node

    visit_Tuple = visit_List

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.value = _filtered(node.value, _PAID)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, _PAID) if isinstance(node.arg, nodes.Slice) else node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, _EACH)
        return node


class _Environment(ImmutableSandboxedEnvironment):
    """Transformers' environment for chat templates, in which everything is paid for."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Payments().visit(super()._parse(source, name, filename))
        return tree

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        if operator != "+":
            _now().pay(_growth(operator, left, right))
        return _paid_for(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> object:
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, LoopContext):  # a recursive loop
            args = (_each(args[0]), *args[1:]) if args else args
        elif isinstance(owner, str) and __obj.__name__ == "join" and args:
            args = (_joinable(owner, args[0]),)
        elif isinstance(owner, str) and __obj.__name__ == "replace":
            _pay_replacement(owner, *args)
        return _paid_for(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        allowed = next((names for kind, names in ALLOWED_METHODS.items() if isinstance(obj, kind)), None)
        return super().is_safe_attribute(obj, attr, value) and (allowed is None or attr in allowed)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None or value.__name__ != "format":
            return None  # format_map is refused as any method that no template needs
        return lambda *args, **kwargs: _Formatter(self).vformat(value.__self__, args, kwargs)


# --- what could be long at once -----------------------------------------------------------------------------------------------

_FIELD = re.compile(r"%(?:\([^()]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_WIDTH = re.compile(r"\d+")


def _growth(operator: str, left: object, right: object) -> int:
    """The characters of a product, a power, or what ``%`` writes. SecurityError for a number that is too long."""
    bounds = _now()
    if isinstance(left, str) and operator == "%":
        fields = _FIELD.findall(left)
        _check_widths(width for field in fields for width in field)
        return len(left) + len(fields) * bounds.size(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 1)}.get(operator, 0)
        if bits > LONGEST_NUMBER:
            raise SecurityError(f"it computes a number of {bits:,} bits")
        return AN_OBJECT
    times, value = (left, right) if isinstance(left, int) else (right, left)
    return bounds.size(value) * max(times, 1) if isinstance(times, int) and isinstance(value, Sequence) else AN_OBJECT


def _check_widths(widths: Iterable[str]) -> None:
    for width in widths:
        if width == "*" or (width and (len(width) > 10 or int(width) > WIDEST)):
            raise SecurityError(f"it writes a field of the width {width[:20]}")


class _Formatter(SandboxedFormatter):
    def format_field(self, value: object, format_spec: str) -> str:
        _check_widths(_WIDTH.findall(format_spec))
        return str(_paid_for(super().format_field(_paid_for(value), format_spec)))


def _pay_replacement(text: str, old: object = "", new: object = "", *_: object) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _now().pay(len(text) + text.count(old) * len(new))


def _joinable(mark: object, values: Iterable[object]) -> list[object]:
    found, bounds = list(_each(values)), _now()
    bounds.pay(bounds.size(found) + len(str(mark)) * len(found))
    return found


def _paid(name: str, function: Callable[..., object]) -> Callable[..., object]:
    """A filter or test that is paid for, and held to :data:`_BEFORE`."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # the value stands behind what jinja2 passes
    before = _BEFORE.get(name)

    @wraps(function)
    def paid(*args: Any, **kwargs: Any) -> object:
        _now().pay()
        if before is not None:
            value = before(args[first], *args[first + 1 :], **kwargs)
            args = (*args[:first], value, *args[first + 1 :])
        return _paid_for(function(*args, **kwargs))

    return paid


def _format(value: object, *args: object, **kwargs: object) -> object:
    _now().pay(_growth("%", str(value), kwargs or args))
    return value


def _indent(value: object, width: Any = 4, *_: object, **__: object) -> object:
    _now().pay((len(str(value).splitlines()) + 2) * (len(width) if isinstance(width, str) else max(int(width), 1)))
    return value


def _int(value: object, *_: object, **__: object) -> object:
    if isinstance(value, str) and len(value) > sys.int_info.default_max_str_digits:
        raise SecurityError(f"it reads a number of {len(value):,} digits")
    return value


def _join(value: Iterable[object], d: object = "", *_: object, **__: object) -> object:
    return _joinable(d, value)


def _replace(value: object, old: object, new: object, *_: object, **__: object) -> object:
    _pay_replacement(str(value), str(old), str(new))
    return value


def _round(value: object, precision: Any = 0, *_: object, **__: object) -> object:
    _check_widths([str(abs(precision))])
    return value


def _sum(value: object, *args: object, start: object = 0, **_: object) -> object:
    if not isinstance([*args[1:], start][0], int | float):
        raise SecurityError("it adds up what is no number")
    return value


def _tojson(
    value: object, ensure_ascii: object = False, indent: Any = None, separators: Any = None, *_: object, **__: object
) -> object:
    bounds = _now()
    step = (len(indent) if isinstance(indent, str) else int(indent or 0)) + sum(map(len, separators or ()))
    _check_widths([str(max(step, 0))])
    bounds.pay(bounds.size(value) + bounds.size(value) // AN_OBJECT * step)
    return value


_BEFORE: dict[str, Callable[..., object]] = {
    "format": _format,
    "indent": _indent,
    "int": _int,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "tojson": _tojson,
}
"""What is asked of a filter's arguments before it runs; the value is returned, as a list where it had to be gone through."""
