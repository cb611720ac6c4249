"""The conversion methods by name, and the shorthand ``method="name", option=...``."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from kvlens.checks import checked, ensure, one_of
from kvlens.conversion.softmax.attention_matching import AttentionMatching
from kvlens.conversion.softmax.expected_attention import ExpectedAttention
from kvlens.conversion.softmax.free_features import Learned, RandomProjections, Taylor
from kvlens.conversion.softmax.h2o import H2O
from kvlens.conversion.softmax.kvzip import KVzip
from kvlens.conversion.softmax.landmark import Landmark
from kvlens.conversion.softmax.method import ConversionMethod, Exact
from kvlens.conversion.softmax.snapkv import SnapKV
from kvlens.conversion.softmax.streaming_llm import StreamingLLM
from kvlens.errors import KVLensError, WrongArguments, nearest

METHODS: dict[str, type[ConversionMethod]] = {
    method.name: method
    for method in (
        Exact,
        Landmark,
        AttentionMatching,
        StreamingLLM,
        H2O,
        SnapKV,
        ExpectedAttention,
        KVzip,
        RandomProjections,
        Taylor,
        Learned,
    )
}
"""What ``method="name"`` finds; a method of your own that is added here is found too."""


@checked
def method_of(method: str | ConversionMethod, options: Mapping[str, Any], others: Collection[str] = ()) -> ConversionMethod:
    """The method that an object, or a name with options, stands for.

    Args:
        method: an object, whose options are its own, or a name in :data:`METHODS`.
        options: of the method that is named.
        others: arguments that the caller takes besides, for the nearest name.

    Raises:
        KVLensError: a method that does not exist, an option that it does not have (the nearest is named) or that is wrong.
    """
    if isinstance(method, ConversionMethod):
        for name in options:
            if not is_option(name) and name not in _names(type(method)):
                raise unknown_option(name, others, None)
            raise KVLensError(f"convert_prompt: {name} is an option of the method: give it to {type(method).__name__}(...)")
        return method
    ensure("convert_prompt: method", one_of(METHODS), method)
    kind = METHODS[method]
    unknown = next((name for name in options if name not in _names(kind)), None)
    if unknown is not None:
        raise unknown_option(unknown, others, method)
    given = {kind.shorthand.get(name, name): value for name, value in options.items()}
    if len(given) < len(options):
        twice = next(name for name in options if kind.shorthand.get(name) in options)
        raise KVLensError(f"convert_prompt: {twice} and {kind.shorthand[twice]} are one option: give one of them")
    return kind(**given)


def unknown_option(name: str, others: Collection[str], method: str | None) -> WrongArguments:
    """The error that says that ``method`` has no such option (None: no method has it), what does, and what there is."""
    have_it = [f'"{other}"' for other, kind in METHODS.items() if name in _names(kind)]
    if have_it and method is not None:
        words = f'method="{method}" has no option {name!r}, which belongs to {_listed(have_it)}'
        return WrongArguments(f"convert_prompt: {words}; it takes {', '.join(_names(METHODS[method])) or 'no options'}")
    of_methods = METHODS if method is None or not _names(METHODS[method]) else [method]
    close = nearest(name, [*others, *_all_names(of_methods)]) or nearest(name, _all_names(METHODS)) or "."
    takes = "; ".join([*([", ".join(others)] if others else []), *(_takes(each) for each in of_methods)])
    return WrongArguments(f"convert_prompt: no argument is called {name!r}{close} It takes {takes}")


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def is_option(name: str) -> bool:
    """Whether any method has an option of this name."""
    return name in _all_names(METHODS)


def _takes(method: str) -> str:
    return f'with method="{method}": {", ".join(_names(METHODS[method])) or "no options"}'


def _all_names(methods: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(name for method in methods for name in _names(METHODS[method])))


def _names(kind: type[ConversionMethod]) -> list[str]:
    """Options of a method, with their other names."""
    return [*(field.name for field in fields(kind)), *kind.shorthand]  # type: ignore[arg-type]
