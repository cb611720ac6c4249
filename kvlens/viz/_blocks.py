"""Keeping a page small: long axes are shown in blocks of neighbors, long token lists by their most relevant tokens.

A 4,096-token prompt has 4,096 columns per head and query; a picture has a few hundred. Sums over neighbors preserve the order
and the total.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.texts import joined

MAX_TEXT = 40
"""The most characters of a block's text."""


def block_size(n: int, limit: int) -> int:
    """The number of neighbors per block for which ``n`` positions make at most ``limit`` blocks."""
    return max(1, math.ceil(n / max(1, limit)))


def token_blocks(tokens: Sequence[str], size: int) -> list[dict[str, str]]:
    """Tokens in blocks of ``size`` neighbors: the position of each block, and its text, shortened in the middle."""
    return [_block(tokens, start, size) for start in range(0, len(tokens), size)]


def _block(tokens: Sequence[str], start: int, size: int) -> dict[str, str]:
    last = min(start + size, len(tokens)) - 1
    text = joined(tokens[start : last + 1])
    if last > start and len(text) > MAX_TEXT:
        text = f"{text[: MAX_TEXT // 2]} … {text[-MAX_TEXT // 2 :]}"
    return {"place": str(start) if last == start else f"{start}–{last}", "text": text}


def block_means(
    sums: Float[Tensor, "*rest column"], size: int, *, per_column: int = 1, n: int | None = None
) -> Float[Tensor, "*rest block"]:
    """Means per token over blocks of neighbors.

    Args:
        sums: one column per ``per_column`` neighboring tokens; the last one may have fewer.
        size: columns per block; the last block may have fewer.
        per_column: tokens per column.
        n: total number of tokens; None if the last column is full.
    """
    n = sums.shape[-1] * per_column if n is None else n
    blocks = torch.nn.functional.pad(sums, (0, -sums.shape[-1] % size)).unflatten(-1, (-1, size)).sum(dim=-1)
    n_tokens = torch.full((blocks.shape[-1],), size * per_column)
    n_tokens[-1] = n - (len(n_tokens) - 1) * size * per_column
    return blocks / n_tokens


def strongest_positions(
    pattern: Float[Tensor, "head query key"], queries: Int[Tensor, " query"], n_prompt: int, max_tokens: int
) -> tuple[Int[Tensor, " kept"], Int[Tensor, " left_out"]]:
    """Choose which of the ``key`` positions a square view of ``max_tokens`` rows shows.

    The last queries after the prompt are kept, up to half of the view; then the other positions that these attend to most,
    positions with known rows first.

    Args:
        pattern: the known rows.
        queries: the positions of these rows, ascending.
        n_prompt: number of positions of the prompt.
        max_tokens: rows and columns of the view.
    """
    n_keys = pattern.shape[-1]
    if n_keys <= max_tokens:
        return torch.arange(n_keys), torch.arange(0)
    of_text = (queries >= n_prompt).nonzero().squeeze(1)
    last = of_text[-max(max_tokens // 2, max_tokens - n_prompt) :]
    mass = pattern[:, last].abs().sum(dim=(0, 1))
    mass[queries] += mass.sum()  # positions with known rows come before those with empty rows
    mass[queries[last]] = torch.inf
    chosen = torch.zeros(n_keys, dtype=torch.bool)
    chosen[mass.topk(max_tokens).indices] = True
    return chosen.nonzero().squeeze(1), (~chosen).nonzero().squeeze(1)
