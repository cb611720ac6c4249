"""Where a head looks on repeated tokens, as numbers: mean attention at the lags that name a kind of head.

On a text of N tokens said twice (:mod:`analyses.heads.repeated_tokens`) four kinds of head attend at one lag each:

    ================ ================ ===============================
    kind             query i looks at mean over
    ================ ================ ===============================
    prefix_matching  i - N + 1        the N places of the second copy
    previous_token   i - 1            all places but the first
    duplicate_token  i - N            the N places of the second copy
    current_token    i                all places but the first
    ================ ================ ===============================

With a KV shift the raw pattern A says at which *shifted* row a head looks, which is a mixture of tokens. Two more views say
which tokens these are: the value-side pattern A (beta_1 I + beta_2 Shift), what is read, and the key-side pattern
A (alpha_1 I + alpha_2 Shift), whose keys drew the attention. At (i, t) the first is sum_s beta_s A[i, t + s], for any window:
a score of it is a sum of means at neighbouring lags, so no effective pattern is ever built.

For linear attention A is the implied pattern phi~(q).phi~(k) gamma^{i-j} / n_i, which may be negative and need not sum to 1.

``detect_head`` of TransformerLens divides by all attention, here by that of the scored queries: on one sequence of n places
without repeated tokens inside a copy its default measure is N/n, (n - 1)/n, N/n times these scores where rows sum to 1.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from analyses.heads.repeated_tokens import RepeatedTokens
from analyses.heads.shift_roles import ShiftTaps

KINDS = ("prefix_matching", "previous_token", "duplicate_token", "current_token")


class PatternScores(NamedTuple):
    """Scores of heads, of one layer or of all, in the order of :data:`KINDS`, and the same place by place.

    ``mass`` is the mean sum of absolute attention of the scored queries: 1 for softmax. Place by place, a query whose lag
    reaches before the text has the value 0.
    """

    raw: Float[Tensor, "*layer kind head"]
    value_side: Float[Tensor, "*layer kind head"]
    key_side: Float[Tensor, "*layer kind head"]
    mass: Float[Tensor, "*layer kind head"]
    value_by_place: Float[Tensor, "*layer kind head pos"]
    mass_by_place: Float[Tensor, "*layer head pos"]


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
    mass = pattern.abs().sum(dim=-1).mean(dim=0).to(taps.v.dtype)  # [head, query]
    rows: list[tuple[Tensor, ...]] = []
    for lag, first in lags_and_queries(repeated).values():
        at = torch.stack([_at_lag(pattern, lag - s) for s in range(taps.v.shape[1])], dim=-1).to(taps.v.dtype)
        value = torch.einsum("hqs,hs->hq", at, taps.v)
        key = torch.einsum("hqs,hs->hq", at, taps.k)
        means = [x[:, first:].mean(dim=1) for x in (at[..., 0], value, key, mass)]
        rows.append((*means, value))
    raw, value_side, key_side, mean_mass, by_place = (torch.stack(column) for column in zip(*rows, strict=True))
    return PatternScores(raw, value_side, key_side, mean_mass, by_place, mass)


def _at_lag(pattern: Tensor, lag: int) -> Float[Tensor, "head query"]:
    """A[i, i - lag] of every query i, mean over the batch; what lies before the text or ahead of i counts as 0."""
    n_heads, n_queries = pattern.shape[1:3]
    if not 0 <= lag < n_queries:
        return pattern.new_zeros(n_heads, n_queries)
    diagonal = pattern.diagonal(offset=-lag, dim1=-2, dim2=-1).mean(dim=0)  # its entry t belongs to query t + lag
    return torch.nn.functional.pad(diagonal, (lag, 0))
