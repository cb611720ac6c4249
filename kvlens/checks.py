"""Argument checking: every call must match what the signature declares (types, ranges, shapes).

A call that does not match raises an error before the function runs. The error names the function, the expected and the given
value, and the shapes of tensors that do not match. Everything is declared by annotations::

    @checked
    def attend(
        q: Float[Tensor, "batch pos head d"],
        k: Float[Tensor, "batch key kv_head d"],
        kind: Literal["causal", "full"] = "causal",
        n_landmarks: Annotated[int, Within(1, 4096)] | None = None,
    ): ...

A module checks at its door: ``doors(__name__)`` at its end checks every call of its public functions that comes from outside
kvlens. kvlens' own calls are not checked: an op takes a few microseconds, and a check would be a tenth of that.

Values come first below, then shapes, which are in jaxtyping's syntax and parsed by jaxtyping, then the decorator. Shapes
that have passed are cached, so that a check of an op's arguments takes a microsecond or two.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from kvlens.errors import KVLensError, brief, nearest

Reader = Callable[[Any], Any]
UNFIT = object()
"""Returned by a reader for a value that does not fit."""
INT_MAX = 2**63 - 1
"""The largest integer that torch accepts."""
CALLED = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}
SEVERAL = {int: "whole numbers", float: "numbers", str: "strings"}


@dataclass(frozen=True)
class Within:
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


@dataclass(frozen=True)
class Expected:
    """A tensor among the arguments.

    Attributes:
        argument: name of the argument.
        path: path from the argument to the field that is the tensor; empty for the argument itself.
        kind: annotation of the tensor.
        each: whether the argument is a list of such tensors.
        optional: whether it may be None.
    """

    argument: str
    path: tuple[str, ...]
    kind: Any
    each: bool
    optional: bool

    @property
    def order(self) -> int:
        """Sort key: sizes are determined from plain axes first, then from axes that may be broadcast or are calculated."""
        return int("#" in self.kind.dim_str) + 2 * any(hasattr(dim, "elem") for dim in self.kind.dims)

    def given(self, arguments: Mapping[str, Any]) -> list[Any]:
        """The given values; none if it is optional and absent."""
        x: Any = functools.reduce(lambda whole, field: getattr(whole, field, None), self.path, arguments.get(self.argument))
        if x is None and (self.optional or self.argument not in arguments):
            return []
        return list(x) if self.each else [x]


def tensors_in(argument: str, kind: Any, path: tuple[str, ...] = (), optional: bool = False) -> Iterator[Expected]:
    """The tensors that an argument is, contains, or is a list of; none for any other argument."""
    found = [member for member in members(kind) if member is not type(None)]
    if len(found) != 1:
        return
    optional, (one,) = optional or type(None) in members(kind), found
    each = get_origin(one) is Sequence and is_array(get_args(one)[0])
    one = get_args(one)[0] if each else one
    if is_array(one):
        yield Expected(argument, path, one, each, optional)
    elif isinstance(one, type) and issubclass(one, tuple) and hasattr(one, "_fields"):
        for name, of_field in one.__annotations__.items():
            yield from tensors_in(argument, of_field, (*path, name), optional)


def is_decided_by_type(kind: Any) -> bool:
    """Whether shapes, strings and types alone determine if a value fits, so that the result can be cached by them."""
    return all(
        (isinstance(m, type) and m is not Any)
        or get_origin(m) is Callable
        or (get_origin(m) is Literal and all(isinstance(one, str) for one in get_args(m)))
        or (get_origin(m) is Sequence and is_array(get_args(m)[0]))
        for m in members(kind)
    )


def key_of(x: Any, array: Any) -> Any:
    """Cache key of a value that is not a tensor: the shapes of the tensors in it, the string itself, or its type."""
    kind = type(x)
    if kind is float:
        return kind if x == x else UNFIT
    if isinstance(x, tuple | list):
        return (kind, *[one.shape if isinstance(one, array) else key_of(one, array) for one in x])
    return x if kind is str else kind


def belong_together(tensors: Sequence[Expected], arguments: Mapping[str, Any], multiples: Mapping[str, str]) -> bool:
    """Whether each axis has the same size in all tensors, and the axes of ``multiples`` divide each other."""
    sizes: dict[str, Any] = {}
    for tensor in tensors:
        for x in tensor.given(arguments):
            if not isinstance(x, tensor.kind.array_type) or not _fits(tensor.kind, tuple(x.shape), sizes, arguments):
                return False
    pairs = [(sizes[whole], sizes[part]) for whole, part in multiples.items() if whole in sizes and part in sizes]
    return all(part > 0 and whole % part == 0 for whole, part in pairs)


def _fits(kind: Any, shape: tuple[int, ...], sizes: dict[str, Any], arguments: Mapping[str, Any]) -> bool:
    """Whether a shape matches the annotation as parsed by jaxtyping; new axes are added to ``sizes``."""
    dims, at = kind.dims, kind.index_variadic
    if at is not None:
        stop = len(shape) - (len(dims) - at - 1)
        if stop < at or not _fits_several(dims[at], shape[at:stop], sizes):
            return False
        dims, shape = (*dims[:at], *dims[at + 1 :]), (*shape[:at], *shape[stop:])
    return len(dims) == len(shape) and all(
        _fits_one(dim, size, sizes, arguments) for dim, size in zip(dims, shape, strict=True)
    )


def _fits_one(dim: Any, size: int, sizes: dict[str, Any], arguments: Mapping[str, Any]) -> bool:
    if size == 1 and getattr(dim, "broadcastable", False):
        return True
    if hasattr(dim, "name"):
        return bool(sizes.setdefault(dim.name, size) == size)
    if hasattr(dim, "size"):
        return bool(dim.size == size)
    if not hasattr(dim, "elem"):
        return True
    try:  # calculated from other axes, or, in braces, from arguments
        return bool(eval(eval(f"f{dim.elem!r}", {}, dict(arguments)), {}, dict(sizes)) == size)
    except NameError:  # of a tensor that is absent
        return True


def _fits_several(dim: Any, shape: tuple[int, ...], sizes: dict[str, Any]) -> bool:
    if not hasattr(dim, "name"):
        return True
    if not dim.broadcastable:
        return bool(sizes.setdefault(f"*{dim.name}", shape) == shape)
    whole = sizes.get(f"*{dim.name}")
    other = sizes.get(f"#{dim.name}", ()) if whole is None else whole
    n = max(len(shape), len(other))
    pairs = list(zip((1,) * (n - len(shape)) + shape, (1,) * (n - len(other)) + other, strict=True))
    sizes[f"#{dim.name}"] = tuple(max(pair) if 0 not in pair else 0 for pair in pairs)
    return all(a == b or 1 in (a, b) for a, b in pairs) and whole in (None, sizes[f"#{dim.name}"])


def misfit(tensors: Sequence[Expected], arguments: Mapping[str, Any], multiples: Mapping[str, str]) -> str:
    """A description of what was expected and what was given."""
    expected, came = [], []
    for tensor in sorted(tensors, key=lambda t: list(arguments).index(t.argument) if t.argument in arguments else -1):
        if found := tensor.given(arguments):
            label = ".".join((tensor.argument, *tensor.path))
            expected.append(f"{'each of ' if tensor.each else ''}{label} [{axes_in_words(tensor.kind.dim_str)}]")
            shapes = [str(list(x.shape)) if isinstance(x, tensor.kind.array_type) else brief(x) for x in found]
            came.append(f"{label} {', '.join(shapes)}")
    rules = [f"{whole} a multiple of {part}" for whole, part in multiples.items()]
    return f"expected {', '.join([*expected, *rules])}; got {', '.join(came)}"


Checked = TypeVar("Checked", bound=Callable[..., Any])
KEPT = 1024
"""Number of shape combinations that are cached; decoding a text produces one per token."""
GROUPED = ("kv_head", "key_head", "head_or_kv_head")
"""Axes of heads that several query heads share."""


def checked(function: Checked) -> Checked:
    """Check every call of a function, or of a dataclass, against its signature; for use as a decorator.

    Integers of numpy and torch, such as those in a table's column, are converted to Python's; NaN is not accepted as a number.
    Paths, and arguments that may be a tensor or something else, are checked by the function itself.

    Where an axis ``head`` meets one of :data:`GROUPED`, it must be a multiple of it.

    >>> from typing import Annotated
    >>> import torch
    >>> from jaxtyping import Float
    >>> from kvlens.checks import Within
    >>> from torch import Tensor
    >>> @checked
    ... def scaled(x: Float[Tensor, "pos d"], by: Float[Tensor, " d"], times: Annotated[int, Within(1)] = 1):
    ...     return x * by * times
    >>> scaled(torch.ones(5, 3), torch.ones(1))
    Traceback (most recent call last):
    kvlens.errors.KVLensError: scaled: expected x [pos, d], by [d]; got x [5, 3], by [1]
    >>> scaled(torch.ones(5, 3), torch.ones(3), times=0)
    Traceback (most recent call last):
    kvlens.errors.KVLensError: scaled: times must be at least 1, got 0
    """
    if not isinstance(function, type):
        return _held(function)  # type: ignore[return-value]
    function.__init__ = _held(function.__init__)  # type: ignore[misc]
    return function


def doors(name: str) -> None:
    """Check the calls of a module's public functions that come from outside; kvlens' own calls are not checked again."""
    module = sys.modules[name]
    for public, function in list(vars(module).items()):
        if inspect.isfunction(function) and function.__module__ == name and not public.startswith("_"):
            setattr(module, public, _held(function, from_outside=True))


def _held(function: Callable[..., Any], from_outside: bool = False) -> Callable[..., Any]:
    signature = inspect.signature(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    single = {name: _annotation(function, p) for name, p in signature.parameters.items() if p.kind not in several}
    readers = {name: reader for name, kind in single.items() if (reader := reader_of(kind)) is not None}
    tensors = sorted((t for name, kind in single.items() for t in tensors_in(name, kind)), key=lambda t: t.order)
    axes = {dim.name for tensor in tensors for dim in tensor.kind.dims if hasattr(dim, "name")}
    shared = [part for part in GROUPED if {"head", part} <= axes]
    multiples = {"head": shared[0]} if shared else {}
    array: Any = tensors[0].kind.array_type if tensors else ()
    remembers = bool(tensors) and all(map(is_decided_by_type, single.values())) and len(single) == len(signature.parameters)
    defaults = {name: p.default for name, p in signature.parameters.items()}
    accepted: set[Any] = set()

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        if from_outside and sys._getframe(1).f_globals.get("__name__", "").startswith("kvlens."):
            return function(*args, **kwargs)
        key: tuple[Any, ...] = ()
        if remembers:
            key = tuple([x.shape if isinstance(x, array) else key_of(x, array) for x in args])
            if kwargs:
                values = [x.shape if isinstance(x, array) else key_of(x, array) for x in kwargs.values()]
                key = (key, *kwargs, *values)
        if not remembers or key not in accepted:
            try:
                given, as_given = signature.bind(*args, **kwargs), True
            except TypeError:
                return function(*args, **kwargs)  # raises Python's own error, which names the function and the argument
            for name, value in given.arguments.items():
                if name in readers and value is not defaults[name]:
                    read = readers[name](value)
                    if read is UNFIT:
                        ensure(f"{_called(function, args)}: {name}", single[name], value)  # raises
                    if read is not value:
                        given.arguments[name], as_given = read, False
            if tensors and not belong_together(tensors, given.arguments, multiples):
                raise KVLensError(f"{_called(function, args)}: {misfit(tensors, given.arguments, multiples)}")
            if not as_given:
                args, kwargs = given.args, given.kwargs
            elif remembers:
                if len(accepted) >= KEPT:
                    accepted.clear()
                accepted.add(key)
        return function(*args, **kwargs)

    return held


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """The annotation itself where it is written as a string, as all are in a module that postpones them; a name that does not
    exist yet stays a string, which is not checked."""
    written = parameter.annotation
    try:
        return eval(written, function.__globals__) if isinstance(written, str) else written
    except NameError:
        return written


def _called(function: Callable[..., Any], args: Sequence[Any]) -> str:
    """The name of a function as the user called it: a method with the class that it is called on, not the one defining it."""
    name = function.__qualname__.split("<locals>.")[-1].removesuffix(".__init__")
    if not args or next(iter(inspect.signature(function).parameters)) not in ("self", "cls"):
        return name
    owner = args[0] if isinstance(args[0], type) else type(args[0])
    return owner.__name__ if function.__name__ == "__init__" else f"{owner.__name__}.{function.__name__}"
