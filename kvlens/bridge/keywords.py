"""The keywords of a pass of Transformers: its cache, its mask and its positions.

Transformers 5.24 renamed the cache to ``cache``. TransformerLens, up to 4.3, calls it by the earlier names, gives Mamba-2 one
that is not its own, and takes no notice of a ``cache`` where it computes attention itself: generation would ignore the prompt.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import Cache

ATTENTION = "past_key_values"
"""What attention calls it in earlier releases."""
EARLIER = (ATTENTION, "layer_past", "cache_params")


def cache_among(kwargs: Mapping[str, object]) -> Cache | None:
    """The cache among the keywords of a model, a layer or a part of one; None without one."""
    return next((kwargs[name] for name in ("cache", *EARLIER) if kwargs.get(name) is not None), None)


def take_earlier_names(model: nn.Module) -> None:
    """Let a Transformers model whose passes have a ``cache`` take it by the earlier names too, without a warning."""
    if "cache" in inspect.signature(model.forward).parameters:
        model.register_forward_pre_hook(_by_new_name, with_kwargs=True)


def with_cache(kwargs: Mapping[str, object], cache: object, name: str = ATTENTION) -> dict[str, object]:
    """The keywords of a part, with another cache, by the name that TransformerLens looks for."""
    others = {key: given for key, given in kwargs.items() if key not in ("cache", *EARLIER)}
    return others if cache is None else {**others, name: cache}


def _by_new_name(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
    return args, with_cache(kwargs, cache_among(kwargs), "cache")


def text_positions(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Int[Tensor, "#batch pos"]:
    """Positions from 0 of the tokens that a Transformers model is called with: those given, or counted as the model would."""
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    n = tokens.shape[1]
    given = kwargs.get("position_ids")
    if given is not None:
        return given if given.dim() == 2 else given[0]  # with an axis for images, which text has the same number in
    mask = kwargs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        return positions_under(mask)[:, -n:]
    past = _length(cache_among(kwargs))
    return torch.arange(past, past + n, device=tokens.device)[None]


def _length(cache: Cache | None) -> int:
    """Tokens that a cache holds; 0 where it has recurrent states alone, which do not count them."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0


def positions_under(mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Positions from 0 of the real tokens of each row; padding in front has 0."""
    return (mask.long().cumsum(dim=1) - 1).clamp(min=0)


def hidden(mask: Bool[Tensor, "batch pos"], keeps_positions: bool) -> dict[str, Tensor]:
    """The arguments of a pass that reads the tokens of ``mask`` alone."""
    counted = torch.ones_like(mask) if keeps_positions else mask
    return {"attention_mask": mask.long(), "position_ids": positions_under(counted)}
