"""An op's signature, kept: tensors that do not belong together are refused in words, not broadcast or cut in silence.

The shapes stand in the annotations, and are read from there once. Shapes that were found to fit are remembered, so that a call
costs a microsecond or two more.
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from kvlens.arguments import brief
from kvlens.errors import KVLensError
from kvlens.signature import bound

Function = TypeVar("Function", bound=Callable[..., Any])
Axis = tuple[str | int | None, bool]
"""Its name, its size, or None for any; and whether 1 may stand in its place."""
KEPT = 1024
"""Combinations of shapes that are remembered; a decoded text has one per token."""
Sizes = dict[str | int | None, Any]


class Wanted(NamedTuple):
    """What a tensor among the arguments must look like.

    Attributes:
        label: where it is: the argument, or a field of one.
        path: from the argument to that field; empty for the argument itself.
        each: whether the argument is a list of such tensors.
        optional: whether it may be None.
        words: its axes, as annotated.
        first, last: its single axes; ``last`` are those behind ``several``.
        several: the name of any number of axes between them; None where there is none.
    """

    label: str
    path: tuple[str, ...]
    each: bool
    optional: bool
    words: str
    first: tuple[Axis, ...]
    several: str | None
    last: tuple[Axis, ...]


def shaped(**multiples: str) -> Callable[[Function], Function]:
    """Hold a function to the shapes of its signature; for use as a decorator.

    Args:
        multiples: axes of which one must be a multiple of the other, as query heads are of key-value heads.

    >>> import torch
    >>> from jaxtyping import Float
    >>> @shaped()
    ... def scaled(x: Float[Tensor, "pos d"], by: Float[Tensor, " d"]) -> Float[Tensor, "pos d"]:
    ...     return x * by
    >>> scaled(torch.ones(5, 3), torch.ones(1))
    Traceback (most recent call last):
    kvlens.errors.KVLensError: scaled: expected x [pos, d], by [d]; got x [5, 3], by [1]
    """

    def hold(function: Function) -> Function:
        signature = inspect.signature(function)
        wanted = {name: tuple(_wanted(name, parameter.annotation)) for name, parameter in signature.parameters.items()}
        accepted: set[Any] = set()

        @functools.wraps(function)
        def held(*args: Any, **kwargs: Any) -> Any:
            shapes: tuple[Any, ...] = tuple([x.shape if isinstance(x, Tensor) else _shape_of(x) for x in args])
            if kwargs:
                shapes += tuple([(name, x.shape if isinstance(x, Tensor) else _shape_of(x)) for name, x in kwargs.items()])
            if shapes not in accepted:
                given = bound(function.__name__, signature, args, kwargs).arguments
                if not _belong_together(wanted, given, multiples):
                    raise KVLensError(f"{function.__name__}: {_misfit(wanted, given, multiples)}")
                if len(accepted) >= KEPT:
                    accepted.clear()
                accepted.add(shapes)
            return function(*args, **kwargs)

        return typing.cast(Function, held)

    return hold


def _shape_of(x: Any) -> Any:
    """Of a tensor, of each of several, or the kind of something else: equal where an op would be given the like."""
    if isinstance(x, Tensor):
        return x.shape
    return (type(x), *map(_shape_of, x)) if isinstance(x, tuple | list) else type(x)


def _belong_together(wanted: Mapping[str, tuple[Wanted, ...]], given: Mapping[str, Any], multiples: Mapping[str, str]) -> bool:
    sizes: Sizes = {}
    if not all(_fit(wanted.get(name, ()), value, sizes) for name, value in given.items()):
        return False
    pairs = [(sizes[whole], sizes[part]) for whole, part in multiples.items() if whole in sizes and part in sizes]
    return all(part > 0 and whole % part == 0 for whole, part in pairs)


def _fit(tensors: tuple[Wanted, ...], value: Any, sizes: Sizes) -> bool:
    """Whether an argument's tensors are as wanted; ``sizes`` learns the axes that come here first."""
    for one in tensors:
        x = _at(one.path, value)
        if x is None and one.optional:
            continue
        for tensor in x if one.each and isinstance(x, Sequence) else (x,):
            if not isinstance(tensor, Tensor) or not _has(one, tensor.shape, sizes):
                return False
    return True


def _has(wanted: Wanted, shape: Sequence[int], sizes: Sizes) -> bool:
    if wanted.several is not None:
        return _has_several(wanted, tuple(shape), sizes)
    if len(shape) != len(wanted.first):
        return False
    return all(_is(axis, size, sizes) for axis, size in zip(wanted.first, shape, strict=True))


def _has_several(wanted: Wanted, shape: tuple[int, ...], sizes: Sizes) -> bool:
    """Where a word stands for any number of axes."""
    n_first, n_last = len(wanted.first), len(shape) - len(wanted.last)
    if n_last < n_first:
        return False
    single = zip((*wanted.first, *wanted.last), (*shape[:n_first], *shape[n_last:]), strict=True)
    if not all(_is(axis, size, sizes) for axis, size in single):
        return False
    assert wanted.several is not None
    middle, may_be_one = shape[n_first:n_last], wanted.several.startswith("*#")
    known = sizes.setdefault(wanted.several.lstrip("*#"), middle)
    if not may_be_one:
        return bool(known == middle)
    return len(middle) <= len(known) and all(a in (1, b) for a, b in zip(middle[::-1], known[::-1], strict=False))


def _is(axis: Axis, size: int, sizes: Sizes) -> bool:
    name, may_be_one = axis
    if name is None or (may_be_one and size == 1):
        return True
    return (name if isinstance(name, int) else sizes.setdefault(name, size)) == size


def _wanted(name: str, annotation: Any) -> Iterator[Wanted]:
    """The tensors that an argument is, holds, or is a list of; none for an argument of another kind."""
    members = typing.get_args(annotation) if type(None) in typing.get_args(annotation) else (annotation,)
    optional = type(None) in members
    for member in members:
        if hasattr(member, "dim_str"):
            yield _read(name, False, optional, member.dim_str)
        elif typing.get_origin(member) is Sequence and hasattr(typing.get_args(member)[0], "dim_str"):
            yield _read(name, True, optional, typing.get_args(member)[0].dim_str)
        elif hasattr(member, "_fields"):
            for field in member._fields:
                for inner in _wanted(f"{name}.{field}", member.__annotations__[field]):
                    yield inner._replace(path=(field, *inner.path), optional=optional or inner.optional)


def _at(path: tuple[str, ...], value: Any) -> Any:
    """A field of a field; what has no such field, itself."""
    for field in path:
        value = getattr(value, field, value)
    return value


def _read(label: str, each: bool, optional: bool, words: str) -> Wanted:
    axes = words.split()
    at = next((i for i, word in enumerate(axes) if word.startswith("*")), None)
    several, first, last = (None, axes, []) if at is None else (axes[at], axes[:at], axes[at + 1 :])
    return Wanted(label, (), each, optional, words, tuple(map(_axis, first)), several, tuple(map(_axis, last)))


def _axis(word: str) -> Axis:
    name = word.removeprefix("#")
    return (int(name) if name.isdigit() else None if name == "_" else name), word.startswith("#")


def _misfit(wanted: Mapping[str, tuple[Wanted, ...]], given: Mapping[str, Any], multiples: Mapping[str, str]) -> str:
    """What was expected, and what came."""
    expected, came = [], []
    for name, tensors in wanted.items():
        value = given.get(name)
        for one in tensors:
            x = _at(one.path, value)
            if name not in given or (x is None and one.optional):
                continue
            expected.append(f"{one.label} {'of matrices ' if one.each else ''}[{', '.join(map(_called, one.words.split()))}]")
            several = x if one.each and isinstance(x, Sequence) else [x]
            came.append(f"{one.label} {', '.join(str(list(t.shape)) if isinstance(t, Tensor) else brief(t) for t in several)}")
    rules = [f"{whole} a multiple of {part}" for whole, part in multiples.items()]
    return f"expected {', '.join([*expected, *rules])}; got {', '.join(came)}"


def _called(word: str) -> str:
    """An axis in words."""
    if word.startswith("*"):
        return "..."
    return {"#": f"{word[1:]} or 1", "_": "any"}.get(word[0], word)
