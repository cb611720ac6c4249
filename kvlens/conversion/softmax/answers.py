"""Measuring the model's answers (:class:`kvlens.kv_bias.AnswerErrors`) on held-out texts: with prompt, bias, and neither."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.conversion.prompt import PromptTokens
from kvlens.conversion.softmax.prompt_pass import ConvertedExactly, as_batch, continued, rows_at_once, rows_of
from kvlens.kv_bias import AnswerErrors, KVBias, VirtualKeys
from kvlens.memory import NUMBERS_AT_ONCE, by_device
from kvlens.model.protocol import ReadsPrompts

ROWS_AT_ONCE = 32
"""Texts in one pass. The logits of three passes over them are held at once, and their logarithms, in float64."""


class Without(NamedTuple):
    """The bias that remains when the prompt has not been read, and a description of it."""

    bias: KVBias
    words: str


def without_prompt(model: ReadsPrompts, prompt: PromptTokens, exact: ConvertedExactly, old: KVBias | None) -> Without:
    """Remove the prompt's keys but leave the text at its position, and keep whatever does not belong to the prompt.

    That is the bias from which the conversion continues, or the BOS if every prompt of the batch begins with it, or nothing.
    (With the BOS directly before it, a text would be at the beginning of a document, and the answers would differ by more than
    the effect of the prompt.)
    """
    bos = None if model.tokenizer is None else model.tokenizer.bos_token_id
    bias = exact.bias
    keeps_bos = old is None and not bias.recurrent.layers and bos is not None and bool((prompt.tokens[:, 0] == bos).all())
    assert isinstance(bias.features, VirtualKeys)
    first = VirtualKeys(bias.features.keys[..., :1, :], bias.features.distance[..., :1])
    rows: dict[str, Any] = {name: torch.zeros_like(getattr(bias, name)) for name in ("last_k", "last_v", "last_q")}
    rows["recurrent"] = bias.recurrent.map(torch.zeros_like)
    if old is not None:
        before = as_batch(old, bias.b_KV.shape[1])
        rows = {name: getattr(before, name) for name in rows}
    left = replace(bias, b_KV=keeps_bos * bias.b_KV[..., :1, :], b_D=keeps_bos * bias.b_D[..., :1], features=first, **rows)
    if old is not None:
        return Without(continued(old, left), "what was converted before")
    return Without(left, "the prompt's BOS" if keeps_bos else "nothing")


@torch.no_grad()
def answer_errors(
    model: ReadsPrompts, whole: KVBias, converted: KVBias, without: Without, texts: Int[Tensor, "batch text pos"]
) -> AnswerErrors:
    """The errors of ``converted`` on ``texts``; ``whole`` represents the prompt. Takes three forward passes over the texts."""
    batch, n_texts, n_positions = texts.shape
    flat, rows = texts.flatten(0, 1), torch.arange(batch).repeat_interleave(n_texts)
    most = min(ROWS_AT_ONCE, max(1, by_device(NUMBERS_AT_ONCE, texts.device) // (4 * n_positions * model.cfg.d_vocab_out)))
    at_once = rows_at_once(model, whole, n_positions, most)
    found = []
    for part in torch.arange(len(rows)).split(at_once):
        tokens = flat[part.to(flat.device)]
        found.append(_by_position(*(_logits(model, rows_of(b, rows[part]), tokens) for b in (whole, converted, without.bias))))
    error, size, effect, kl = (torch.cat(x).view(texts.shape) for x in zip(*found, strict=True))
    return AnswerErrors.of_positions(error, size, effect, kl, without.words)


def _logits(model: ReadsPrompts, bias: KVBias, tokens: Int[Tensor, "text pos"]) -> Float[Tensor, "text pos vocab"]:
    with model.holding(bias):
        return model(tokens, attention_mask=torch.ones_like(tokens)).double()


def _by_position(
    old: Float[Tensor, "text pos vocab"], new: Float[Tensor, "text pos vocab"], without: Float[Tensor, "text pos vocab"]
) -> tuple[Tensor, ...]:
    """||new - old||, ||old||, ||without - old|| and KL(old || new) at each position, [text, pos] each."""
    log_old, log_new = old.log_softmax(dim=-1), new.log_softmax(dim=-1)
    kl = (log_old.exp() * (log_old - log_new)).sum(dim=-1)
    return (new - old).norm(dim=-1), old.norm(dim=-1), (without - old).norm(dim=-1), kl
