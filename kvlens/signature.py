"""A public function's signature, kept: a misspelt argument, or one of another type, is refused in words, before all else."""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Sized
from inspect import BoundArguments
from pathlib import Path
from typing import Any, TypeVar, Union

from kvlens.arguments import brief, first_line
from kvlens.errors import KVLensError, WrongArguments, nearest

Function = TypeVar("Function", bound=Callable[..., Any])
Class = TypeVar("Class", bound=type[Any])
UNFIT = object()
"""In the place of a value that is of another kind."""
CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}
OUT_OF_MEMORY = ("allocate memory", "not enough memory", "out of memory", "calculation overflowed", "multiplication overflow")
SEVERAL = {int: "whole numbers", float: "numbers", str: "strings"}


def checked(function: Function) -> Function:
    """Hold a function to the plain types of its signature; for use as a decorator.

    Whole numbers of numpy and torch, such as a column of a table holds, arrive as Python's; NaN is no number. The shape of a
    tensor, and what else an argument may be that takes a tensor or a path among other things, the function asks itself. What
    asks for more memory than there is, is refused when it is found out.

    >>> @checked
    ... def scaled(values: Sequence[float], by: int = 2) -> list[float]:
    ...     return [by * value for value in values]
    >>> scaled([0.5, 1])
    [1.0, 2]
    >>> scaled("0.5")
    Traceback (most recent call last):
    kvlens.errors.KVLensError: scaled: values must be a list of numbers, got '0.5'
    """
    signature = inspect.signature(function)
    kinds = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if _is_plain(parameter.annotation) and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    plain_name = function.__qualname__.split("<locals>.")[-1].removesuffix(".__init__")
    of_a_class = next(iter(signature.parameters), None) in ("self", "cls") and not function.__qualname__.endswith("__init__")

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        name_of_it = f"{_class_of(args[0]).__name__}.{function.__name__}" if of_a_class and args else plain_name
        given = bound(name_of_it, signature, args, kwargs)
        for name, value in given.arguments.items():
            if name in kinds and value is not signature.parameters[name].default:
                given.arguments[name] = fitting(f"{name_of_it}: {name}", kinds[name], value)
        try:
            return function(*given.args, **given.kwargs)
        except (RuntimeError, MemoryError) as error:
            if not _is_about_memory(error):
                raise
            why = f"this asks for more memory than there is ({first_line(error)}); ask for less"
            raise KVLensError(f"{name_of_it}: {why}") from error

    return typing.cast(Function, held)


def _class_of(first: Any) -> type:
    """The class that a method is called on, or of: a user knows it, and not the base that has the method."""
    return first if isinstance(first, type) else type(first)


def bound(name_of_it: str, signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> BoundArguments:
    """The arguments of a call, by name.

    Raises:
        WrongArguments: the function does not have one of them (the nearest is proposed), or lacks one.
    """
    names, takes_any = _names(signature)
    unknown = next((name for name in kwargs if not takes_any and name not in names), None)
    try:
        if unknown is None:
            return signature.bind(*args, **kwargs)
        problem = f"no argument is called {unknown!r}{nearest(unknown, names) or '.'}"
    except TypeError as error:
        problem = f"{first_line(error)}."
    taken = [name for name in names if name not in ("self", "cls")]
    raise WrongArguments(f"{name_of_it}: {problem} It takes {', '.join(taken) or 'none'}")


def _names(signature: inspect.Signature) -> tuple[list[str], bool]:
    """What a call may name, and whether it may name anything else."""
    parameters = signature.parameters.values()
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def named_fields(made: Class) -> Class:
    """Let a class answer a misspelt argument as a function does that is `checked`; for use as a decorator of dataclasses."""
    init, signature = made.__init__, inspect.signature(made.__init__)

    @functools.wraps(init)
    def held(self: Any, *args: Any, **kwargs: Any) -> None:
        bound(made.__name__, signature, (self, *args), kwargs)
        init(self, *args, **kwargs)

    made.__init__ = held  # type: ignore[misc]
    return made


def fitting(what: str, kind: Any, value: Any) -> Any:
    """``value`` as the annotation ``kind`` has it: whole numbers of numpy and torch as Python's; the rest as it is.

    Raises:
        KVLensError: it is of another kind.
    """
    read = _read(kind, value)
    if read is UNFIT:
        raise KVLensError(f"{what} must be {_called(kind)}, got {brief(value)}")
    return read


def hold_fields(given: Any) -> None:
    """Hold a dataclass to the plain types of its fields; for its ``__post_init__``.

    Raises:
        KVLensError: a field is of another kind.
    """
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        read = fitting(f"{type(given).__name__}: {field.name}", field.type, value)
        if read is not value:
            object.__setattr__(given, field.name, read)  # also where it is frozen


def _is_about_memory(error: Exception) -> bool:
    """Whether torch, or Python, found no room for a tensor: torch has no class of its own for that on the CPU."""
    return isinstance(error, MemoryError) or any(word in str(error) for word in OUT_OF_MEMORY)


@functools.cache
def _members(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (Union, types.UnionType) else (kind,)


@functools.cache
def _is_plain(kind: Any) -> bool:
    """Whether a value can be judged by the annotation; one that may be a tensor or something else is judged by its reader."""
    members = _members(kind)
    return all(
        typing.get_origin(member) in (Sequence, Collection, Iterable, Mapping, Callable, tuple)
        or (isinstance(member, type) and member not in (Any, Path, inspect.Parameter.empty) and not _is_array(member))
        or (len(members) == 1 and _is_array(member))
        for member in members
    )


def _is_array(kind: Any) -> bool:
    """Whether it is an annotation of jaxtyping, whose ``array_type`` is what a value must be."""
    return isinstance(getattr(kind, "array_type", None), type)


def _read(kind: Any, value: Any) -> Any:
    """``value`` as the annotation has it, or `UNFIT`."""
    if not _is_plain(kind):
        return value
    return next((read for member in _members(kind) if (read := _read_one(member, value)) is not UNFIT), UNFIT)


def _read_one(kind: Any, value: Any) -> Any:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind in (bool, int, float):
        return _read_number(kind, value)
    if origin is Callable:
        return value if callable(value) else UNFIT
    if origin is Mapping:
        return value if isinstance(value, Mapping) and _all_fit(inner, value.items()) else UNFIT
    if origin is not None:
        return _read_several(origin, inner, value)
    return value if isinstance(value, getattr(kind, "array_type", kind)) else UNFIT


def _all_fit(kinds: tuple[Any, Any], pairs: Iterable[tuple[Any, Any]]) -> bool:
    return all(_read(kind, one) is not UNFIT for pair in pairs for kind, one in zip(kinds, pair, strict=True))


def _read_number(kind: type, value: Any) -> Any:
    number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if isinstance(number, bool) or kind is bool:
        return number if isinstance(number, kind) and type(number) is kind else UNFIT
    return number if isinstance(number, int if kind is int else int | float) and number == number else UNFIT


def _read_several(origin: Any, inner: tuple[Any, ...], value: Any) -> Any:
    """A list, tuple, array or tensor with each of its values read; a stream is taken as it is."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return UNFIT
    if not isinstance(value, Sized):
        return value if origin is Iterable else UNFIT
    pair = origin is tuple and ... not in inner
    if (origin is Sequence and not hasattr(value, "__getitem__")) or (pair and len(value) != len(inner)):
        return UNFIT
    kinds = inner if pair else [inner[0]] * len(value)
    read = [_read(kind, one) for kind, one in zip(kinds, value, strict=True)]
    if any(one is UNFIT for one in read):
        return UNFIT
    same = all(new is old for new, old in zip(read, value, strict=True))
    if same and (origin is not tuple or isinstance(value, tuple)):
        return value
    return tuple(read) if origin is tuple else read


def _called(kind: Any) -> str:
    """An annotation in words."""
    words = [_called_one(member) for member in _members(kind)]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _called_one(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Callable:
        return "a function"
    if origin is Mapping:
        return "a dict"
    if origin is not None:
        return f"a {_called_several(kind).removesuffix('s') if origin is tuple else 'list of ' + _inner_called(kind)}"
    return CALLED.get(kind, f"a {getattr(kind, 'array_type', kind).__name__}")


def _called_several(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return "pairs" if len(inner) == 2 and ... not in inner else "tuples"
    if origin is not None:
        return f"lists of {_inner_called(kind)}"
    return SEVERAL.get(kind, f"{kind.__name__}s")


def _inner_called(kind: Any) -> str:
    return " or ".join(_called_several(member) for member in _members(typing.get_args(kind)[0]))
