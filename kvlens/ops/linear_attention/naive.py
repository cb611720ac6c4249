"""Linear attention, the obvious form: token by token, one line per equation. In float64 it is the reference."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState, check_normalizer
from kvlens.ops.rotary.naive import naive_rotate


def naive_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """The recurrence itself (ICLCA eq. 12-13; arguments in :mod:`kvlens.ops.linear_attention.types`)."""
    check_normalizer(norm_q, norm_k)
    batch, pos, n_heads, d_phi = phi_q.shape
    n_kv, d_head = v.shape[2:]
    group = n_heads // n_kv
    gamma = v.new_ones(n_kv) if decay is None else decay.to(v)
    A = v.new_zeros(batch, n_kv, d_phi, d_head) if state is None else state.kv.expand(batch, -1, -1, -1)
    D = v.new_zeros(batch, n_kv, d_phi) if state is None or state.k_sum is None else state.k_sum.expand(batch, -1, -1)
    numerators, normalizers = [], []
    for i in range(pos):
        real = torch.ones(batch, dtype=torch.bool, device=v.device) if mask is None else mask[:, i]
        A_next = gamma[:, None, None] * A + phi_k[:, i, :, :, None] * v[:, i, :, None, :]
        A = torch.where(real[:, None, None, None], A_next, A)
        numerators.append(torch.einsum("bhf,bhfd->bhd", phi_q[:, i], A.repeat_interleave(group, dim=1)))
        if norm_q is not None and norm_k is not None:
            D = torch.where(real[:, None, None], D + norm_k[:, i], D)
            normalizers.append(torch.einsum("bhf,bhf->bh", norm_q[:, i], D.repeat_interleave(group, dim=1)))
    return LinearAttentionOutput(
        torch.stack(numerators, dim=1) if pos else v.new_zeros(batch, 0, n_heads, d_head),
        None if norm_k is None else torch.stack(normalizers, dim=1) if pos else v.new_zeros(batch, 0, n_heads),
        LinearAttentionState(A, D if norm_k is not None else None),
    )


def naive_carry_state(
    before: LinearAttentionState,
    n_tokens: int,
    decay: Float[Tensor, " head"] | None = None,
    frequencies: Float[Tensor, " pairs"] | None = None,
    adjacent_pairs: bool = False,
) -> LinearAttentionState:
    """The state after tokens that write nothing: each decays A once and moves its origin by one position (ICLCA eq. 23)."""
    kv = before.kv
    for _ in range(n_tokens):
        kv = kv if decay is None else decay[:, None, None] * kv
        if frequencies is not None:
            kv = naive_rotate(kv.transpose(-1, -2), -1, frequencies, adjacent_pairs).transpose(-1, -2)
    return LinearAttentionState(kv, before.k_sum)
