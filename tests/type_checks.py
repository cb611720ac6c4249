"""Cheaper type checks for a test run: jaxtyping looks at functions that name a shape, beartype alone at all others.

With ``--jaxtyping-packages`` every function of ours is wrapped by ``jaxtyping.jaxtyped``, which keeps a book of axis sizes for
each call. A function without an axis in its signature has nothing to write there; beartype alone refuses the same arguments.
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
    if not inspect.isfunction(function) or any(map(may_name_a_shape, function.__annotations__.values())):
        return ORIGINAL(function, typechecker=typechecker)
    checked, config = typechecker(function), jaxtyping.config
    if checked is function:  # nothing in its signature can be checked
        return function

    @functools.wraps(function)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as error:  # jaxtyping's is a TypeError
            raise jaxtyping.TypeCheckError(str(error)) from error

    return chosen


def may_name_a_shape(hint: Any) -> bool:
    """Whether an annotation holds an array with axes; one in quotes may."""
    if isinstance(hint, str | typing.ForwardRef):
        return True
    if isinstance(hint, list | tuple):
        return any(map(may_name_a_shape, hint))
    if isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray):
        return True
    return any(map(may_name_a_shape, typing.get_args(hint)))
