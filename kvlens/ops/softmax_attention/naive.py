"""Softmax attention, the obvious form: query by query, one line per equation. In float64 it is the reference."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.softmax_attention.types import SoftmaxAttentionOutput


def naive_softmax_attention(
    q: Float[Tensor, "batch query head d_head"],
    k: Float[Tensor, "batch key kv_head d_head"],
    v: Float[Tensor, "batch key kv_head d_head"],
    scale: float,
    causal: bool = True,
    padding: Bool[Tensor, "batch key"] | None = None,
    window: int | None = None,
    score_bias: Float[Tensor, "#batch #head query key"] | None = None,
    log_normalizer: bool = False,
) -> SoftmaxAttentionOutput:
    """Score, mask, normalize, read (arguments in :mod:`kvlens.ops.softmax_attention.types`)."""
    n_queries, n_keys, group = q.shape[1], k.shape[1], q.shape[2] // k.shape[2]
    rows, logs = [], []
    for i in range(n_queries):
        place = n_keys - n_queries + i
        score = torch.einsum("bhd,bjhd->bhj", q[:, i], k.repeat_interleave(group, dim=2)) / scale
        if score_bias is not None:
            score = score + score_bias[:, :, i]
        for j in range(n_keys):
            if (causal and j > place) or (window is not None and j <= place - window):
                score[:, :, j] = -torch.inf
        if padding is not None:
            score = score.masked_fill(~padding[:, None, :], -torch.inf)
        log_n = score.logsumexp(dim=-1)
        weight = torch.where(log_n[..., None] == -torch.inf, 0.0, (score - log_n[..., None]).exp())
        rows.append(torch.einsum("bhj,bjhd->bhd", weight, v.repeat_interleave(group, dim=2)))
        logs.append(log_n)
    return SoftmaxAttentionOutput(torch.stack(rows, dim=1), torch.stack(logs, dim=1) if log_normalizer else None)
