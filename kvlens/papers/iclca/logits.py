"""Prompts and texts that a model writes, its logits after a prompt, and errors of logits."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.run import Settings, hooked_model

TEXTS_AT_ONCE = 16


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


def writing_model(settings: Settings) -> HookedKVTransformer:
    """Load a softmax model that can write its own prompts."""
    model = hooked_model(settings["model"], tokenizer=settings["tokenizer"])
    if model.cfg.attention != "softmax" or model.tokenizer is None or model.tokenizer.bos_token_id is None:
        raise KVLensError(
            "the model must have softmax attention, and a tokenizer with a BOS, from which it writes its "
            f"own prompts; {settings['model']} has {model.cfg.attention} attention"
        )
    return model


def context_of(model: HookedKVTransformer, settings: Settings, seed: int) -> tuple[Tensor, Tensor]:
    """A prompt [pos] that the model wrote from its BOS, and continuations [text, pos] of it."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    bos = torch.tensor([[model.tokenizer.bos_token_id]], device=model.W_E.device)
    prompt = sampled(model, bos, settings["n_prompt"] - 1, generator)
    texts = sampled(model, prompt.expand(settings["n_texts"], -1), settings["n_text"], generator)
    return prompt[0], texts[:, prompt.shape[1] :]
