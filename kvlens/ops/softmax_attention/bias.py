"""A KV bias joined to softmax attention in log space (ICLCA sec. 5, ICLAA; the plain equation is ``naive_join_bias``).

    z_i = (sum_j exp(s_ij) v_j + phi(q_i)^T b_KV) / n_i        n_i = sum_j exp(s_ij) + phi(q_i)^T b_D

Each side comes with its own logarithmic scale, and both are brought to the larger one before they are added, so that scores
above 100 neither overflow nor wipe out the other side. Scales are first subtracted from each other, which is exact between
numbers of similar size; adding a small logarithm to a scale of 1,000 directly would be off by 6e-5 in float32.
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.softmax_attention.grouped import by_kv_head
from kvlens.ops.softmax_attention.types import JoinedBias, ScaledFeatures, ScaledMass


def naive_join_bias(
    z_context: Float[Tensor, "batch query head d_head"],
    log_normalizer: Float[Tensor, "batch query head"],
    phi: ScaledFeatures,
    b_kv: Float[Tensor, "#batch kv_head d_phi d_head"],
    b_d: Float[Tensor, "#batch kv_head d_phi"],
) -> JoinedBias:
    """The equation as written, head by head; overflows where exp(s) does."""
    n_heads = z_context.shape[2]
    group = n_heads // b_kv.shape[1]
    contexts, reads, logs = [], [], []
    for h in range(n_heads):
        kv, d = b_kv[:, h // group], b_d[:, h // group]
        true_phi = phi.features[:, :, h] * phi.log_scale[:, :, h, None].exp()
        n_context = log_normalizer[:, :, h].exp()
        n = n_context + torch.einsum("bir,br->bi", true_phi, d.expand(len(true_phi), -1))
        contexts.append(n_context[..., None] * z_context[:, :, h] / n[..., None])
        reads.append(torch.einsum("bir,brd->bid", true_phi, kv.expand(len(true_phi), -1, -1)) / n[..., None])
        logs.append(n.log())
    return JoinedBias(torch.stack(contexts, 2), torch.stack(reads, 2), torch.stack(logs, 2))


def join_bias(
    z_context: Float[Tensor, "batch query head d_z"],
    normalizer: ScaledMass,
    phi: ScaledFeatures,
    b_kv: Float[Tensor, "#batch kv_head d_phi d_head"],
    b_d: Float[Tensor, "#batch kv_head d_phi"],
) -> JoinedBias:
    """The same, with both sides brought to the larger of their scales (including the size of b_KV and b_D).

    Args:
        z_context: attention over the context alone, already divided by its own normalizer.
        normalizer: the context's normalizer; its log_scale is -inf where a query sees no key.
        phi: the query's features.
        b_kv, b_d: the bias, one per key-value head.

    Returns:
        Both summands of z, divided by the whole normalizer, and the logarithm of that normalizer. Where nothing is visible
        (both sides are 0, as at a padded query without a bias), z is 0. Signed weights may make the normalizer negative; its
        logarithm is then NaN, which the caller has to report.
    """
    group = z_context.shape[2] // b_kv.shape[1]
    n_biases = max(len(b_kv), len(b_d))  # a hook may have expanded one of them to a batch
    stored = torch.cat([b_kv.expand(n_biases, -1, -1, -1), b_d[..., None].expand(n_biases, -1, -1, -1)], dim=-1)
    size = torch.linalg.vector_norm(stored.detach(), ord=torch.inf, dim=(-1, -2))
    numerator, mass = _read(phi.features, stored / torch.where(size == 0, 1.0, size)[..., None, None], group)
    log_size = size.log().repeat_interleave(group, dim=1)[:, None]
    top = torch.maximum(normalizer.log_scale, phi.log_scale + log_size)
    top = torch.where(top == -torch.inf, 0.0, top)
    from_context = (normalizer.log_scale - top).exp() * normalizer.mass
    from_bias = (phi.log_scale - top + log_size).exp()
    n = from_context + from_bias * mass
    nothing = n.abs() < torch.finfo(n.dtype).tiny  # 1 / n would overflow
    share = 1 / torch.where(nothing, 1.0, n)
    return JoinedBias(
        (from_context * share)[..., None] * z_context,
        (from_bias * share)[..., None] * numerator,
        torch.where(nothing, -torch.inf, torch.where(nothing, 1.0, n).log() + top),
    )


def _read(features: Tensor, stored: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """phi^T b_KV and phi^T b_D in one product per key-value head: the queries of a group become rows of one matrix."""
    rows = by_kv_head(features, stored)
    read = rearrange(rows, "batch kv_head (query group) d -> batch query (kv_head group) d", group=group)
    return read[..., :-1], read[..., -1]
