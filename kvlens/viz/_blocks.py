"""Keeping a page small: long axes in blocks of neighbours, long token lists by what matters.

A 4,096-token prompt has 4,096 columns per head and query; a picture has a few hundred. Sums over neighbours keep the geometry
and the total.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor


def block_size(n: int, limit: int) -> int:
    """How many neighbours make a block, so that ``n`` places make at most ``limit`` blocks."""
    return max(1, math.ceil(n / max(1, limit)))


def token_blocks(tokens: Sequence[str], limit: int) -> tuple[int, list[dict[str, str]]]:
    """Tokens in at most ``limit`` blocks of neighbours: how many make a block, and each block's place and text."""
    size = block_size(len(tokens), limit)
    return size, [_block(tokens, start, size) for start in range(0, len(tokens), size)]


def _block(tokens: Sequence[str], start: int, size: int) -> dict[str, str]:
    last = min(start + size, len(tokens)) - 1
    return {"place": str(start) if last == start else f"{start}–{last}", "text": "".join(tokens[start : last + 1])}


def block_means(values: Float[Tensor, "*rest pos"], size: int) -> Float[Tensor, "*rest block"]:
    """Means over blocks of ``size`` neighbours; the last block may be shorter, and is the mean of what it has."""
    if size == 1:
        return values
    missing = -values.shape[-1] % size
    sums = torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (-1, size)).sum(dim=-1)
    places = torch.full_like(sums, size)
    places[..., -1] -= missing
    return sums / places


def strongest_positions(
    pattern: Float[Tensor, "head query key"], queries: Int[Tensor, " query"], n_prompt: int, max_tokens: int
) -> tuple[Int[Tensor, " kept"], Int[Tensor, " left_out"]]:
    """Which of the ``key`` positions a square view of ``max_tokens`` rows keeps, and which are left out.

    The last queries after the prompt are kept, up to half of the view; then the other positions that these attend to most,
    those whose rows are known before the rest.

    Args:
        pattern: the rows that are known.
        queries: the positions of these rows, ascending.
        n_prompt: how many positions are the prompt's.
        max_tokens: rows and columns of the view.
    """
    n_keys = pattern.shape[-1]
    if n_keys <= max_tokens:
        return torch.arange(n_keys), torch.arange(0)
    of_text = (queries >= n_prompt).nonzero().squeeze(1)
    last = of_text[-max(max_tokens // 2, max_tokens - n_prompt) :]
    mass = pattern[:, last].abs().sum(dim=(0, 1))
    mass[queries] += mass.sum()  # positions whose rows are known come before those that would stay empty
    mass[queries[last]] = torch.inf
    chosen = torch.zeros(n_keys, dtype=torch.bool)
    chosen[mass.topk(max_tokens).indices] = True
    return chosen.nonzero().squeeze(1), (~chosen).nonzero().squeeze(1)
