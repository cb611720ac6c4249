"""Linear attention, the parallel form: the causal pos x pos scores are formed explicitly, as in softmax attention.

Its steps are public because the hooked component puts hook points between them.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.state import read_state, real_steps, without_padding
from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState, check_normalizer


def causal_scores(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch key_pos kv_head d_phi"],
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch key_pos"] | None = None,
) -> Float[Tensor, "batch head pos key_pos"]:
    """phi~(q_i).phi~(k_j) gamma^{i-j}, 0 where j > i or token j is padding; the queries are the last ``pos`` tokens."""
    group, past = phi_q.shape[2] // phi_k.shape[2], phi_k.shape[1] - phi_q.shape[1]
    k = phi_k.repeat_interleave(group, dim=2) if group > 1 else phi_k
    scores = (phi_q.transpose(1, 2) @ k.permute(0, 2, 3, 1)).tril_(past)
    if decay is not None:
        steps = real_steps(mask, phi_k)
        distance = (steps[:, past:, None] - steps[:, None, :]).clamp(min=0).to(scores)
        scores = scores * decay.repeat_interleave(group).to(scores)[:, None, None] ** distance[:, None]
    return scores if mask is None else scores.masked_fill(~mask[:, None, None, :], 0.0)


def running_normalizer(
    norm_q: Float[Tensor, "batch pos head d_phi"],
    norm_k: Float[Tensor, "batch pos kv_head d_phi"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    k_sum: Float[Tensor, "batch kv_head d_phi"] | None = None,
) -> Float[Tensor, "batch pos head"]:
    """phi(q_i)^T (k_sum + sum_{j <= i} phi(k_j))."""
    if mask is not None:
        norm_k = without_padding(norm_k, mask)
    running = norm_k.cumsum(dim=1)
    if k_sum is not None:
        running = running + k_sum[:, None]
    group = norm_q.shape[2] // norm_k.shape[2]
    return (norm_q * (running.repeat_interleave(group, dim=2) if group > 1 else running)).sum(-1)


def final_state(
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    state: LinearAttentionState | None = None,
) -> LinearAttentionState:
    """A and D after the last real token, in one product over all tokens."""
    if mask is not None:
        phi_k, v = without_padding(phi_k, mask), without_padding(v, mask)
        norm_k = None if norm_k is None else without_padding(norm_k, mask)
    steps = real_steps(mask, phi_k)
    total = steps.new_full((1, 1), phi_k.shape[1]) if mask is None else mask.sum(dim=1, keepdim=True)
    if decay is not None:
        remaining = (total - steps).to(phi_k)
        phi_k = phi_k * (decay.to(phi_k) ** remaining[:, :, None])[..., None]
    kv = phi_k.permute(0, 2, 3, 1) @ v.transpose(1, 2)
    k_sum = None if norm_k is None else norm_k.sum(dim=1)
    if state is not None:
        before = state.kv
        if decay is not None:
            before = before * (decay.to(before) ** total.to(before))[:, :, None, None]
        kv = kv + before
        k_sum = k_sum if k_sum is None or state.k_sum is None else k_sum + state.k_sum
    return LinearAttentionState(kv, k_sum)


def parallel_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """All tokens at once through the pos x pos scores: O(pos^2) memory (arguments in ``types``)."""
    check_normalizer(norm_q, norm_k)
    group = phi_q.shape[2] // v.shape[2]
    scores = causal_scores(phi_q, phi_k, decay, mask)
    v = v if mask is None else without_padding(v, mask)
    values = v.repeat_interleave(group, dim=2).transpose(1, 2)
    numerator = (scores @ values).transpose(1, 2)
    if state is not None:
        numerator = numerator + read_state(phi_q, state.kv, decay, real_steps(mask, phi_q))
    normalizer = None
    if norm_q is not None and norm_k is not None:
        normalizer = running_normalizer(norm_q, norm_k, mask, None if state is None else state.k_sum)
    return LinearAttentionOutput(numerator, normalizer, final_state(phi_k, v, norm_k, decay, mask, state))
