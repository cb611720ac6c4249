"""Softmax attention over a context and over stored features, put together in log space (DESIGN 1.4, after ICLAA).

    z = (n_ctx z_ctx + phi(q).b_KV) / (n_ctx + phi(q).b_D)          n_ctx = exp(log_n), phi(q) = features exp(log_scale)

Scores of real models reach +-100 and more: everything is taken relative to the larger of the two sides, per query, so that
neither overflows, and the smaller one underflows only where it counts for nothing.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.softmax_features.types import LogFeatures


class Merged(NamedTuple):
    """The two summands of z, both already divided by the common normaliser, and the logarithm of its absolute value."""

    z_context: Float[Tensor, "batch pos head d_head"]
    z_bias: Float[Tensor, "batch pos head d_head"]
    log_normalizer: Float[Tensor, "batch pos head"]


def merge_features(
    z_context: Float[Tensor, "batch pos head d_head"],
    log_n: Float[Tensor, "batch pos head"],
    phi: LogFeatures,
    b_kv: Float[Tensor, "#batch some_head d_phi d_head"],
    b_d: Float[Tensor, "#batch some_head d_phi"],
) -> Merged:
    """Add stored features to the attention over the context.

    Args:
        z_context: the context's attention, normalised by itself.
        log_n: the logarithm of the context's normaliser.
        phi: features of the queries.
        b_kv, b_d: per query head or per key-value head.

    Returns:
        The two summands of z and log |n|. With signed weights n may be 0 or negative: the result is then finite and means
        nothing.
    """
    with torch.no_grad():
        size = _read(phi.features.abs(), (b_d.abs() + b_kv.abs().amax(dim=-1))[..., None])
        log_bias = phi.log_scale + size.log()
        top = torch.maximum(log_n[..., None], log_bias)
        none = size == 0
    context = (log_n[..., None] - top).exp()
    bias = (phi.log_scale - top).masked_fill(none, -torch.inf).exp()
    total = context + bias * _read(phi.features, b_d[..., None])
    tiny = torch.finfo(total.dtype).tiny
    total = torch.where(total.abs() < tiny, tiny, total)
    z_bias = bias * _read(phi.features, b_kv) / total
    return Merged(z_context * (context / total), z_bias, (top + total.abs().log()).squeeze(-1))


def _read(features: Tensor, stored: Tensor) -> Tensor:
    """features [batch, pos, head, r] times stored [batch or 1, head or kv_head, r, d]."""
    grouped = rearrange(features, "b p (g s) r -> b g (p s) r", g=stored.shape[1])
    return rearrange(grouped @ stored, "b g (p s) d -> b p (g s) d", p=features.shape[1])
