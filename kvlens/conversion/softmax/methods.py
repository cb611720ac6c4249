"""The conversion methods by name, and the shorthand ``method="name", option=...``."""

import importlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from kvlens.checks import ensure, one_of
from kvlens.conversion.softmax.method import ConversionMethod, check_class
from kvlens.conversion_methods import CONVERSION_METHODS
from kvlens.errors import KVLensError, WrongArguments, nearest


def _class(name: str, home: str) -> type[ConversionMethod]:
    module, _, attribute = home.partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    check_class(kind)
    if kind.name != name:
        raise KVLensError(f"conversion method {name!r}: {attribute}.name is {kind.name!r}; give both the same name")
    return kind


METHODS: dict[str, type[ConversionMethod]] = {name: _class(name, home) for name, home in CONVERSION_METHODS.items()}
"""The methods by name: the classes listed in :data:`kvlens.conversion_methods.CONVERSION_METHODS`."""


def method_of(method: str | ConversionMethod, options: Mapping[str, Any], others: Collection[str] = ()) -> ConversionMethod:
    """The method given as an object, or by name and options.

    Args:
        method: an object, whose options are its own, or a name in :data:`METHODS`.
        options: options for a method given by name.
        others: the caller's other arguments, for suggesting the nearest name.

    Raises:
        KVLensError: an unknown method, an unknown option (the nearest is suggested), or an invalid value.
    """
    if isinstance(method, ConversionMethod):
        check_class(type(method))
        for name in options:
            if not is_option(name) and name not in option_names(type(method)):
                raise unknown_option(name, others, None)
            raise KVLensError(f"convert_prompt: {name} is an option of the method: give it to {type(method).__name__}(...)")
        return method
    ensure("convert_prompt: method", one_of(METHODS), method)
    kind = METHODS[method]
    unknown = next((name for name in options if name not in option_names(kind)), None)
    if unknown is not None:
        raise unknown_option(unknown, others, method)
    given = {kind.shorthand.get(name, name): value for name, value in options.items()}
    if len(given) < len(options):
        twice = next(name for name in options if kind.shorthand.get(name) in options)
        raise KVLensError(f"convert_prompt: {twice} and {kind.shorthand[twice]} are the same option: give one of them")
    return kind(**given)


def unknown_option(name: str, others: Collection[str], method: str | None) -> WrongArguments:
    """The error for an option that ``method`` lacks (or every method, if None): which methods have it, and what is accepted."""
    have_it = [f'"{other}"' for other, kind in METHODS.items() if name in option_names(kind)]
    if have_it and method is not None:
        words = f'method="{method}" has no option {name!r}, which belongs to {_listed(have_it)}'
        return WrongArguments(f"convert_prompt: {words}; it takes {', '.join(option_names(METHODS[method])) or 'no options'}")
    of_methods = METHODS if method is None or not option_names(METHODS[method]) else [method]
    close = nearest(name, [*others, *_all_names(of_methods)]) or nearest(name, _all_names(METHODS)) or "."
    takes = "; ".join([*([", ".join(others)] if others else []), *(_takes(each) for each in of_methods)])
    return WrongArguments(f"convert_prompt: no argument is called {name!r}{close} It takes {takes}")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def is_option(name: str) -> bool:
    """Whether any method has an option of this name."""
    return name in _all_names(METHODS)


def _takes(method: str) -> str:
    return f'with method="{method}": {", ".join(option_names(METHODS[method])) or "no options"}'


def _all_names(methods: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for method in methods for name in option_names(METHODS[method])))


def option_names(kind: type[ConversionMethod]) -> list[str]:
    """The options of a method, with their shorthand."""
    return [*(field.name for field in fields(kind)), *kind.shorthand]  # type: ignore[arg-type]
