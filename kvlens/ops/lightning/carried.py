"""What lightning attention carries across a span of tokens: powers of the decay, counted over real tokens."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.state import real_steps, without_padding


def carried_queries(
    q: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = a^{i+1} q_i: what a query reads from the state before the first token."""
    q = q if mask is None else without_padding(q, mask)
    return q * _power(real_steps(mask, q), log_decay, q)[..., None]


def carried_keys(
    k: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = a^{M-1-j} k_j: sum_j kbar_j v_j^T is what the tokens write."""
    k = k if mask is None else without_padding(k, mask)
    steps = real_steps(mask, k)
    return k * _power(steps[:, -1:] - steps, log_decay, k)[..., None]


def state_map(
    k: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head d_k d_k"]:
    """P = a^M I: what remains of a state after M real tokens."""
    batch, pos, n_heads, d_k = k.shape
    steps = real_steps(mask, k)[:, -1:] if pos else torch.zeros(1, 1, dtype=torch.long, device=k.device)
    kept = _power(steps, log_decay, k)[:, 0, :, None, None]
    return (kept * torch.eye(d_k, dtype=k.dtype, device=k.device)).expand(batch, n_heads, d_k, d_k)


def effective_attention(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij = a^{i-j} q_i.k_j for j <= i: z_i = sum_j A_ij v_j, exactly, if there is no earlier state."""
    if mask is not None:
        q, k = without_padding(q, mask), without_padding(k, mask)
    steps = real_steps(mask, q)
    distance = (steps[:, :, None] - steps[:, None, :]).clamp(min=0)
    weight = _power(distance.flatten(1), log_decay, q).unflatten(1, distance.shape[1:]).movedim(-1, 1)
    return (torch.einsum("bihk,bjhk->bhij", q, k) * weight).tril()


def _power(steps: Tensor, log_decay: Tensor, like: Tensor) -> Tensor:
    """a^steps [batch or 1, pos, head]."""
    return (log_decay.double().exp() ** steps[..., None]).to(like)  # and not exp(0 * -inf), which is NaN
