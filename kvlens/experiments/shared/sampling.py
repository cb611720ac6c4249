"""Sampling text from a model."""

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.model import HookedKVTransformer


@torch.no_grad()
def sampled(
    model: HookedKVTransformer, tokens: Int[Tensor, "text pos"], n: int, generator: torch.Generator
) -> Int[Tensor, "text longer"]:
    """``tokens`` followed by ``n`` more, sampled at temperature 1."""
    cache, new = model.empty_cache(len(tokens)), tokens
    for _ in range(n):
        p = model(new, attention_mask=torch.ones_like(new), past_kv_cache=cache)[:, -1].softmax(dim=-1)
        new = torch.multinomial(p, 1, generator=generator)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens
