"""What the recurrence carries over a sequence: sums of log-decays, over real tokens."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.delta_rule.types import LOWEST_LOG_DECAY


def carried_queries(
    q: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = e^{G_i} q_i: what a query reads of the state before the first token."""
    summed = summed_decay(log_decay, mask)
    q = by_head(q, log_decay.shape[2])
    q = q if mask is None else q * mask[..., None, None]
    return q * summed.exp()[..., None].to(q)


def carried_keys(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = e^{G_{M-1} - G_j} b_j k_j: sum_j kbar_j v_j^T is what the tokens write."""
    summed = summed_decay(log_decay, mask)
    write = write_strength if mask is None else write_strength * mask[..., None]
    return by_head(k, log_decay.shape[2]) * ((summed[:, -1:] - summed).exp().to(k) * write)[..., None]


def state_map(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head d_k d_k"]:
    """P = e^{G_{M-1}} I: what the tokens leave of a state before them."""
    kept = summed_decay(log_decay, mask)[:, -1].exp() if k.shape[1] else log_decay.new_ones(k.shape[0], log_decay.shape[2])
    return kept[..., None, None].to(k) * torch.eye(k.shape[3], dtype=k.dtype, device=k.device)


def effective_attention(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij = e^{G_i - G_j} b_j q_i.k_j for j <= i: z_i = sum_j A_ij v_j, exactly, where no state stands before."""
    n_heads = log_decay.shape[2]
    summed = summed_decay(log_decay, mask).transpose(1, 2)
    kept = (summed[..., :, None] - summed[..., None, :]).tril().exp().tril()  # above the diagonal e^{...} could overflow
    scores = torch.einsum("bihk,bjhk->bhij", by_head(q, n_heads), by_head(k, n_heads))
    write = write_strength if mask is None else write_strength * mask[..., None]
    pattern = scores * kept.to(q) * write.transpose(1, 2)[:, :, None]
    return pattern if mask is None else pattern * mask[:, None, :, None]


def summed_decay(
    log_decay: Float[Tensor, "batch pos head"], mask: Bool[Tensor, "#batch pos"] | None
) -> Float[Tensor, "batch pos head"]:
    """G: log-decays summed up to each token, its own included; padded positions have none. In float64, where a step below
    ``LOWEST_LOG_DECAY`` counts as that: differences of sums that are -inf would be NaN."""
    real = log_decay if mask is None else log_decay.masked_fill(~mask[..., None], 0.0)
    return real.double().clamp(min=LOWEST_LOG_DECAY).cumsum(dim=1)


def by_head(x: Float[Tensor, "batch pos key_head d_k"], n_heads: int) -> Float[Tensor, "batch pos head d_k"]:
    """Keys or queries of groups as those of their heads."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)
