"""The positions of the tokens of a pass within their text."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.bridge.cache import cache_of


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
    past = _length(cache_of(kwargs))
    return torch.arange(past, past + n, device=tokens.device)[None]


def _length(cache: Any) -> int:
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
