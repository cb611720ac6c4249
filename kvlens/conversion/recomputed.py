"""A model's logits on a text after each of many counterfactual prompts, recomputed by full forward passes."""

import contextlib
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import checked
from kvlens.conversion.convert import convert_prompt
from kvlens.conversion.counterfactual import Counterfactuals
from kvlens.kv_bias import KVBias
from kvlens.model.protocol import KVModel

TOKENS_PER_PASS = 4096
"""More rows per pass use a core better, fewer share longer prefixes: 32 units of 512 tokens were fastest at this size."""
PREFIX_WORTH = 64
"""Tokens that a pass must save over its rows for converting their shared prefix to pay off, given its fixed cost."""


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
    extended from pass to pass, so that deleting each unit of a long prompt in turn reads about half the tokens.

    Args:
        model: the model; a bias attached to it comes before the prompts.
        prompts: the counterfactual prompts, one per row.
        text: the tokens that follow each prompt, [pos].
        n_last: number of tokens, counted from the end of the text.
        rows_per_pass: number of rows per pass; None chooses about :data:`TOKENS_PER_PASS` tokens, and at least four rows.
        on_tokens: called after each pass with the number of tokens that it read, including the shared prefix.

    Source: prefix reuse as in AttriBoT (arXiv 2411.15102); here a converted prompt is reused.
    """
    rows_per_pass = rows_per_pass or max(4, TOKENS_PER_PASS // (len(prompts.original) + len(text)))
    first = prompts.first_changes()
    order = first.argsort(stable=True)
    found: list[Tensor] = []
    before, bias = 0, None
    for rows in order.split(rows_per_pass):
        start, n_read = int(first[rows].min()), 0
        if (start - before) * (len(rows) - 1) >= PREFIX_WORTH or (
            start - before >= PREFIX_WORTH and len(found) + 1 < len(order)
        ):
            bias = convert_prompt(model, prompts.original[before:start], initial=bias)
            before, n_read = start, start - before
        found.append(_last_logits(model, bias, prompts.rows(rows).after(before), text, n_last))
        if on_tokens is not None:
            on_tokens(n_read + len(rows) * (len(prompts.original) - before + len(text)))
    return torch.cat(found)[order.argsort()]


def _last_logits(
    model: KVModel, bias: KVBias | None, prompts: Counterfactuals, text: Tensor, n_last: int
) -> Float[Tensor, "row n_last d_vocab"]:
    tokens, kept = prompts.in_front_of_text()
    behind = text.to(tokens.device).expand(len(tokens), -1)
    with contextlib.nullcontext() if bias is None else model.kv_bias(bias):
        return model.logits_on(behind, n_last, before=tokens, kept=kept, keeps_positions=prompts.positions == "kept")
