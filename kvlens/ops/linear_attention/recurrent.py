"""Linear attention, the recurrent form: O(1) memory and time per token, for decoding."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.state import without_padding
from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState, check_normalizer


def recurrent_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """One update and one read per token (arguments in ``types``). States are never changed in place."""
    check_normalizer(norm_q, norm_k)
    batch, pos, n_heads, d_phi = phi_q.shape
    n_kv, d_head = v.shape[2:]
    kv = v.new_zeros(batch, n_kv, d_phi, d_head) if state is None else state.kv.expand(batch, -1, -1, -1)
    k_sum = None
    if norm_k is not None:
        before = None if state is None else state.k_sum
        k_sum = v.new_zeros(batch, n_kv, d_phi) if before is None else before.expand(batch, -1, -1)
    gamma = None if decay is None else decay.to(v)[:, None, None]
    if mask is not None:
        phi_k, v = without_padding(phi_k, mask), without_padding(v, mask)
        norm_k = None if norm_k is None else without_padding(norm_k, mask)

    grouped = (batch, pos, n_kv, n_heads // n_kv, d_phi)  # einops would take a tenth of a decoded token's time here
    phi_q, norm_q = phi_q.reshape(grouped), None if norm_q is None else norm_q.reshape(grouped)
    numerators: list[Tensor] = []
    normalizers: list[Tensor] = []
    for i in range(pos):
        if gamma is not None:
            kept = kv * gamma
            kv = kept if mask is None else torch.where(mask[:, i, None, None, None], kept, kv)
        kv = torch.addcmul(kv, phi_k[:, i].unsqueeze(-1), v[:, i].unsqueeze(-2))
        numerators.append((phi_q[:, i] @ kv).flatten(1, 2))
        if k_sum is not None and norm_q is not None and norm_k is not None:
            k_sum = k_sum + norm_k[:, i]
            normalizers.append((norm_q[:, i] @ k_sum.unsqueeze(-1)).reshape(batch, n_heads))
    return LinearAttentionOutput(
        _along_time(numerators, v.new_zeros(batch, 0, n_heads, d_head)),
        None if norm_k is None else _along_time(normalizers, v.new_zeros(batch, 0, n_heads)),
        LinearAttentionState(kv, k_sum),
    )


def _along_time(steps: list[Tensor], none: Tensor) -> Tensor:
    """One tensor of all steps, in the second axis; ``none`` if there are none. A decoded token is not copied."""
    if len(steps) == 1:
        return steps[0].unsqueeze(1)
    return torch.stack(steps, dim=1) if steps else none
