"""Reference text: likely continuations of the prompt, whose queries are used for the fits.

``None``: the model's own continuations, sampled at temperature 1 (the default, and the most accurate); ``"prompt"``: the prompt
repeated; any other string, or tokens [pos] or [text, pos]: that text. The exact bias replaces the prompt while text is read.
"""

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.conversion.prompt import PromptTokens, prompt_tokens
from kvlens.conversion.softmax.prompt_pass import ConvertedExactly, rows_at_once, rows_of
from kvlens.conversion.softmax.settings import TextOptions
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.memory import NUMBERS_AT_ONCE
from kvlens.model.protocol import KVModel, ReadsPrompts
from kvlens.ops.landmarks import Queries

ROWS_AT_ONCE = 32
HELD_OUT = 8
"""One in this many reference texts is held out for measuring the heads' errors."""
APART = 2_654_435_769
"""Offset between the seeds of continuations used for fitting and for measuring; torch uses the last 32 bits of a seed."""


class ReferenceText(NamedTuple):
    """Texts for each prompt. ``passes`` is the cost of making them, in units of one pass over the prompt."""

    tokens: Int[Tensor, "batch text pos"]
    passes: float


def reference_text(
    model: ReadsPrompts, prompt: PromptTokens, exact: ConvertedExactly, whole: KVBias, options: TextOptions
) -> ReferenceText:
    """The reference texts of every prompt.

    Args:
        whole: the exact bias, including the one that it continues.

    Raises:
        KVLensError: an empty or unreadable text, or not enough positions left within ``n_ctx``.
    """
    batch, given = prompt.tokens.shape[0], options.reference
    room = room_after(model, whole)
    if given is None:
        tokens = own_texts(model, exact, whole, options, options.n_continuations)
        return ReferenceText(tokens, tokens[0].numel() / prompt.tokens.shape[1])
    if isinstance(given, str) and given == "prompt":
        shortest = prompt.tokens.shape[1] if prompt.mask is None else int(prompt.mask.sum(dim=1).min())
        return ReferenceText(_cut(prompt.tokens[:, None, : min(shortest, room)]), 0.0)
    read = prompt_tokens(model, given, prepend_bos=False, what="convert_prompt: reference")
    if read.mask is not None:
        raise KVLensError("convert_prompt: reference texts must all have the same length; give one text, or tokens [text, pos]")
    return ReferenceText(_cut(read.tokens[None, :, :room].expand(batch, -1, -1)), 0.0)


def own_texts(
    model: ReadsPrompts, exact: ConvertedExactly, whole: KVBias, options: TextOptions, n: int, apart: bool = False
) -> Int[Tensor, "batch text pos"]:
    """``n`` of the model's own continuations of each prompt; with ``apart``, different ones from those used for fitting."""
    length = min(options.continuation_length, room_after(model, whole))
    return sample_continuations(model, exact, whole, n, length, (options.seed + APART * apart) % 2**63)


def _cut(tokens: Tensor) -> Tensor:
    """Each text cut into two to eight segments, so that one can be held out: [batch, text, pos]."""
    n_texts, length = tokens.shape[1:]
    if n_texts >= HELD_OUT or length < 4:
        return tokens
    pieces = min(HELD_OUT, length // 2)
    return tokens[..., : length // pieces * pieces].reshape(tokens.shape[0], n_texts * pieces, -1)


def room_after(model: KVModel, whole: KVBias) -> int:
    """The number of positions left after the prompt. Raises KVLensError if there are fewer than 2."""
    if not model.cfg.has_position_limit:
        return 10**9
    room = model.cfg.n_ctx - int(torch.as_tensor(whole.position_offset).max())
    if room < 2:
        raise KVLensError(
            f"convert_prompt: the prompt fills n_ctx={model.cfg.n_ctx}: no reference text fits after it, nor would any other "
            'text; shorten the prompt, or use method="exact"'
        )
    return room


@torch.no_grad()
def sample_continuations(
    model: ReadsPrompts, exact: ConvertedExactly, whole: KVBias, n: int, length: int, seed: int
) -> Int[Tensor, "batch text pos"]:
    """``n`` texts per prompt, sampled at temperature 1 from what the model would write next."""
    generator = torch.Generator().manual_seed(seed)
    logits = model.logits_of(exact.last_residual)[:, 0]
    batch = logits.shape[0]
    rows = torch.arange(batch).repeat_interleave(n)
    at_once = min(ROWS_AT_ONCE, max(1, 2 * NUMBERS_AT_ONCE // whole.b_KV[0, 0].numel()))
    return torch.cat([_sample(model, whole, logits, part, length, generator) for part in rows.split(at_once)]).view(
        batch, n, length
    )


def _sample(
    model: ReadsPrompts, whole: KVBias, logits: Tensor, rows: Tensor, length: int, generator: torch.Generator
) -> Tensor:
    logits, text, cache = logits[rows.to(logits.device)], [], None
    with model.holding(rows_of(whole, rows)):
        for step in range(length):
            text.append(torch.multinomial(logits.float().cpu().softmax(dim=-1), 1, generator=generator).to(logits.device))
            if step + 1 < length:
                logits, cache = model.next_logits(text[-1], cache)
    return torch.cat(text, dim=1)


@torch.no_grad()
def read_queries(
    model: ReadsPrompts, bias: KVBias, tokens: Int[Tensor, "batch text pos"], layers: range | None = None
) -> list[Queries]:
    """Queries, outputs and log-normalizers of the texts, with ``bias`` replacing the prompt: one record per layer."""
    batch, n_texts, pos = tokens.shape
    rows = torch.arange(batch).repeat_interleave(n_texts)
    whole: list[tuple[Tensor, ...]] = []
    at_once = rows_at_once(model, bias, pos, ROWS_AT_ONCE)
    for part in torch.arange(len(rows), device=tokens.device).split(at_once):
        with model.holding(rows_of(bias, rows[part.cpu()])):
            read = model.read_queries(tokens.flatten(0, 1)[part], layers)
        if not whole:  # filled part by part, since concatenating parts at the end would hold them twice
            whole = [tuple(x.new_empty(len(rows), *x.shape[1:]) for x in layer) for layer in read]
        for into, layer in zip(whole, read, strict=True):
            for every, some in zip(into, layer, strict=True):
                every[part.to(every.device)] = some
    positions = torch.arange(pos, device=tokens.device).repeat(n_texts)
    by_prompt = [[x.view(batch, n_texts * pos, *x.shape[2:]) for x in layer] for layer in whole]
    return [Queries(q, z, log_n, positions) for q, z, log_n in by_prompt]


def split_held_out(tokens: Int[Tensor, "batch text pos"]) -> tuple[Tensor, Tensor]:
    """Texts to fit on and texts to measure on: one in :data:`HELD_OUT`, at least one; a single text serves as both."""
    n = tokens.shape[1]
    held_out = max(1, n // HELD_OUT)
    return (tokens, tokens) if n == 1 else (tokens[:, held_out:], tokens[:, :held_out])
