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
EARLIER = (ATTENTION, "layer_past", "cache_params")


def cache_of(kwargs: Mapping[str, Any]) -> Any:
    """The cache among the keywords of a model, a layer or a part of one; None without one."""
    return next((kwargs[name] for name in ("cache", *EARLIER) if kwargs.get(name) is not None), None)


def take_earlier_names(model: nn.Module) -> None:
    """Let a Transformers model whose passes have a ``cache`` take it by the earlier names too, without a warning."""
    if "cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_by_new_name, with_kwargs=True)


def with_cache(kwargs: Mapping[str, Any], cache: Any, name: str = ATTENTION) -> dict[str, Any]:
    """The keywords of a part, with another cache, by the name that TransformerLens looks for."""
    others = {key: given for key, given in kwargs.items() if key not in ("cache", *EARLIER)}
    return others if cache is None else {**others, name: cache}


def _by_new_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, with_cache(kwargs, cache_of(kwargs), "cache")
