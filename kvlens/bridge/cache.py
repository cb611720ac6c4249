"""Transformers' cache of a pass, whose keyword Transformers 5.24 renamed to ``cache``.

TransformerLens, up to 4.3, calls it by the earlier names, gives Mamba-2 one that is not its own, and takes no notice of a
``cache`` where it computes attention itself: generation would ignore the prompt.
"""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

ATTENTION = "past_key_values"
"""What attention calls it in earlier releases."""
EARLIER = (ATTENTION, "cache_params")


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the keywords of a model, a layer or a part of one; None without one."""
    return next((kwargs[name] for name in ("cache", *EARLIER) if kwargs.get(name) is not None), None)


def take_earlier_names(model: nn.Module) -> None:
    """Let a Transformers model whose passes have a ``cache`` take it by the earlier names too, without a warning."""
    if "cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_by_new_name, with_kwargs=True)


def take_new_name(attn: nn.Module) -> None:
    """Let a component in which TransformerLens computes attention find the ``cache`` that its layer calls it with."""
    attn.register_forward_pre_hook(_by_earlier_name, with_kwargs=True)


def _by_new_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    cache = cache_of(kwargs)
    return None if cache is None else (args, {**_without_cache(kwargs), "cache": cache})


def _by_earlier_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    return (args, {**_without_cache(kwargs), ATTENTION: kwargs["cache"]}) if "cache" in kwargs else None


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: given for name, given in kwargs.items() if name not in ("cache", *EARLIER)}
