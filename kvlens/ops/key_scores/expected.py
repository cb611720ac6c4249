"""The attention that keys are expected to receive from queries that are normally distributed (Devoto et al. 2025)."""

import torch
from jaxtyping import Float
from torch import Tensor


def expected_log_attention(
    q: Float[Tensor, "batch query head d_head"],
    counts: Float[Tensor, "batch query"],
    keys: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
) -> Float[Tensor, "batch head key"]:
    """log E exp(q.k / scale) = mu.k / scale + k^T Sigma k / (2 scale^2) for q ~ N(mu, Sigma).

    mu and Sigma are the mean and covariance of the rows of ``q``, each counted ``counts`` times (0 leaves it out).
    """
    by_head = keys.repeat_interleave(q.shape[2] // keys.shape[1], dim=1)
    share = (counts / counts.sum(dim=1, keepdim=True))[:, :, None, None]
    mean = (share * q).sum(dim=1, keepdim=True)
    centered = share.sqrt() * (q - mean)
    covariance = torch.einsum("bihd,bihe->bhde", centered, centered)
    variance = ((by_head @ covariance) * by_head).sum(dim=-1)
    return torch.einsum("bihd,bhjd->bhj", mean, by_head) / scale + variance / (2 * scale**2)
