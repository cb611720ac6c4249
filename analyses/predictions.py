"""The logits on a text, after other tokens or with a bias attached, and measures that compare them."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.memory import BLOCK_NUMBERS, by_device

KL = "KL(original || intervened), nats"
LOSS_CHANGE = "loss, intervened minus original, nats: positive if the removed part helps"
EFFECT = "log p(answer), original minus intervened, nats"
LOGIT_CHANGE = "logit minus the vocabulary's mean, intervened minus original: negative if the removed part helps"
"""The descriptions, with their signs, of the effects of interventions in all tables."""
OUTPUT_SHARE = "<part, z> / <z, z>, of the head's output z"
"""The meaning of ``output_share`` in every table. It is signed, and the shares of all parts sum to 1.

Both products are summed over the row's text positions: a single one, or all of them.
"""


def text_logits(
    model: KVModel,
    before: Int[Tensor, " before_pos"] | None,
    text: Int[Tensor, " pos"],
    residuals: list[Tensor] | None = None,
    *,
    kept: Bool[Tensor, " before_pos"] | None = None,
) -> Float[Tensor, "pos d_vocab"]:
    """Logits at the positions of ``text`` when it follows ``before``; no other position is unembedded.

    With linear attention ``before`` is read in segments, into a state, so its length costs no memory.

    Args:
        model: the model, with whatever is attached to it.
        before: tokens before the text; None or empty for none.
        text: tokens of the text.
        residuals: a list to which the residual stream at the text's positions, [pos, d_model], is appended before each layer
            and after the last.
        kept: True at the tokens of ``before`` that are read; the others only take up positions. None where all are read.
    """
    streams: list[Tensor] | None = None if residuals is None else []
    front = None if before is None or not len(before) else before[None]
    mask = None if front is None or kept is None else kept[None]
    logits = model.logits_on(text[None], len(text), before=front, kept=mask, residuals=streams)[0]
    if residuals is not None and streams is not None:
        residuals += [stream[0] for stream in streams]
    return logits


def log_probabilities(logits: Float[Tensor, "*batch pos d_vocab"]) -> Float[Tensor, "*batch pos d_vocab"]:
    """Log-probabilities in float64, so that rounding stays below a divergence of 1e-12."""
    return logits.double().log_softmax(dim=-1)


def kl_divergence(log_p: Float[Tensor, "*p pos d_vocab"], log_q: Float[Tensor, "*q pos d_vocab"]) -> Float[Tensor, "*pq pos"]:
    """KL(p || q) in nats, clamped at 0, since rounding may make it negative for equal distributions."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1).clamp(min=0)


def divergences_from(
    log_p: Float[Tensor, "pos d_vocab"], logits: Float[Tensor, "row pos d_vocab"]
) -> tuple[Float[Tensor, "row pos"], Float[Tensor, "row pos"]]:
    """:func:`kl_divergence` from p to the predictions of many rows, and the logarithms of their normalizers, in float64.

    A few positions at a time, since numbers of a vocabulary in float64 that leave the cache take longer than the logits did:

        KL(p || q) = sum_v p_v log p_v - sum_v p_v (x_v - max x) + log sum_v exp(x_v - max x)
    """
    p = log_p.exp()
    entropy, n_rows = (p * log_p).sum(dim=-1), logits.shape[0]
    kl = entropy.new_empty(logits.shape[:2])
    log_n = torch.empty_like(kl)
    at_once = max(1, by_device(BLOCK_NUMBERS // 16, logits.device) // logits.shape[-1])
    blocks = [some for some in torch.arange(logits.shape[1]).split(at_once) if len(some)]
    for row, some in ((row, slice(int(some[0]), int(some[-1]) + 1)) for row in range(n_rows) for some in blocks):
        x = logits[row, some].to(torch.float64, copy=True)
        top = x.amax(dim=-1, keepdim=True)
        expected = (p[some, None] @ x.sub_(top)[..., None]).flatten()
        log_sum = x.exp_().sum(dim=-1).log_()
        kl[row, some] = entropy[some] - expected + log_sum
        log_n[row, some] = log_sum + top[:, 0]
    return kl.clamp(min=0), log_n


def next_token_losses(log_p: Float[Tensor, "*batch pos d_vocab"], text: Int[Tensor, " pos"]) -> Float[Tensor, "*batch pos"]:
    """-log p of the token that follows, in nats; NaN at the last position and for a token that has no logit.

    Of logits in place of log-probabilities it is less by the logarithm of their normalizer.
    """
    losses = log_p.new_full(log_p.shape[:-1], float("nan"))
    known = text[1:] < log_p.shape[-1]  # a classifier predicts fewer classes than there are tokens
    targets = text[1:].where(known, 0)[:, None].expand(*log_p.shape[:-2], -1, -1)
    losses[..., :-1] = (-log_p[..., :-1, :].gather(-1, targets).squeeze(-1)).where(known, float("nan"))
    return losses
