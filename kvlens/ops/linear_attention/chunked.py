"""Linear attention, the chunked form: O(pos) time and memory, entirely in matrix products.

The text is cut into chunks of C tokens. Within a chunk the scores are C x C; only the state passes from chunk to chunk:

    numerator = tril(Q K^T) V  +  Q A_before         A_after = A_before + K^T V

(with gamma^distance on each term if there is decay). All chunks of a *segment* go through each product together; segments run
in sequence, each starting from the state of the one before. A segment is short enough for its intermediates to stay in the
processor's cache, which on a CPU gains a factor of two. The backward pass is autograd through the same products, also O(pos).
"""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.state import without_padding
from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState, check_normalizer

CHUNK_SIZE = 64
NORMALIZER_CHUNK_SIZE = 16
"""Chunk size of the normalizer: its triangular products all lie within a chunk, so shorter chunks mean less work."""
SEGMENT_ON_CPU, SEGMENT_ELSEWHERE = 512, 16384
"""Tokens per segment: chosen for the cache on a CPU, and for enough parallel work on an accelerator."""


def chunked_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    state: LinearAttentionState | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> LinearAttentionOutput:
    """Segment by segment, all chunks of one at once (arguments in ``types``; ``chunk_size`` changes speed, not the result)."""
    check_normalizer(norm_q, norm_k)
    if mask is not None:
        phi_k, v = without_padding(phi_k, mask), without_padding(v, mask)
        norm_k = None if norm_k is None else without_padding(norm_k, mask)
    batch, n_kv, d_phi, d_head = v.shape[0], v.shape[2], phi_k.shape[3], v.shape[3]
    kv = v.new_zeros(batch, n_kv, d_phi, d_head) if state is None else state.kv.to(v).expand(batch, -1, -1, -1)
    k_sum = None
    if norm_q is not None and norm_k is not None:
        k_sum = (
            v.new_zeros(batch, n_kv, d_phi) if state is None or state.k_sum is None else state.k_sum.to(v).expand(batch, -1, -1)
        )

    numerators: list[Tensor] = []
    normalizers: list[Tensor] = []
    pos, size = v.shape[1], max(1, min(chunk_size, v.shape[1]))
    length = max(size, (SEGMENT_ON_CPU if v.device.type == "cpu" else SEGMENT_ELSEWHERE) // size * size)
    # split rather than slice: the backward pass of each slice would fill a whole tensor with zeros
    parts = [x.split(length, dim=1) for x in (phi_q, phi_k, v)]
    masks = mask.split(length, dim=1) if mask is not None else [None] * len(parts[0])
    for q_part, k_part, v_part, mask_part in zip(*parts, masks, strict=True):
        numerator, kv = _numerator(q_part, k_part, v_part, decay, mask_part, kv, size)
        numerators.append(numerator)
    if norm_q is not None and norm_k is not None and k_sum is not None:
        for q_part, k_part in zip(norm_q.split(length, dim=1), norm_k.split(length, dim=1), strict=True):
            normalizer, k_sum = _normalizer(q_part, k_part, k_sum, min(size, NORMALIZER_CHUNK_SIZE))
            normalizers.append(normalizer)
    together = rearrange(torch.cat(numerators, dim=1), "b c t k g d -> b (c t) (k g) d")[:, :pos]
    divisor = torch.cat(normalizers, dim=1) if normalizers else None
    return LinearAttentionOutput(together, divisor, LinearAttentionState(kv, k_sum))


def _numerator(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, decay: Tensor | None, mask: Tensor | None, before: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """One segment in chunks of ``size``: the numerator [batch, chunk, size, kv_head, group, d_head], and the state after it."""
    batch, pos, n_heads, _ = phi_q.shape
    n_kv = v.shape[2]
    if decay is not None and mask is None and pos % size:
        mask = torch.ones(1, pos, dtype=torch.bool, device=v.device)  # the padding of the last chunk must not decay
    phi_q, phi_k, v = (_pad_end(x, size) for x in (phi_q, phi_k, v))
    n_chunks, group = phi_q.shape[1] // size, n_heads // n_kv
    # a group's queries are more rows against the same keys
    q = rearrange(phi_q, "b (c t) (k g) f -> (b k c) (g t) f", t=size, k=n_kv)
    k, values = (rearrange(x, "b (c t) k f -> (b k c) t f", t=size) for x in (phi_k, v))

    weight = _weights(decay, mask, batch, n_chunks, size, group, q)
    scores = (q @ k.transpose(1, 2)).mul_(weight.within)
    added = (k if weight.key is None else k * weight.key).transpose(1, 2) @ values
    states = _states_before(before, added.unflatten(0, (batch, n_kv, n_chunks)), weight.chunk)
    read = (q if weight.query is None else q * weight.query) @ states[:, :, :-1].flatten(0, 2)
    numerator = read.baddbmm_(scores, values)
    numerator = rearrange(numerator, "(b k c) (g t) d -> b c t k g d", b=batch, k=n_kv, g=group)
    return numerator, states[:, :, -1]


def _states_before(before: Tensor, added: Tensor, chunk_weight: Tensor | None) -> Tensor:
    """The states before each chunk and after the last one: [batch, kv_head, chunk + 1, d_phi, d_head]."""
    states = [before]
    for c, new in enumerate(added.unbind(dim=2)):  # on a CPU 15 times faster than cumsum along a middle axis
        kept = states[-1] if chunk_weight is None else states[-1] * chunk_weight[:, :, c]
        states.append(kept + new)
    return torch.stack(states, dim=2)


class _Weights(NamedTuple):
    """Powers of gamma within a chunk, each shaped to multiply what it is named after; without decay, a triangle of ones."""

    within: Tensor
    query: Tensor | None
    key: Tensor | None
    chunk: Tensor | None


def _weights(
    decay: Tensor | None, mask: Tensor | None, batch: int, n_chunks: int, size: int, group: int, like: Tensor
) -> _Weights:
    triangle = torch.ones(size, size, device=like.device, dtype=like.dtype).tril()
    if decay is None:
        return _Weights(triangle.repeat(group, 1), None, None, None)
    if mask is None:
        mask = torch.ones(1, n_chunks * size, dtype=torch.bool, device=like.device)
    real = torch.nn.functional.pad(mask, (0, n_chunks * size - mask.shape[1]))
    steps = real.reshape(real.shape[0], 1, n_chunks, size).cumsum(dim=-1).to(like)  # real tokens so far in the chunk
    gamma = decay.to(like)[None, :, None, None]
    within = gamma[..., None] ** (steps[..., :, None] - steps[..., None, :]).clamp(min=0) * triangle

    def rows(weight: Tensor) -> Tensor:
        """[batch or 1, kv_head, chunk, ...] flattened to match the first axis of q, k and the scores."""
        return weight.expand(batch, *weight.shape[1:]).flatten(0, 2)

    return _Weights(
        rows(within.repeat(1, 1, 1, group, 1)),
        rows((gamma**steps).repeat(1, 1, 1, group)[..., None]),
        rows((gamma ** (steps[..., -1:] - steps))[..., None]),
        (gamma ** steps[..., -1:])[..., None],
    )


def _normalizer(norm_q: Tensor, norm_k: Tensor, before: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """phi(q_i).D_i: the cumulative sum within each chunk is a product with a triangle of ones, in the layout of the inputs."""
    pos, size = norm_q.shape[1], max(1, min(chunk_size, norm_q.shape[1]))
    norm_q, norm_k = _pad_end(norm_q, size), _pad_end(norm_k, size)
    batch, padded, n_kv, d_phi = norm_k.shape
    triangle = torch.ones(size, size, device=norm_k.device, dtype=norm_k.dtype).tril()
    within = triangle @ norm_k.reshape(batch, padded // size, size, n_kv * d_phi)
    sums = torch.cat([before.reshape(batch, 1, -1), within[:, :, -1]], dim=1).cumsum(dim=1)
    running = within.add_(sums[:, :-1, None]).reshape(batch, padded, n_kv, 1, d_phi)
    normalizer = (norm_q.unflatten(2, (n_kv, -1)) * running).sum(-1).flatten(2, 3)
    return normalizer[:, :pos], sums[:, -1].reshape(batch, n_kv, d_phi)


def _pad_end(x: Tensor, size: int) -> Tensor:
    missing = -x.shape[1] % size
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
