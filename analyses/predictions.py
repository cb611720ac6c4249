"""The logits on a text, with something in front of it or under a bias, and the figures that compare them."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias

KL = "KL(original || intervened), nats"
LOSS_CHANGE = "loss, intervened minus original, nats: positive where what is taken away helps"
EFFECT = "log p(answer) as it is, less log p(answer) intervened, nats"
LOGIT_CHANGE = "logit less the vocabulary's mean, intervened minus original: negative where what is taken away helps"
"""How every table says what an intervention changes, and with which sign."""
OUTPUT_SHARE = "<part, z> / <z, z>, of the head's output z"
"""What ``output_share`` means in every table. It is signed, and the shares of all parts sum to 1.

Both products are summed over the text positions that a row is about: a single one, or all of them.
"""


def text_logits(
    model: HookedKVTransformer,
    before: Int[Tensor, " before_pos"] | None,
    text: Int[Tensor, " pos"],
    residuals: list[Tensor] | None = None,
) -> Float[Tensor, "pos d_vocab"]:
    """Logits at the positions of ``text`` when ``before`` stands in front of it; no other position is unembedded.

    With linear attention ``before`` is read in segments, into a state: its length costs no memory.

    Args:
        model: with whatever is attached to it.
        before: None or empty for nothing.
        text: tokens.
        residuals: the residual stream at the text's positions, [pos, d_model], is appended before each layer and after the
            last.
    """
    last = model.cfg.n_layers - 1

    def keep(resid: Tensor, hook: Any) -> None:
        residuals.append(resid[0, -len(text) :].clone())  # type: ignore[union-attr]

    def keep_text(resid: Tensor, hook: Any) -> Tensor:
        return resid[:, -len(text) :]

    names = [*(f"blocks.{layer}.hook_resid_pre" for layer in range(last + 1)), f"blocks.{last}.hook_resid_post"]
    hooks: list[Any] = [] if residuals is None else [(name, keep) for name in names]
    if before is not None and len(before) and model.cfg.attention == "linear" and model.cfg.attention_variant is None:
        cache = model.empty_cache()
        # a pad token that was typed is a token, not padding
        model(before[None], return_type=None, attention_mask=torch.ones_like(before[None]), past_kv_cache=cache)
        mask = torch.ones_like(text[None])
        return model.run_with_hooks(text[None], attention_mask=mask, past_kv_cache=cache, fwd_hooks=hooks)[0]
    tokens = (text if before is None else torch.cat([before, text]))[None]
    hooks.append((names[-1], keep_text))
    return model.run_with_hooks(tokens, attention_mask=torch.ones_like(tokens), fwd_hooks=hooks)[0]


def converted_logits(model: HookedKVTransformer, bias: KVBias, text: Int[Tensor, " pos"]) -> Float[Tensor, "pos d_vocab"]:
    """Logits on ``text`` alone with ``bias`` attached."""
    with model.kv_bias(bias):
        return text_logits(model, None, text)


def log_probabilities(logits: Float[Tensor, "*batch pos d_vocab"]) -> Float[Tensor, "*batch pos d_vocab"]:
    """In float64, so that a divergence of 1e-12 is not rounding."""
    return logits.double().log_softmax(dim=-1)


def kl_divergence(log_p: Float[Tensor, "*p pos d_vocab"], log_q: Float[Tensor, "*q pos d_vocab"]) -> Float[Tensor, "*pq pos"]:
    """KL(p || q) in nats; never negative, where rounding of equal distributions would be."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)


def next_token_losses(log_p: Float[Tensor, "*batch pos d_vocab"], text: Int[Tensor, " pos"]) -> Float[Tensor, "*batch pos"]:
    """-log p of the token that follows, in nats; NaN at the last position and for a token that has no logit."""
    losses = log_p.new_full(log_p.shape[:-1], float("nan"))
    known = text[1:] < log_p.shape[-1]  # a classifier predicts fewer classes than there are tokens
    targets = text[1:].where(known, 0)[:, None].expand(*log_p.shape[:-2], -1, -1)
    losses[..., :-1] = (-log_p[..., :-1, :].gather(-1, targets).squeeze(-1)).where(known, float("nan"))
    return losses
