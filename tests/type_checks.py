"""Cheaper type checks for a test run: they look at each argument once.

With ``--jaxtyping-packages`` every function of ours is wrapped by ``jaxtyping.jaxtyped``, which keeps a book of axis sizes for
each call and, for the sake of its messages, has beartype look at the arguments three times. Here beartype looks once; and where
no axis stands in a signature, no book is kept. What is refused is the same.
"""

import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype.roar import BeartypeCallHintViolation

ORIGINAL = jaxtyping.jaxtyped


def jaxtyped(function: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """In the place of ``jaxtyping.jaxtyped``, as its import hook calls it."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(function, classmethod | staticmethod):
        return type(function)(jaxtyped(function.__func__, typechecker=typechecker))
    if isinstance(function, property):
        parts = (function.fget, function.fset, function.fdel)
        return property(*(part and jaxtyped(part, typechecker=typechecker) for part in parts))
    if not inspect.isfunction(function) or inspect.isgeneratorfunction(function):
        return ORIGINAL(function, typechecker=typechecker)
    hints = function.__annotations__.values()
    if any(holds(is_quoted, hint) for hint in hints):  # which jaxtyping reads, or leaves
        return ORIGINAL(function, typechecker=typechecker)
    checked, config = typechecker(function), jaxtyping.config
    if checked is function:  # nothing in its signature can be checked
        return function
    if any(holds(is_array, hint) for hint in hints):
        checked = ORIGINAL(checked, typechecker=None)

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as error:  # jaxtyping's is a TypeError
            raise jaxtyping.TypeCheckError(str(error)) from error

    return chosen


def holds(found: Callable[[Any], bool], hint: Any) -> bool:
    """Whether an annotation, or a part of it, is one of those that are looked for."""
    parts = hint if isinstance(hint, list | tuple) else typing.get_args(hint)
    return found(hint) or any(holds(found, part) for part in parts)


def is_array(hint: Any) -> bool:
    """Whether it is an array with axes."""
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def is_quoted(hint: Any) -> bool:
    """Whether it is in quotes, and may be anything."""
    return isinstance(hint, str | typing.ForwardRef)
