"""Cheaper type checks for a test run: they look at each argument once, and read a signature once.

With ``--jaxtyping-packages`` every function of ours is wrapped by ``jaxtyping.jaxtyped``, which keeps a book of axis sizes for
each call and, for the sake of its messages, binds the arguments and has beartype look at them three times. Here beartype looks
once; where no axis stands in a signature, no book is kept; and a function within a function, which is made anew at each call,
gets the checks of the first one. What is refused is the same, by a generator when it begins.
"""

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jaxtyping
from beartype.roar import BeartypeCallHintViolation
from jaxtyping._storage import pop_shape_memo, push_shape_memo

ORIGINAL = jaxtyping.jaxtyped
NO_ARGUMENTS: dict[str, Any] = {}
"""Those that sizes in an annotation may be computed from; such annotations are left to jaxtyping."""


def jaxtyped(function: Any = None, *, typechecker: Callable[[Any], Any]) -> Any:
    """In the place of ``jaxtyping.jaxtyped``, as its import hook calls it."""
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if isinstance(function, classmethod | staticmethod):
        return type(function)(jaxtyped(function.__func__, typechecker=typechecker))
    if isinstance(function, property):
        parts = (function.fget, function.fset, function.fdel)
        return property(*(part and jaxtyped(part, typechecker=typechecker) for part in parts))
    if dataclasses.is_dataclass(function) and "__init__" in vars(function):
        function.__init__ = jaxtyped(function.__init__, typechecker=typechecker)
        return function
    if not inspect.isfunction(function):
        return ORIGINAL(function, typechecker=typechecker)
    checks = checks_of(function, typechecker)
    is_generator = inspect.isgeneratorfunction(function)
    if checks is None or (is_generator and checks.has_axes):
        return ORIGINAL(function, typechecker=typechecker)
    checked, config = checks.around(function), jaxtyping.config
    if checked is function:
        return function

    def alone(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as error:  # jaxtyping's is a TypeError
            raise jaxtyping.TypeCheckError(str(error)) from error

    def with_a_book(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return function(*args, **kwargs)
        push_shape_memo(NO_ARGUMENTS)
        try:
            return checked(*args, **kwargs)
        except BeartypeCallHintViolation as error:
            raise jaxtyping.TypeCheckError(str(error)) from error
        finally:
            pop_shape_memo()

    def begun(*args: Any, **kwargs: Any) -> Any:
        if config.jaxtyping_disable:
            return (yield from function(*args, **kwargs))
        try:
            return (yield from checked(*args, **kwargs))
        except BeartypeCallHintViolation as error:
            raise jaxtyping.TypeCheckError(str(error)) from error

    return functools.wraps(function)(begun if is_generator else with_a_book if checks.has_axes else alone)


class Checks(NamedTuple):
    """What a type checker made of a function's signature.

    Attributes:
        annotations: that were read.
        has_axes: whether an array with axes is among them.
        wrapper: of a function with this signature; None where nothing in it can be checked.
        name: under which the wrapper holds what it wraps; None where it is made for one function alone.
    """

    annotations: dict[str, Any]
    has_axes: bool
    wrapper: Any
    name: str | None

    def around(self, function: Any) -> Any:
        """The wrapper of this function."""
        if self.wrapper is None or self.name is None:
            return self.wrapper or function
        wrapper = types.FunctionType(self.wrapper.__code__, self.wrapper.__globals__, function.__name__)
        wrapper.__kwdefaults__ = {**self.wrapper.__kwdefaults__, self.name: function}
        return wrapper


MADE: dict[tuple[types.CodeType, Any], Checks] = {}
"""By the code of functions within functions."""


def checks_of(function: Any, typechecker: Callable[[Any], Any]) -> Checks | None:
    """The checks of its signature; None where they are left to jaxtyping."""
    made = MADE.get((function.__code__, typechecker))
    if made is not None and made.annotations == function.__annotations__:
        return made
    annotations = dict(function.__annotations__)
    own_class = function.__qualname__.rpartition(".")[0].rpartition(".")[2]
    if any(holds(is_left, hint, own_class) for hint in annotations.values()):
        return None
    has_axes = any(holds(is_array, hint) for hint in annotations.values())
    if typing.Self in annotations.values():  # which beartype reads in whole classes alone
        function = copied(function, function.__closure__ or ())
        function.__annotations__ = {name: Any if hint is typing.Self else hint for name, hint in annotations.items()}
    if "<locals>" in function.__qualname__:
        model = without_its_cells(function)
        wrapper = typechecker(model)
        names = [name for name, value in (wrapper.__kwdefaults__ or {}).items() if value is model]
        if wrapper is model or (len(names) == 1 and not wrapper.__defaults__ and not wrapper.__closure__):
            checks = Checks(annotations, has_axes, None if wrapper is model else wrapper, *(names or [None]))
            MADE[function.__code__, typechecker] = checks
            return checks
    wrapper = typechecker(function)
    return Checks(annotations, has_axes, None if wrapper is function else wrapper, None)


def without_its_cells(function: Any) -> Any:
    """A function of the same signature that keeps nothing alive."""
    return copied(function, tuple(types.CellType() for _ in function.__code__.co_freevars))


def copied(function: Any, cells: tuple[types.CellType, ...]) -> Any:
    """A function of the same signature with cells of its own."""
    bare = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    bare.__kwdefaults__, bare.__qualname__ = function.__kwdefaults__, function.__qualname__
    bare.__annotations__, bare.__module__ = function.__annotations__, function.__module__
    return bare


def holds(found: Callable[..., bool], hint: Any, *beside: Any) -> bool:
    """Whether an annotation, or a part of it, is one of those that are looked for, with what ``found`` is told beside it."""
    if typing.get_origin(hint) is Literal:  # whose parts are values
        return False
    parts = hint if isinstance(hint, list | tuple) else typing.get_args(hint)
    return found(hint, *beside) or any(holds(found, part, *beside) for part in parts)


def is_array(hint: Any) -> bool:
    """Whether it is an array with axes."""
    return isinstance(hint, type) and issubclass(hint, jaxtyping.AbstractArray)


def is_left(hint: Any, own_class: str = "") -> bool:
    """Whether it is in quotes, and may be anything but ``own_class``, or an array of computed sizes."""
    words = hint.__forward_arg__ if isinstance(hint, typing.ForwardRef) else hint
    return (isinstance(words, str) and words != own_class) or (is_array(hint) and "{" in hint.dim_str)
