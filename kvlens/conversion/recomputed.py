"""A model's logits on a text after each of many counterfactual prompts, recomputed by full forward passes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import checked
from kvlens.conversion.convert import convert_prompt
from kvlens.conversion.linear import carry_bias
from kvlens.conversion.prompt import Counterfactuals
from kvlens.kv_bias import KVBias
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import HookedKVTransformer
from kvlens.model.protocol import KVModel

TOKENS_PER_PASS = 1536
"""At most so many tokens go through the model at once, with at least one row."""
FIXED_COST = 350_000_000
"""The fixed cost of converting a prefix and of a pass behind it on a CPU, as tokens times weights of the model: 200 tokens of a
model with 1.8 million weights, 3 of GPT-2 small. Rows that share a pass share only the prefix of the first of them."""


@torch.no_grad()
@checked
def logits_after(
    model: KVModel,
    prompts: Counterfactuals,
    text: Int[Tensor, " pos"],
    n_last: int = 1,
    *,
    rows_per_pass: int | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> Float[Tensor, "row n_last d_vocab"]:
    """The logits at the last ``n_last`` tokens of a text after each counterfactual prompt.

    Rows with a common prefix share the work: everything before the first change among the rows of a pass is converted once and
    extended from pass to pass, so that deleting each unit of a long prompt in turn reads about half the tokens. Tokens that
    follow it and that no row of a pass reads are skipped: the bias is carried over them.

    Args:
        model: the model; a bias attached to it comes before the prompts.
        prompts: the counterfactual prompts, one per row.
        text: the tokens that follow each prompt, [pos].
        n_last: number of tokens, counted from the end of the text.
        rows_per_pass: number of rows per pass; None chooses, from where the rows first differ from the prompt and
            :data:`TOKENS_PER_PASS`.
        on_tokens: called after each pass with the number of tokens that it read, including the shared prefix.

    Source: prefix reuse as in AttriBoT (arXiv 2411.15102); here a converted prompt is reused.
    """
    first = prompts.first_changes().cpu()
    order = first.argsort(stable=True)
    n_tokens = len(prompts.original) + len(text)
    worth = _worth(model, prompts.tokens.device)
    passes = rows_per_pass or _passes(first[order].tolist(), n_tokens, worth)
    found: list[Tensor] = []
    before, bias, n_left = 0, None, len(order)
    for rows in order.split(passes):
        start, n_read = int(first[rows[0]]), 0
        here = prompts.rows(rows)
        gap = _gap(model, here.after(start))
        if (start - before) * (n_left - 1) + gap * len(rows) >= worth and start:
            if start > before:
                bias = convert_prompt(model, prompts.original[before:start], initial=bias)
            before, n_read = start, start - before
        else:
            gap = 0
        carried = bias
        if gap and prompts.positions == "kept":
            assert bias is not None
            assert isinstance(model, HookedKVTransformer)
            carried = carry_bias(model, bias, gap)
        found.append(_last_logits(model, carried, here.after(before + gap), text, n_last))
        n_left -= len(rows)
        if on_tokens is not None:
            on_tokens(n_read + len(rows) * (n_tokens - before - gap))
    return torch.cat(found)[order.argsort()]


@torch.no_grad()
@checked
def converted_rows(
    model: KVModel,
    prompts: Counterfactuals,
    *,
    on_tokens: Callable[[int], None] | None = None,
    prefixes: dict[int, KVBias] | None = None,
) -> Iterator[tuple[Int[Tensor, " row"], KVBias]]:
    """The biases of counterfactual prompts, batch by batch: (numbers of the rows, their biases).

    What stands before the first change among the rows of a batch is converted once and extended from batch to batch, as in
    :func:`logits_after`.

    Args:
        model, prompts, on_tokens: as :func:`logits_after`.
        prefixes: the biases of the prompt's beginnings, by their number of tokens: the longest that fits is not converted
            again, and those that are made here are added, the newest that hold no more than a pass may; None keeps none.
    """
    first = prompts.first_changes().cpu().clamp(max=len(prompts.original) - 1)
    order, prefixes = first.argsort(stable=True), {} if prefixes is None else prefixes
    before, prefix = 0, model.attached_kv_bias
    for rows in order.split(_passes(first[order].tolist(), len(prompts.original), _worth(model, prompts.tokens.device))):
        start = int(first[rows[0]])
        known = max((n for n in prefixes if before < n <= start), default=0)
        before, prefix = (known, prefixes[known]) if known else (before, prefix)
        n_read = start - before + len(rows) * (len(prompts.original) - start)
        if start > before:
            prefix = convert_prompt(model, prompts.original[before:start], initial=prefix)
            before = start
            prefixes[start] = prefix
            while sum(each.num_parameters for each in prefixes.values()) > NUMBERS_PER_PASS:
                del prefixes[next(iter(prefixes))]
        yield rows, convert_prompt(model, prompts.rows(rows).after(before), initial=prefix)
        if on_tokens is not None:
            on_tokens(n_read)


def _worth(model: Any, device: torch.device) -> int:
    """`FIXED_COST` in tokens; elsewhere than on a CPU, passes are as large as they may be."""
    return max(1, FIXED_COST // sum(p.numel() for p in model.parameters())) if device.type == "cpu" else TOKENS_PER_PASS


def _gap(model: KVModel, prompts: Counterfactuals) -> int:
    """How many tokens at the beginning no row reads, over which a bias can be carried instead."""
    if not isinstance(model, HookedKVTransformer):
        return 0
    read = prompts.kept.any(dim=0)
    return int(read.long().argmax()) if bool(read.any()) else len(read)


def _passes(first: list[int], n_tokens: int, worth: int) -> list[int]:
    """Numbers of rows, in their order, that are read together: a pass ends where the tokens that its rows read again, although
    they stand before their first change, add up to more than ``worth``, or at `TOKENS_PER_PASS`."""
    sizes: list[int] = []
    start = again = 0
    for change in first:
        again += change - start
        if not sizes or again > worth or (sizes[-1] + 1) * (n_tokens - start) > TOKENS_PER_PASS:
            sizes.append(0)
            start, again = change, 0
        sizes[-1] += 1
    return sizes


def _last_logits(
    model: KVModel, bias: KVBias | None, prompts: Counterfactuals, text: Tensor, n_last: int
) -> Float[Tensor, "row n_last d_vocab"]:
    tokens, kept = prompts.in_front_of_text()
    behind = text.to(tokens.device).expand(len(tokens), -1)
    with contextlib.nullcontext() if bias is None else model.kv_bias(bias):
        return model.logits_on(behind, n_last, before=tokens, kept=kept, keeps_positions=prompts.positions == "kept")
