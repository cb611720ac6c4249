"""Loading the model that an experiment runs on, sampling text from it, reading text after a prompt, and errors of logits."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import load
from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer

TEXTS_AT_ONCE = 16


def hooked_model(source: str, *, tokenizer: str | None = None, device: Any = None) -> HookedKVTransformer:
    """The model of ``source``, as :func:`kvlens.load` finds it, in evaluation mode and without gradients.

    Raises:
        KVLensError: there is none, or HookedKVTransformer cannot build it.
    """
    model = load(source, tokenizer=tokenizer, device=device)
    if not isinstance(model, HookedKVTransformer):
        raise KVLensError(f"this experiment needs a model that HookedKVTransformer can build; {source} is for the bridge alone")
    return model.eval().requires_grad_(False)


@torch.no_grad()
def sampled(
    model: HookedKVTransformer, tokens: Int[Tensor, "text pos"], n: int, generator: torch.Generator
) -> Int[Tensor, "text longer"]:
    """``tokens`` followed by ``n`` more, sampled at temperature 1."""
    cache, new = model.empty_cache(len(tokens)), tokens
    for _ in range(n):
        p = model(new, attention_mask=torch.ones_like(new), past_kv_cache=cache)[:, -1].softmax(dim=-1)
        new = torch.multinomial(p.cpu(), 1, generator=generator).to(tokens.device)  # the same draws on every device
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


@torch.no_grad()
def prompted_logits(
    model: HookedKVTransformer, prompt: Int[Tensor, " prompt_pos"], texts: Int[Tensor, "text pos"]
) -> Float[Tensor, "text pos vocab"]:
    """The logits at every position of the texts, after the prompt."""
    whole = torch.cat([prompt.expand(len(texts), -1), texts], dim=1)
    parts = [model(part, attention_mask=torch.ones_like(part))[:, len(prompt) :] for part in whole.split(TEXTS_AT_ONCE)]
    return torch.cat(parts)


def relative_errors(new: Float[Tensor, "*token vocab"], old: Float[Tensor, "*token vocab"]) -> Float[Tensor, "*token"]:
    """|new - old| / |old| at every token."""
    return (new - old).norm(dim=-1) / old.norm(dim=-1)


def divergences(new: Float[Tensor, "*token vocab"], old: Float[Tensor, "*token vocab"]) -> Float[Tensor, "*token"]:
    """KL(old || new) of the next token, nats, at every token."""
    log_old, log_new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
    return (log_old.exp() * (log_old - log_new)).sum(dim=-1)
