"""The conversion methods by name, and the shorthand ``method="name", option=...``."""

import importlib
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from kvlens.checks import ensure, one_of
from kvlens.conversion.softmax.method import ConversionMethod
from kvlens.conversion_methods import CONVERSION_METHODS
from kvlens.errors import KVLensError, nearest

METHODS: dict[str, type[ConversionMethod]] = {
    name: getattr(importlib.import_module(home.partition(":")[0]), home.partition(":")[2])
    for name, home in CONVERSION_METHODS.items()
}
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
        if options:
            near = nearest(next(iter(options)), others)
            raise KVLensError(f"convert_prompt: {', '.join(options)}: options of a method belong into {method}{near}")
        return method
    ensure("convert_prompt: method", one_of(METHODS), method)
    kind = METHODS[method]
    known = option_names(kind)
    for name in options:
        if name not in known:
            near = nearest(name, [*others, *known])
            raise KVLensError(
                f'convert_prompt: method="{method}" has no option {name!r}{near}; it has {", ".join(known) or "none"}'
            )
    given = {kind.shorthand.get(name, name): value for name, value in options.items()}
    if len(given) < len(options):
        twice = next(name for name in options if kind.shorthand.get(name) in options)
        raise KVLensError(f"convert_prompt: {twice} and {kind.shorthand[twice]} are the same option: give one of them")
    return kind(**given)


def option_names(kind: type[ConversionMethod]) -> list[str]:
    """The options of a method, with their shorthand."""
    return [*(field.name for field in fields(kind)), *kind.shorthand]  # type: ignore[arg-type]
