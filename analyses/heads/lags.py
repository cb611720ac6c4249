"""Attention of heads on repeated tokens: mean attention at the lag of each kind of head.

On a text of N tokens repeated (:mod:`kvlens.analyses.heads.repeated_tokens`) four kinds of head attend at one lag each:

    ================ ================ ===============================
    kind             query i reads    mean over
    ================ ================ ===============================
    prefix_matching  i - N + 1        the N positions of the second copy
    previous_token   i - 1            all positions but the first
    duplicate_token  i - N            the N positions of the second copy
    current_token    i                all positions but the first
    ================ ================ ===============================

With a KV shift the raw pattern A is over *shifted* rows, which are mixtures of tokens. Two more views are over tokens: the
value-side pattern A (beta_1 I + beta_2 Shift), which values are read, and the key-side pattern A (alpha_1 I + alpha_2 Shift),
which keys attract the attention. At (i, t) the first is sum_s beta_s A[i, t + s], for any window.

For linear attention A is the implied pattern phi~(q).phi~(k) gamma^{i-j} / n_i, which may be negative and need not sum to 1.

``detect_head`` of TransformerLens divides by all attention, these scores by that of the scored queries: on one sequence of n
positions without repeated tokens inside a copy, its default measure is N/n, (n - 1)/n, N/n times these scores if rows sum to 1.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .repeated_tokens import RepeatedTokens
from .shift_roles import ShiftTaps

KINDS = ("prefix_matching", "previous_token", "duplicate_token", "current_token")
NEAR = 2
"""Neighboring positions over which a shift may spread the attention to a token."""


class PatternScores(NamedTuple):
    """Scores of heads, of one layer or of all, in the order of :data:`KINDS`, and statistics by position for the verdict.

    The statistics are of the value-side pattern E, means over sequences: E at the lag of each kind and its square (0 for a
    query whose lag reaches before the text), the sums of \\|E\\| and of E^2 over all keys, and, for the queries of the second
    copy, \\|E\\| on the positions of the first copy that are more than :data:`NEAR` away from the token's own.
    """

    raw: Float[Tensor, "*layer kind head"]
    value_side: Float[Tensor, "*layer kind head"]
    key_side: Float[Tensor, "*layer kind head"]
    read: Float[Tensor, "*layer kind head pos"]
    squares: Float[Tensor, "*layer kind head pos"]
    all_read: Float[Tensor, "*layer head pos"]
    all_squares: Float[Tensor, "*layer head pos"]
    elsewhere: Float[Tensor, "*layer head position"]


def lags_and_queries(repeated: RepeatedTokens) -> dict[str, tuple[int, int]]:
    """kind -> its lag and the first query that is scored."""
    n = repeated.n_repeated
    return {
        "prefix_matching": (n - 1, repeated.second),
        "previous_token": (1, 1),
        "duplicate_token": (n, repeated.second),
        "current_token": (0, 1),
    }


def pattern_scores(pattern: Float[Tensor, "batch head query key"], repeated: RepeatedTokens, taps: ShiftTaps) -> PatternScores:
    """Reduce one layer's pattern to its scores, means over the batch.

    Args:
        pattern: ``hook_pattern`` on ``repeated.tokens``.
        repeated: the text.
        taps: the shift coefficients as used.
    """
    effective = value_side_pattern(pattern, taps)
    rows: list[tuple[Tensor, ...]] = []
    for lag, first in lags_and_queries(repeated).values():
        value = at_lag(effective, lag)
        at = torch.stack([at_lag(pattern, lag - s).mean(dim=0).to(taps.k.dtype) for s in range(taps.k.shape[1])])
        of_head = value.mean(dim=0)
        means = [x[:, first:].mean(dim=1) for x in (at[0], of_head, torch.einsum("shq,hs->hq", at, taps.k))]
        rows.append((*means, of_head, value.square().mean(dim=0)))
    all_read, all_squares = (x.sum(dim=-1).mean(dim=0) for x in (effective.abs(), effective.square()))
    raw, value_side, key_side, read, squares = (torch.stack(column) for column in zip(*rows, strict=True))
    elsewhere = _elsewhere(effective, repeated)
    return PatternScores(raw, value_side, key_side, read, squares, all_read, all_squares, elsewhere)


def value_side_pattern(
    pattern: Float[Tensor, "batch head query key"], taps: ShiftTaps
) -> Float[Tensor, "batch head query token"]:
    """How much of each token's own value is read: sum_s beta_s A[i, t + s]."""
    effective = pattern.to(taps.v.dtype) * taps.v[:, :1, None]
    for lag in range(1, taps.v.shape[1]):
        effective[..., :-lag] += pattern[..., lag:] * taps.v[:, lag, None, None]
    return effective


def at_lag(pattern: Float[Tensor, "batch head query key"], lag: int) -> Float[Tensor, "batch head query"]:
    """A[i, i - lag] of every query i; 0 before the text or ahead of i."""
    if not 0 <= lag < pattern.shape[-1]:
        return pattern.new_zeros(pattern.shape[:-1])
    diagonal = pattern.diagonal(offset=-lag, dim1=-2, dim2=-1)  # its entry t belongs to query t + lag
    return torch.nn.functional.pad(diagonal, (lag, 0))


def _elsewhere(effective: Tensor, repeated: RepeatedTokens) -> Float[Tensor, "head position"]:
    """Mean \\|E\\| on the first copy, away from the token's own position there; 0 if no position is far enough away."""
    n, second = repeated.n_repeated, repeated.second
    position = torch.arange(n, device=effective.device)
    far = ((position[:, None] - position).abs() > NEAR).to(effective.dtype)
    first_copy = effective[:, :, second:, second - n : second].abs().mean(dim=0)
    return (first_copy * far).sum(dim=-1) / far.sum(dim=-1).clamp(min=1)
