"""Linear attention, the chunked form: O(pos) time and memory, all of it in matrix products.

Cut the text into chunks of C tokens. Within a chunk the scores are C x C; across chunks only the state travels:

    numerator = tril(Q K^T) V  +  Q A_before         A_after = A_before + K^T V

(with gamma^distance on each term where there is decay). The state before each chunk is a cumulative sum over chunks, or,
with decay, a short loop over them. Backward is autograd through the same products, O(pos) too.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.state import without_padding
from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState

CHUNK_SIZE = 128


def chunked_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
    state: LinearAttentionState | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> LinearAttentionOutput:
    """Chunk by chunk, all chunks at once (arguments in ``types``; ``chunk_size`` changes speed, not the result)."""
    pos, size = phi_q.shape[1], max(1, min(chunk_size, phi_q.shape[1]))
    same_features = norm_q is phi_q and norm_k is phi_k
    if mask is not None:
        phi_k, v = without_padding(phi_k, mask), without_padding(v, mask)
        if norm_k is not None:
            norm_k = phi_k if same_features else without_padding(norm_k, mask)
    if pos % size:
        missing = size - pos % size
        phi_q, phi_k, v = (_pad_end(x, missing) for x in (phi_q, phi_k, v))
        if norm_q is not None and norm_k is not None:
            norm_q, norm_k = (phi_q, phi_k) if same_features else (_pad_end(norm_q, missing), _pad_end(norm_k, missing))
        if mask is None and decay is not None:
            mask = torch.ones(1, pos, dtype=torch.bool, device=v.device)
        mask = mask if mask is None else torch.nn.functional.pad(mask, (0, missing))

    numerator, kv = _numerator(phi_q, phi_k, v, decay, mask, None if state is None else state.kv, size)
    normalizer = k_sum = None
    if norm_q is not None and norm_k is not None:
        normalizer, k_sum = _normalizer(norm_q, norm_k, None if state is None else state.k_sum, size)
        normalizer = normalizer[:, :pos]
    return LinearAttentionOutput(numerator[:, :pos], normalizer, LinearAttentionState(kv, k_sum))


def _numerator(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, decay: Tensor | None, mask: Tensor | None, before: Tensor | None, size: int
) -> tuple[Tensor, Tensor]:
    batch, pos, n_heads, d_phi = phi_q.shape
    n_kv, d_head = v.shape[2:]
    n_chunks, group = pos // size, n_heads // n_kv
    # b (c t) (k g) f -> b k c (g t) f: a group's queries are more rows against the same keys
    q = phi_q.reshape(batch, n_chunks, size, n_kv, group, d_phi).permute(0, 3, 1, 4, 2, 5).flatten(3, 4)
    k = phi_k.reshape(batch, n_chunks, size, n_kv, d_phi).permute(0, 3, 1, 2, 4)
    values = v.reshape(batch, n_chunks, size, n_kv, d_head).permute(0, 3, 1, 2, 4)

    weight = _causal_weight(decay, mask, n_chunks, size, group, q)
    scores = q @ k.transpose(-1, -2) * weight.within
    added = (k if weight.key is None else k * weight.key).transpose(-1, -2) @ values  # b k c f d
    held = before.to(v) if before is not None else v.new_zeros(batch, n_kv, d_phi, d_head)
    states = _states_before(held, added, weight.chunk)
    read = (q if weight.query is None else q * weight.query) @ states[:, :, :-1]
    numerator = (scores @ values + read).unflatten(3, (group, size))
    return numerator.permute(0, 2, 4, 1, 3, 5).reshape(batch, pos, n_heads, d_head), states[:, :, -1]


def _states_before(held: Tensor, added: Tensor, chunk_weight: Tensor | None) -> Tensor:
    """The state before each chunk, and after the last: [batch, kv_head, chunk + 1, d_phi, d_head]."""
    states = [held]
    for c, new in enumerate(added.unbind(dim=2)):  # on a CPU 15 times faster than cumsum along a middle axis
        kept = states[-1] if chunk_weight is None else states[-1] * chunk_weight[:, :, c]
        states.append(kept + new)
    return torch.stack(states, dim=2)


class _Weights:
    """Powers of gamma within a chunk; all None but the causal triangle where there is no decay."""

    def __init__(self, within: Tensor, query: Tensor | None, key: Tensor | None, chunk: Tensor | None):
        self.within, self.query, self.key, self.chunk = within, query, key, chunk


def _causal_weight(decay: Tensor | None, mask: Tensor | None, n_chunks: int, size: int, group: int, like: Tensor) -> _Weights:
    triangle = torch.ones(size, size, device=like.device, dtype=like.dtype).tril()
    if decay is None:
        return _Weights(triangle.repeat(group, 1), None, None, None)
    real = torch.ones(1, n_chunks * size, device=like.device) if mask is None else mask
    steps = real.reshape(-1, 1, n_chunks, size).cumsum(dim=-1).to(like)  # real tokens so far in the chunk
    gamma = decay.to(like)[None, :, None, None]
    within = gamma[..., None] ** (steps[..., :, None] - steps[..., None, :]).clamp(min=0) * triangle
    return _Weights(
        within.repeat(1, 1, 1, group, 1),
        (gamma**steps).repeat(1, 1, 1, group)[..., None],
        (gamma ** (steps[..., -1:] - steps))[..., None],
        (gamma ** steps[..., -1:])[..., None],
    )


def _normalizer(norm_q: Tensor, norm_k: Tensor, before: Tensor | None, size: int) -> tuple[Tensor, Tensor]:
    """phi(q_i).D_i: the cumulative sum within each chunk is a product with a triangle of ones, in the layout as it comes."""
    batch, pos, n_kv, d_phi = norm_k.shape
    n_chunks = pos // size
    triangle = torch.ones(size, size, device=norm_k.device, dtype=norm_k.dtype).tril()
    within = triangle @ norm_k.reshape(batch, n_chunks, size, n_kv * d_phi)
    first = norm_k.new_zeros(batch, 1, n_kv * d_phi) if before is None else before.to(norm_k).reshape(batch, 1, -1)
    sums = torch.cat([first, within[:, :, -1]], dim=1).cumsum(dim=1)
    running = (within + sums[:, :-1, None]).reshape(batch, pos, n_kv, 1, d_phi)
    normalizer = (norm_q.unflatten(2, (n_kv, -1)) * running).sum(-1).flatten(2, 3)
    return normalizer, sums[:, -1].reshape(batch, n_kv, d_phi)


def _pad_end(x: Tensor, missing: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
