"""Argument checking: numbers in range, names that exist, tensors whose axes match, as a signature declares them.

A call that does not match raises an error before the function runs, with the argument, what was expected and what was given::

    @checked
    def attend(
        q: Float[Tensor, "batch pos head d"],
        k: Float[Tensor, "batch key kv_head d"],
        kind: Literal["causal", "full"] = "causal",
        n_landmarks: Annotated[int, Within(1, 4096)] | None = None,
    ): ...

What would give a wrong number in silence is checked: a number out of range, a string for a list of strings, a shape that would
be broadcast. An object of another class raises Python's own error where it is used.

A module checks at its door: ``doors(__name__)`` at its end checks every call of its public functions that comes from outside
kvlens. kvlens' own calls are not checked: an op takes a few microseconds.

Values come first below, then shapes, which jaxtyping compares, then the decorator.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from kvlens.errors import KVLensError, brief, check_known, nearest

Reader = Callable[[object], Any]
UNFIT = object()
"""Returned by a reader for a value that does not fit."""
INT_MAX = 2**63 - 1
"""The largest integer that torch accepts."""
CALLED: dict[Any, str] = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", type(None): "None"}


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


def ensure(what: str, kind: object, value: object) -> Any:
    """``value`` checked against the annotation ``kind``, with integers of numpy and torch converted to Python's.

    Raises:
        KVLensError: the value has the wrong type, or is out of range; ``what`` is the subject of the message.
    """
    reader = reader_of(kind)
    read = value if reader is None else reader(value)
    if read is UNFIT:
        raise _unfit(what, kind, value)
    return read


def _unfit(what: str, kind: object, value: object) -> KVLensError:
    return KVLensError(f"{what} must be {_wanted(kind, value)}, got {brief(value)}{_nearest(kind, value)}")


def one_of(names: Iterable[str]) -> Any:
    """The annotation for one of ``names``, for names that are not known statically."""
    return Literal[tuple(names)]  # type: ignore[valid-type]


def members(kind: object) -> tuple[object, ...]:
    """The alternatives of an annotation, of which one must fit."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def is_array(kind: object) -> bool:
    """Whether this is a jaxtyping annotation, whose ``array_type`` is the required type of a value."""
    return isinstance(getattr(kind, "array_type", None), type)


@functools.lru_cache(maxsize=4096)
def reader_of(kind: object) -> Reader | None:
    """A function that converts a value for the annotation, or returns `UNFIT`; None for an annotation of other objects."""
    several = members(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if len(several) > 1:
        readers = [reader_of(member) for member in several]
        return None if None in readers else lambda value: _first_fit(readers, value)
    if origin is Annotated:
        limits = [limit for limit in inner[1:] if isinstance(limit, Within)]
        return functools.partial(_read_within, _reader_of_one(inner[0]), limits)
    if origin is Literal:
        return lambda value: value if any(type(value) in (type(one), float) and value == one for one in inner) else UNFIT
    if kind in (bool, int, float):
        return functools.partial(_read_number, kind)
    if origin is Mapping:
        return functools.partial(_read_mapping, [_reader_of_one(one) for one in inner])
    if origin in (Sequence, Collection, Iterable, tuple):
        return functools.partial(_read_several, kind, [_reader_of_one(one) for one in inner if one is not ...])
    return (lambda value: value if isinstance(value, kind) else UNFIT) if kind in (str, type(None)) else None


def _reader_of_one(kind: object) -> Reader:
    """The reader of a nested annotation, which accepts anything if :func:`reader_of` is None."""
    return reader_of(kind) or (lambda value: value)


def _first_fit(readers: Sequence[Reader | None], value: object) -> Any:
    return next((read for reader in readers if reader and (read := reader(value)) is not UNFIT), UNFIT)


def _read_within(base: Reader, limits: Sequence[Within], value: object) -> Any:
    read = base(value)
    return read if read is not UNFIT and all(limit.holds(read) for limit in limits) else UNFIT


def _read_number(kind: type, value: object) -> Any:
    number = value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value
    if isinstance(number, bool) or kind is bool:
        return number if isinstance(number, kind) and type(number) is kind else UNFIT
    return number if isinstance(number, int if kind is int else int | float) and number == number else UNFIT


def _read_mapping(of: Sequence[Reader], value: object) -> Any:
    fits = isinstance(value, Mapping) and all(of[0](k) is not UNFIT and of[1](v) is not UNFIT for k, v in value.items())
    return value if fits else UNFIT


def _read_several(kind: object, of: Sequence[Reader], value: object) -> Any:
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


def _wanted(kind: object, value: object) -> str:
    """What was expected; for a number that is out of range, only the range."""
    found = [member for member in members(kind) if member is not type(None)]
    base, *limits = get_args(found[0]) if len(found) == 1 and get_origin(found[0]) is Annotated else (None,)
    if limits and (read := _reader_of_one(base)(value)) is not UNFIT:
        return next(limit.describe(x=read) for limit in limits if isinstance(limit, Within) and not limit.holds(read))
    return _words(kind)


def _words(kind: object) -> str:
    """An annotation in words."""
    words = [_words_of_one(member) for member in members(kind) if member is not int or float not in members(kind)]
    with_comma = ", or " if any(" " in word and not word.startswith(("a ", "True")) for word in words) else " or "
    return with_comma.join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _words_of_one(kind: object) -> str:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return next((one.describe(_words(inner[0])) for one in inner if isinstance(one, Within)), _words(inner[0]))
    if origin is Literal:
        return f"{'one of ' if len(inner) > 1 else ''}{', '.join(map(str, inner))}"
    if origin is tuple:
        return "a pair" if len(inner) == 2 and ... not in inner else "a tuple"
    if origin in (Sequence, Collection, Iterable):
        return f"a list, each {_words(inner[0])}"
    return "a dict" if origin is Mapping else CALLED.get(kind, getattr(kind, "__name__", str(kind)))


def _nearest(kind: object, value: object) -> str:
    """A suggestion of the nearest name that the annotation lists."""
    names = [name for member in members(kind) if get_origin(member) is Literal for name in get_args(member)]
    return nearest(value, [name for name in names if isinstance(name, str)]) if isinstance(value, str) else ""


def axes_in_words(words: str) -> str:
    """The axes of a shape in words."""
    names = {"*": "...", "#": "{0} or 1", "_": "any"}
    return ", ".join(names.get(word[0], "{1}").format(word[1:], word) for word in words.split())


def holds_tensors(kind: object) -> bool:
    """Whether this annotates a tensor, a list of them, or a tuple that has them as fields; or one of these or None."""
    one, *more = [member for member in members(kind) if member is not type(None)] or [None]
    listed = get_origin(one) is Sequence and is_array(get_args(one)[0])
    return not more and (
        is_array(one) or listed or (isinstance(one, type) and issubclass(one, tuple) and hasattr(one, "_fields"))
    )


def tensors_in(label: str, kind: object, value: Any) -> Iterator[tuple[str, Any, Any]]:
    """(label, annotation, value) of every tensor in an argument whose annotation :func:`holds_tensors`."""
    (one,) = (member for member in members(kind) if member is not type(None))
    if value is None and one is not kind:
        return
    if is_array(one):
        yield label, one, value
    elif get_origin(one) is Sequence:
        yield from ((f"each of {label}", get_args(one)[0], x) for x in value)
    else:
        for name, of_field in one.__annotations__.items():
            if holds_tensors(of_field):
                yield from tensors_in(f"{label}.{name}", of_field, getattr(value, name, None))


def belong_together(tensors: Sequence[tuple[str, Any, Any]]) -> bool:
    """Whether each axis has the same size in all tensors; axes that may be broadcast follow those that may not."""
    from jaxtyping import jaxtyped  # kept out of the command line's start

    in_order = sorted(tensors, key=lambda tensor: "#" in tensor[1].dim_str)
    with jaxtyped("context"):
        return all(isinstance(x, _of_any_dtype(kind)) for _, kind, x in in_order)


@functools.cache
def _of_any_dtype(kind: Any) -> Any:
    from jaxtyping import Shaped

    return Shaped[kind.array_type, kind.dim_str]


def misfit(tensors: Sequence[tuple[str, Any, Any]]) -> str:
    """A description of what was expected and what was given."""
    expected = dict.fromkeys(f"{label} [{axes_in_words(kind.dim_str)}]" for label, kind, _ in tensors)
    came = [f"{label} {list(x.shape) if isinstance(x, kind.array_type) else brief(x)}" for label, kind, x in tensors]
    return f"expected {', '.join(expected)}; got {', '.join(came)}"


T = TypeVar("T")
Checked = TypeVar("Checked", bound=Callable[..., Any])


def checked(function: Checked) -> Checked:
    """Check every call of a function, or of a dataclass, against its signature; for use as a decorator.

    Integers of numpy and torch, such as those in a table's column, are converted to Python's; NaN is not accepted as a number.
    Paths, and arguments that may be a tensor or something else, are checked by the function itself.

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


def from_fields(kind: type[T], values: Mapping[str, Any]) -> T:
    """Build a settings class from its fields by name; an unknown name raises an error that suggests the nearest one."""
    check_known(f"{kind.__name__}: no field", values, [field.name for field in fields(kind)])  # type: ignore[arg-type]
    return kind(**values)


def doors(name: str) -> None:
    """Check the calls of a module's public functions that come from outside; kvlens' own calls are not checked again."""
    module = sys.modules[name]
    for public, function in list(vars(module).items()):
        if inspect.isfunction(function) and function.__module__ == name and not public.startswith("_"):
            setattr(module, public, _held(function, from_outside=True))


def _held(function: Callable[..., Any], from_outside: bool = False) -> Callable[..., Any]:
    signature = inspect.signature(function)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    kinds = {name: _annotation(function, p) for name, p in signature.parameters.items() if p.kind not in several}
    readers = {name: reader for name, kind in kinds.items() if (reader := reader_of(kind)) is not None}
    defaults = {name: p.default for name, p in signature.parameters.items()}
    with_tensors = {name: kind for name, kind in kinds.items() if holds_tensors(kind)}

    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        if from_outside and sys._getframe(1).f_globals.get("__name__", "").startswith("kvlens."):
            return function(*args, **kwargs)
        try:
            given = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # raises Python's own error, which names the function and the argument
        for name, value in given.arguments.items():
            if name in readers and value is not defaults[name]:
                given.arguments[name] = read = readers[name](value)
                if read is UNFIT:
                    raise _unfit(f"{_called(function, args)}: {name}", kinds[name], value)
        here = ((name, kind, given.arguments[name]) for name, kind in with_tensors.items() if name in given.arguments)
        tensors = [tensor for of in here for tensor in tensors_in(*of)]
        if tensors and not belong_together(tensors):
            raise KVLensError(f"{_called(function, args)}: {misfit(tensors)}")
        return function(*given.args, **given.kwargs)

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
