"""The decorator that checks every call against the function's signature, which is parsed once."""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kvlens.checks.shapes import belong_together, is_decided_by_type, key_of, misfit, tensors_in
from kvlens.checks.values import UNFIT, ensure, reader_of
from kvlens.errors import KVLensError

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
