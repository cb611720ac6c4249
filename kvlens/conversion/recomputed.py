"""A model's logits on a text after each of many counterfactual prompts, recomputed by full forward passes."""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.arguments import Span
from kvlens.checks import checked
from kvlens.conversion.convert import convert_prompt
from kvlens.conversion.linear import carry_bias
from kvlens.conversion.prompt import Counterfactuals
from kvlens.kv_bias import KVBias
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import HookedKVTransformer, asks_for_positions_alone
from kvlens.model.protocol import KVModel

TOKENS_PER_PASS = 1536
"""At most so many tokens go through the model at once, with at least one row."""
FIXED_COST = 350_000_000
"""The fixed cost of converting a prefix and of a pass behind it on a CPU, as tokens times weights of the model: 200 tokens of a
model with 1.8 million weights. Rows that share a pass share only the prefix of the first of them."""
WEIGHTS_READ = 30
"""And in tokens: a pass reads all weights (SmolLM2, one thread: 92 ms for 1 token, 210 for 64, 340 for 128, 610 for 256)."""


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
    :func:`logits_after`. Deleted tokens are not read where attention is softmax and asks for positions alone. Elsewhere gaps
    that all rows of a batch have are not, where that saves more than a pass costs: the biases are carried over them. A row that
    is left out for the most part is then a batch of its own.

    Args:
        model, prompts, on_tokens: as :func:`logits_after`.
        prefixes: the biases of the prompt's beginnings, by their number of tokens: the longest that fits is not converted
            again, and those that are made here are added, the newest that hold no more than a pass may; None keeps none.
    """
    prefixes = {} if prefixes is None else prefixes
    first = prompts.first_changes().cpu().clamp(max=len(prompts.original) - 1)
    order, worth, n = first.argsort(stable=True), _worth(model, prompts.tokens.device), len(prompts.original)
    prompts = replace(prompts, packed=prompts.positions == "closed" or asks_for_positions_alone(model))
    if prompts.packed:
        left = prompts.kept.cpu().flip(1).cumsum(dim=1).flip(1)  # [row, pos]: kept tokens from there on
        order = order[left[order, first[order]].argsort(stable=True)]
        order = order[first[order].argsort(stable=True)]
        sizes = _packed_passes(first[order].tolist(), left[order], worth)
    else:
        gone = (~prompts.kept).sum(dim=1).cpu()
        apart = (2 * gone > n - first) & (gone > worth) if _carries_over_gaps(model, prompts) else torch.zeros_like(gone).bool()
        sizes = _passes(first[order].tolist(), n, worth, apart[order].tolist())
    before, prefix = 0, model.attached_kv_bias
    for rows in order.split(sizes):
        start = int(first[rows[0]])
        known = max((n for n in prefixes if before < n <= start), default=0)
        before, prefix = (known, prefixes[known]) if known else (before, prefix)
        n_read = start - before
        if start > before:
            prefix = convert_prompt(model, prompts.original[before:start], initial=prefix)
            before = start
            prefixes[start] = prefix
            while sum(each.num_parameters for each in prefixes.values()) > NUMBERS_PER_PASS:
                del prefixes[next(iter(prefixes))]
        biases = prefix
        for here, is_read in _stretches(model, prompts.rows(rows).after(before), worth, biases is not None):
            n_here = len(here.original)
            if is_read:
                biases = convert_prompt(model, here, initial=biases)
                n_read += len(rows) * (max(1, int(here.kept.sum(dim=1).max())) if here.packed else n_here)
            else:
                biases = carry_bias(model, biases, n_here)  # type: ignore[arg-type]
        yield rows, biases  # type: ignore[misc]
        if on_tokens is not None:
            on_tokens(n_read)


def _carries_over_gaps(model: KVModel, prompts: Counterfactuals) -> bool:
    return isinstance(model, HookedKVTransformer) and prompts.positions == "kept" and not prompts.packed


def _packed_passes(first: list[int], left: Int[Tensor, "row pos"], worth: int) -> list[int]:
    """Numbers of rows, in their order, that are read together: while another one costs fewer tokens than a pass of its own.

    Args:
        first: where each row begins to differ from the prompt.
        left: how many tokens of each row are kept from each position on.
        worth: tokens that a pass costs.
    """
    sizes: list[int] = []
    start = width = 0
    for i, change in enumerate(first):
        wider = max(width, int(left[i, start]))
        n, alone = (sizes or [0])[-1], int(left[i, change]) + worth
        if not n or (n + 1) * wider > min(TOKENS_PER_PASS, n * width + alone):
            sizes.append(0)
            start, wider = change, int(left[i, change])
        sizes[-1] += 1
        width = wider
    return sizes


def _stretches(model: KVModel, prompts: Counterfactuals, worth: int, follows: bool) -> Iterator[tuple[Counterfactuals, bool]]:
    """Parts of counterfactual prompts, in order, and whether they are read; gaps of all rows are not, where that pays.

    Args:
        prompts: the rows of a batch.
        worth: tokens that a pass costs.
        follows: whether something stands in front that a bias is carried from.
    """
    n, start = len(prompts.original), 0
    read = prompts.kept.any(dim=0).tolist()
    for first, stop in _gaps(read) if _carries_over_gaps(model, prompts) else ():
        if (stop - first) * len(prompts) > worth and (first > 0 or follows) and stop < n:
            if first > start:
                yield prompts.columns(start, first), True
            yield prompts.columns(first, stop), False
            start = stop
    yield prompts.columns(start, n), True


def _gaps(read: Iterable[bool]) -> Iterator[Span]:
    """The ranges that are not read."""
    at = 0
    for is_read, group in itertools.groupby(read):
        start, at = at, at + len(list(group))
        if not is_read:
            yield start, at


def _worth(model: Any, device: torch.device) -> int:
    """`FIXED_COST` in tokens; elsewhere than on a CPU, passes are as large as they may be."""
    if device.type != "cpu":
        return TOKENS_PER_PASS
    return FIXED_COST // sum(p.numel() for p in model.parameters()) + WEIGHTS_READ


def _gap(model: KVModel, prompts: Counterfactuals) -> int:
    """How many tokens at the beginning no row reads, over which a bias can be carried instead."""
    if not isinstance(model, HookedKVTransformer):
        return 0
    read = prompts.kept.any(dim=0)
    return int(read.long().argmax()) if bool(read.any()) else len(read)


def _passes(first: list[int], n_tokens: int, worth: int, apart: Sequence[bool] = ()) -> list[int]:
    """Numbers of rows, in their order, that are read together: a pass ends where the tokens that its rows read again, although
    they stand before their first change, add up to more than ``worth``, or at `TOKENS_PER_PASS`. Rows ``apart`` are alone."""
    sizes: list[int] = []
    start = again = 0
    for i, change in enumerate(first):
        again += change - start
        is_apart = any(apart[max(0, i - 1) : i + 1])
        if not sizes or is_apart or again > worth or (sizes[-1] + 1) * (n_tokens - start) > TOKENS_PER_PASS:
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
