"""Checking values against annotations, and describing annotations in messages."""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from kvlens.errors import KVLensError, brief, nearest

Reader = Callable[[Any], Any]
UNFIT = object()
"""Returned by a reader for a value that does not fit."""
INT_MAX = 2**63 - 1
"""The largest integer that torch accepts."""
CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}
SEVERAL = {int: "whole numbers", float: "numbers", str: "strings"}


class Within(NamedTuple):
    """The range of a number, for ``Annotated[int, Within(1)]``; without limits, any finite number (integers of 63 bits).

    Attributes:
        least, most: inclusive limits.
        above, below: exclusive limits.
    """

    least: float | int | None = None
    most: float | int | None = None
    above: float | int | None = None
    below: float | int | None = None

    def holds(self, x: float | int) -> bool:
        """Whether ``x`` is in the range."""
        most = self.most if self.most is not None else INT_MAX if isinstance(x, int) else sys.float_info.max
        least = self.least if self.least is not None else -most
        return least <= x <= most and (self.above is None or x > self.above) and (self.below is None or x < self.below)

    def describe(self, number: str = "", x: float | int | None = None) -> str:
        """The range in words: as a range of ``number``, such as "a whole number", or only the limits that ``x`` violates."""
        most = INT_MAX if self.most is None and isinstance(x, int) and x > INT_MAX else self.most
        lower = f"at least {self.least}" if self.least is not None else f"above {self.above}" if self.above is not None else ""
        upper = f"at most {most}" if most is not None else f"below {self.below}" if self.below is not None else ""
        limits = " and ".join(part for part in (lower, upper) if part)
        if self.least is not None and most is not None:
            top = "2**63 - 1" if most == INT_MAX else most
            limits = lower if x is not None and x < self.least else f"from {self.least} to {top}"
        if not limits:
            return "a finite number"
        return f"{number}{' of' if limits.startswith('at') else ''} {limits}" if number else limits


Count = Annotated[int, Within(1)]
Finite = Annotated[float, Within()]
Seed = Annotated[int, Within(0, INT_MAX)]


def ensure(what: str, kind: Any, value: Any) -> Any:
    """``value`` checked against the annotation ``kind``, with integers of numpy and torch converted to Python's.

    Raises:
        KVLensError: the value has the wrong type, or is out of range; ``what`` is the subject of the message.
    """
    reader = reader_of(kind)
    read = value if reader is None else reader(value)
    if read is UNFIT:
        raise KVLensError(f"{what} must be {_wanted(kind, value)}, got {brief(value)}{_nearest(kind, value)}")
    return read


def one_of(names: Iterable[str]) -> Any:
    """The annotation for one of ``names``, for names that are not known statically."""
    return Literal[tuple(names)]  # type: ignore[valid-type]


def members(kind: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation, of which one must fit."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_array(kind: Any) -> bool:
    """Whether this is a jaxtyping annotation, whose ``array_type`` is the required type of a value."""
    return isinstance(getattr(kind, "array_type", None), type)


@functools.lru_cache(maxsize=4096)
def reader_of(kind: Any) -> Reader | None:
    """A function that converts a value for the annotation, or returns `UNFIT`; None if the function itself checks the value."""
    several = members(kind)
    if len(several) > 1:
        readers = [reader_of(member) for member in several]
        if None in readers or (any(map(is_array, several)) and len(set(several) - {type(None)}) > 1):
            return None

        def any_of(value: Any) -> Any:
            return next((read for reader in readers if reader and (read := reader(value)) is not UNFIT), UNFIT)

        return any_of
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        base, limits = _reader_of_one(inner[0]), [limit for limit in inner[1:] if isinstance(limit, Within)]

        def within(value: Any) -> Any:
            read = base(value)
            return read if read is not UNFIT and all(limit.holds(read) for limit in limits) else UNFIT

        return within
    if origin is Literal:
        return lambda value: value if any(type(value) in (type(one), float) and value == one for one in inner) else UNFIT
    if kind in (bool, int, float):
        return functools.partial(_read_number, kind)
    if origin is Callable:
        return lambda value: value if callable(value) else UNFIT
    if origin in (Mapping, Sequence, Collection, Iterable, tuple):
        of = [_reader_of_one(one) for one in inner if one is not ...]
        return functools.partial(_read_mapping, of) if origin is Mapping else functools.partial(_read_several, kind, of)
    if not isinstance(kind, type) or kind in (Any, Path, inspect.Parameter.empty):
        return None
    if getattr(kind, "_is_protocol", False) and not getattr(kind, "_is_runtime_protocol", False):
        return None
    one = getattr(kind, "array_type", kind)
    return lambda value: value if isinstance(value, one) else UNFIT


def _reader_of_one(kind: Any) -> Reader:
    """The reader of a nested annotation, which accepts anything if :func:`reader_of` is None."""
    return reader_of(kind) or (lambda value: value)


def _read_number(kind: type, value: Any) -> Any:
    number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if isinstance(number, bool) or kind is bool:
        return number if isinstance(number, kind) and type(number) is kind else UNFIT
    return number if isinstance(number, int if kind is int else int | float) and number == number else UNFIT


def _read_mapping(of: Sequence[Reader], value: Any) -> Any:
    fits = isinstance(value, Mapping) and all(of[0](k) is not UNFIT and of[1](v) is not UNFIT for k, v in value.items())
    return value if fits else UNFIT


def _read_several(kind: Any, of: Sequence[Reader], value: Any) -> Any:
    """A list, tuple, array or tensor with each of its values converted; an iterator is returned unchanged."""
    origin = get_origin(kind)
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return UNFIT
    if not isinstance(value, Sized):
        return value if origin is Iterable else UNFIT
    fixed = origin is tuple and ... not in get_args(kind)
    if (origin is Sequence and not hasattr(value, "__getitem__")) or (fixed and len(value) != len(of)):
        return UNFIT
    read = [reader(one) for reader, one in zip(of if fixed else [of[0]] * len(value), value, strict=True)]
    if any(one is UNFIT for one in read):
        return UNFIT
    same = all(new is old for new, old in zip(read, value, strict=True))
    if same and (origin is not tuple or isinstance(value, tuple)):
        return value
    return tuple(read) if origin is tuple else read


def _wanted(kind: Any, value: Any) -> str:
    """What was expected; for a number that is out of range, only the range."""
    found = [member for member in members(kind) if member is not type(None)]
    base, *limits = get_args(found[0]) if len(found) == 1 and get_origin(found[0]) is Annotated else (None,)
    if limits and (read := _reader_of_one(base)(value)) is not UNFIT:
        return next(limit.describe(x=read) for limit in limits if isinstance(limit, Within) and not limit.holds(read))
    return _words(kind)


def _words(kind: Any) -> str:
    """An annotation in words."""
    words = [_words_of_one(member) for member in members(kind) if member is not int or float not in members(kind)]
    with_comma = ", or " if any(" " in word and not word.startswith(("a ", "True")) for word in words) else " or "
    return with_comma.join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _words_of_one(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((one.describe(_words(inner[0])) for one in inner if isinstance(one, Within)), _words(inner[0]))
    if origin is Literal:
        return f"{'one of ' if len(inner) > 1 else ''}{', '.join(map(str, inner))}"
    if is_array(kind):
        return f"a tensor [{axes_in_words(kind.dim_str)}]"
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return "a dict"
    if origin is not None:
        return f"a {_words_of_several(kind).removesuffix('s') if origin is tuple else f'list of {_inner_words(kind)}'}"
    return CALLED.get(kind, f"a {kind.__name__}")


def _words_of_several(kind: Any) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is tuple:
        return "pairs" if len(inner) == 2 and ... not in inner else "tuples"
    if origin in (Sequence, Collection, Iterable):
        return f"lists of {_inner_words(kind)}"
    return SEVERAL.get(kind, f"{kind.__name__}s") if isinstance(kind, type) else f"values, each {_words(kind)}"


def _inner_words(kind: Any) -> str:
    return " or ".join(_words_of_several(member) for member in members(get_args(kind)[0]))


def _nearest(kind: Any, value: Any) -> str:
    """A suggestion of the nearest name that the annotation lists."""
    names = [name for member in members(kind) if get_origin(member) is Literal for name in get_args(member)]
    return nearest(value, [name for name in names if isinstance(name, str)]) if isinstance(value, str) else ""


def axes_in_words(words: str) -> str:
    """The axes of a shape in words."""
    names = {"*": "...", "#": "{0} or 1", "_": "any"}
    return ", ".join(names.get(word[0], "{1}").format(word[1:], word) for word in words.split())
