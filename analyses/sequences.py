"""What the analyses of one prompt and one text share: checking tokens, naming them, and the logits on the text.

Comparisons are made on concatenated tokens, never on concatenated text: the tokens of "ab" are not those of "a" and "b".
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError, convert_prompt

PromptTokens = Int[Tensor, " prompt_pos"]
TextTokens = Int[Tensor, " text_pos"]
BaselineTokens = Int[Tensor, " baseline_pos"]


def one_sequence(model: HookedKVTransformer, what: str, tokens: Tensor, *, may_be_empty: bool = False) -> Tensor:
    """Return ``tokens`` [pos] on the model's device, or raise KVLensError that names ``what``."""
    if not isinstance(tokens, Tensor) or tokens.dim() != 1:
        came = f"shape {list(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise KVLensError(f"{what}: expected a tensor of token ids [pos], got {came}; one prompt and one text at a time")
    if tokens.numel() == 0 and not may_be_empty:
        raise KVLensError(f"{what}: it is empty; give at least one token")
    try:
        if tokens.numel():
            model.check_tokens(tokens)
    except KVLensError as error:
        raise KVLensError(f"{what}: {error}") from error
    return tokens.to(model.W_E.device)


def token_texts(model: HookedKVTransformer, tokens: Tensor) -> list[str]:
    """Each token as text; its number as text where the model has no tokenizer."""
    if model.tokenizer is None:
        return [str(token) for token in tokens.tolist()]
    return [model.tokenizer.decode([token]) for token in tokens.tolist()]


def text_logits(model: HookedKVTransformer, before: Tensor | None, text: Tensor) -> Float[Tensor, "pos d_vocab"]:
    """Logits at the places of ``text`` when ``before`` stands in front of it; no other place is unembedded."""
    tokens = (text if before is None else torch.cat([before, text]))[None]

    def keep_text(resid: Tensor, hook: Any) -> Tensor:
        return resid[:, -len(text) :]

    last = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
    mask = torch.ones_like(tokens)  # a pad token that was typed is a token, not padding
    return model.run_with_hooks(tokens, attention_mask=mask, fwd_hooks=[(last, keep_text)])[0]


def converted_logits(model: HookedKVTransformer, bias: KVBias, text: Tensor) -> Float[Tensor, "pos d_vocab"]:
    """Logits on ``text`` alone with ``bias`` attached."""
    with model.kv_bias(bias):
        return text_logits(model, None, text)


def bias_of(model: HookedKVTransformer, prompt: Tensor, bias: KVBias | None) -> KVBias:
    """``bias`` if the caller has converted the prompt already, else its conversion."""
    bias = convert_prompt(model, prompt) if bias is None else bias
    if bias.batch_size is not None:
        raise KVLensError(
            f"bias: expected that of one prompt, got a batch of {bias.batch_size}; bias.select_prompt(i) picks one"
        )
    return bias


def prompt_text_bias(
    model: HookedKVTransformer, prompt_tokens: Tensor, text_tokens: Tensor, bias: KVBias | None
) -> tuple[Tensor, Tensor, KVBias]:
    """What every analysis of one prompt and one text begins with: both checked, and the prompt's bias."""
    prompt = one_sequence(model, "prompt_tokens", prompt_tokens)
    text = one_sequence(model, "text_tokens", text_tokens)
    return prompt, text, bias_of(model, prompt, bias)


def log_probabilities(logits: Tensor) -> Float[Tensor, "*batch pos d_vocab"]:
    """In float64, so that a divergence of 1e-12 is not rounding."""
    return logits.double().log_softmax(dim=-1)


def kl_divergence(log_p: Tensor, log_q: Tensor) -> Float[Tensor, "*batch pos"]:
    """KL(p || q) in nats; never negative, where rounding of equal distributions would be."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)


def next_token_losses(log_p: Tensor, text: Tensor) -> Float[Tensor, "*batch pos"]:
    """-log p of the token that follows, in nats; NaN at the last place, where none follows."""
    losses = log_p.new_full(log_p.shape[:-1], float("nan"))
    targets = text[1:, None].expand(*log_p.shape[:-2], -1, -1)
    losses[..., :-1] = -log_p[..., :-1, :].gather(-1, targets).squeeze(-1)
    return losses
