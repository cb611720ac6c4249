"""Negative samples: the lowest-scored of the tokens that a query sees (DUAL eq. 15, 34; the remark in sec. 5).

    per query:  z_i = sum_j (p_ij - (beta / k_i) [j in N_i]) v_j            = z_i - beta mean_{N_i} v
    per label:  z_i = sum_j p_ij (v_j - beta mean_{N_j} v)

The equations use one set per label, the remark in sec. 5 one per query; the results differ (by about half of the output on
random heads). No gradient flows through the choice of the set, only through the values in it.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Negatives(NamedTuple):
    """The set N_i of negatives of every query.

    Attributes:
        tokens: the tokens, lowest score first.
        share: 1 / k_i where the token belongs to N_i, 0 in the columns left over when the query sees fewer tokens.
    """

    tokens: Int[Tensor, "batch head pos most"]
    share: Float[Tensor, "batch head pos most"]


@torch.no_grad()
def lowest_scored(
    scores: Float[Tensor, "batch head pos key_pos"], visible: Bool[Tensor, "#batch #head pos key_pos"], k: int | float
) -> Negatives:
    """The k lowest-scored tokens among those that each query sees; all of them if there are fewer than k.

    Args:
        scores: scores before the softmax, or phi~(q).phi~(k).
        visible: True where a query sees a key.
        k: a count, or a fraction of the visible tokens (rounded up).
    """
    n_visible = visible.sum(dim=-1, keepdim=True)  # [.., pos, 1]
    wanted = n_visible.clamp(max=k) if isinstance(k, int) else (k * n_visible.double()).ceil().long()
    most = min(k, scores.shape[-1]) if isinstance(k, int) else math.ceil(k * scores.shape[-1])
    lowest = scores.masked_fill(~visible, float("inf")).topk(most, dim=-1, largest=False, sorted=True)
    inside = torch.arange(most, device=scores.device) < wanted
    share = inside.to(scores.dtype) / wanted.clamp(min=1).to(scores.dtype)
    return Negatives(lowest.indices, share.expand_as(lowest.indices))


def mean_of_negatives(
    v: Float[Tensor, "batch head key_pos d_head"], negatives: Negatives
) -> Float[Tensor, "batch head pos d_head"]:
    """mean_{N_i} v for every query; 0 for a query that sees nothing."""
    batch, head, pos, _ = negatives.tokens.shape
    weights = v.new_zeros(batch, head, pos, v.shape[2])
    return weights.scatter_(-1, negatives.tokens, negatives.share.to(v.dtype)) @ v
