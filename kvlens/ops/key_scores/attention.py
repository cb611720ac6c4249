"""The attention that keys receive from the prompt's own queries, summed over queries, a block of queries at a time."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.memory import BLOCK_NUMBERS
from kvlens.ops.softmax_features import ScoreRule
from kvlens.ops.softmax_features.virtual_keys import virtual_key_scores


def attention_received(
    q: Float[Tensor, "batch query head d_head"],
    query_distance: Int[Tensor, "batch query"],
    counts: Float[Tensor, "batch query"],
    keys: Float[Tensor, "batch kv_head key d_head"],
    distance: Int[Tensor, "batch kv_head key"],
    weight: Float[Tensor, "batch kv_head key"],
    rule: ScoreRule,
    sink: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head key"]:
    """sum_i counts_i w_j exp(s_ij) / (sum_l w_l exp(s_il) + exp(sink)), over the keys that query i sees.

    Args:
        q, keys: as the model scores them.
        query_distance, distance: how many positions each token lies before the text, 1 for the prompt's last token. A query
            sees the keys whose distance is at least its own.
        counts: how often each query counts; 0 leaves it out, as for padding.
        weight: weight of each key, 0 where there is no key.
        sink: log-score of an attention sink that every query sees in addition (GPT-OSS).
    """
    heads, group = q.shape[2], q.shape[2] // keys.shape[1]
    received = q.new_zeros(q.shape[0], heads, keys.shape[2])
    far, used = (x.repeat_interleave(group, dim=1)[:, None] for x in (distance, weight))
    size = max(1, BLOCK_NUMBERS // received.numel())
    for first in range(0, q.shape[1], size):
        some = slice(first, first + size)
        if not bool(counts[:, some].any()):
            continue
        near = query_distance[:, some]
        scores = virtual_key_scores(q[:, some], keys, rule, distance, -near)
        scores = scores.masked_fill((far < near[:, :, None, None]) | (used == 0), -torch.inf)
        largest = scores.amax(dim=-1, keepdim=True)
        if sink is not None:
            largest = torch.maximum(largest, sink[:, None].to(largest))
        largest = torch.where(largest.isfinite(), largest, 0.0)
        parts = used * (scores - largest).exp()
        whole = parts.sum(dim=-1, keepdim=True)
        if sink is not None:
            whole = whole + (sink[:, None] - largest).exp()
        pattern = torch.where(whole == 0, 0.0, parts / whole)
        received += torch.einsum("bi,bihj->bhj", counts[:, some], pattern)
    return received
