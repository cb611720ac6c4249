"""Linear attention, whose initial state is the KV bias (ICLCA eq. 12-13, 19).

    A_i = gamma A_{i-1} + phi~(k_i) v_i^T        D_i = D_{i-1} + phi(k_i)
    numerator_i = phi~(q_i)^T A_i                normalizer_i = phi(q_i)^T D_i

``phi~`` are the features of the numerator (rotated, if RoPE follows the feature map), ``phi`` those of the normalizer.
A head's output is numerator / normalizer (normalizer "kernel") or the numerator alone (normalizer "none"). The division is
left to the caller, because a KV bias first adds a term to both.

The forms, in this order: naive (a loop over time, the reference), parallel (materializes the pos x pos scores), chunked
(O(pos)), recurrent (O(1) per token), and unmasked attention, which reads the whole text. After the naive form stands what reads
a state, and at the end what a text does to the state before it. Arguments of every form, in this order:

- ``phi_q`` [batch, pos, head, d_phi], ``phi_k`` [batch, pos, kv_head, d_phi], ``v`` [batch, pos, kv_head, d_head]; ``head``
  is a multiple of ``kv_head`` (GQA: query head h reads key-value head h // (head / kv_head));
- ``norm_q``, ``norm_k``: the features of the normalizer, or both None for no normalizer;
- ``decay`` [kv_head]: gamma, in (0, 1], or None for 1;
- ``mask`` [batch, pos]: True at real tokens, None for no padding. Padded positions add nothing and do not decay;
- ``initial_state``: what came before (:class:`LinearAttentionState`), or None for zeros.

Sums are accumulated in the precision of the inputs, which should be float32 or better.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import Count, doors
from kvlens.errors import KVLensError
from kvlens.ops.rotary import naive_rotate, rotate


class LinearAttentionState(NamedTuple):
    """The state of linear attention: A and D after the last real token. The rows of a batch may share an initial state."""

    kv: Float[Tensor, "#batch kv_head d_phi d_head"]
    k_sum: Float[Tensor, "#batch kv_head d_phi"] | None


OutputAndState = tuple[Float[Tensor, "batch pos head d_v"], Float[Tensor, "batch head d_k d_v"] | None]
"""What a recurrence without a normalizer returns: z per token, and the state after the last real token if it was requested."""


class LinearAttentionOutput(NamedTuple):
    """The output before division, its normalizer (None under "none"), and the state after the last real token."""

    numerator: Float[Tensor, "batch pos head d_head"]
    normalizer: Float[Tensor, "batch pos head"] | None
    state: LinearAttentionState


def check_normalizer(norm_q: Tensor | None, norm_k: Tensor | None) -> None:
    """Raise KVLensError if only one of ``norm_q`` and ``norm_k`` is given."""
    if (norm_q is None) != (norm_k is None):
        raise KVLensError(
            "linear attention: expected both norm_q and norm_k, or neither for no normalizer, got only norm_"
            f"{'k' if norm_q is None else 'q'}"
        )


def naive_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """The recurrence itself (ICLCA eq. 12-13; arguments at the top)."""
    check_normalizer(norm_q, norm_k)
    batch, pos, n_heads, d_phi = phi_q.shape
    n_kv, d_head = v.shape[2:]
    group = n_heads // n_kv
    gamma = v.new_ones(n_kv) if decay is None else decay.to(v)
    A = v.new_zeros(batch, n_kv, d_phi, d_head) if initial_state is None else initial_state.kv.expand(batch, -1, -1, -1)
    D = (
        v.new_zeros(batch, n_kv, d_phi)
        if initial_state is None or initial_state.k_sum is None
        else initial_state.k_sum.expand(batch, -1, -1)
    )
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


# Reading a state with queries, and moving its origin (ICLCA eq. 19 and 23).


def read_state(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    kv: Float[Tensor, "#batch head_or_kv_head d_phi d_head"],
    decay: Float[Tensor, " head_or_kv_head"] | None = None,
    steps: Int[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_head"]:
    """What queries read from a stored A: phi~(q_i)^T gamma^{steps_i} A.

    Args:
        steps: number of real tokens from the state up to and including the query; required with ``decay``.
    """
    pos, n_heads = phi_q.shape[1:3]
    group = n_heads // kv.shape[1]
    q = phi_q.unflatten(2, (kv.shape[1], group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # b k (g n) f
    read = (q @ kv).unflatten(2, (group, pos)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    if decay is None:
        return read
    if steps is None:
        raise KVLensError("read_state: a decaying state needs `steps`, the number of real tokens since the state")
    factor = decay.repeat_interleave(group).to(read) ** steps[:, :, None].to(read)
    return read * factor[..., None]


def ffn_with_state(
    ffn: Float[Tensor, "batch pos d_model"],
    phi_q: Float[Tensor, "batch pos head d_phi"],
    kv: Float[Tensor, "#batch head_or_kv_head d_phi d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
) -> Float[Tensor, "batch pos d_model"]:
    """FFN(x_i) + sum_h phi~(q_ih)^T A_h W_O,h: the prompt's term in the FFN's output, attention left as it is (ICLCA app. D).

    Exact where attention and FFN read the same stream and add to it side by side, as in GPT-J, and where the normalizer is 1:
    there the two sums only change places. In a block whose FFN reads what attention wrote it is not, and a normalizer would
    divide attention's own summand by the prompt's, which the FFN does not see.

    Args:
        ffn: the FFN's output.
        phi_q: queries with their features and rotation (``hook_rot_q``; ``hook_phi_q`` without RoPE), over ``attn_scale``.
        kv: A, as `read_state` reads it: ``b_KV`` of the bias.
        W_O: attention's output projection.
    """
    return ffn + torch.einsum("bphd,hdm->bpm", read_state(phi_q, kv), W_O)


def rebase_state(
    kv: Float[Tensor, "*lead d_phi d_head"],
    cos: Float[Tensor, "*#lead rotary_dim"],
    sin: Float[Tensor, "*#lead rotary_dim"],
    adjacent_pairs: bool = False,
) -> Float[Tensor, "*lead d_phi d_head"]:
    """R_{-M} A: the stored keys expressed from an origin M tokens later. ``cos``, ``sin``: the row of position M."""
    return rotate(kv.transpose(-1, -2), cos.unsqueeze(-2), -sin.unsqueeze(-2), adjacent_pairs).transpose(-1, -2)


def real_steps(mask: Bool[Tensor, "#batch pos"] | None, like: Float[Tensor, "batch pos *rest"]) -> Int[Tensor, "#batch pos"]:
    """The number of real tokens up to and including each position: [batch or 1, pos]."""
    if mask is None:
        return torch.arange(1, like.shape[1] + 1, device=like.device)[None]
    return mask.cumsum(dim=1)


def without_padding(x: Float[Tensor, "batch pos *rest"], mask: Bool[Tensor, "#batch pos"]) -> Float[Tensor, "batch pos *rest"]:
    """``x`` with zeros at padded positions, set rather than multiplied: 0 * inf would be NaN and reach the real tokens."""
    return x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), 0.0)


def retnet_decay(n_heads: Count) -> Float[Tensor, " head"]:
    """gamma_h = 1 - 2^(-5 - h), in float64 (Sun et al. 2023; the RetNet in ICLCA has gamma = 1)."""
    return 1.0 - 2.0 ** (-5.0 - torch.arange(n_heads, dtype=torch.float64))


# The parallel form: the causal pos x pos scores are formed explicitly, as in softmax attention. Its steps are public because
# the hooked component puts hook points between them.


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
    initial_state: LinearAttentionState | None = None,
) -> LinearAttentionState:
    """A and D after the last real token, in one product over all tokens."""
    if mask is not None:
        phi_k, v = without_padding(phi_k, mask), without_padding(v, mask)
        norm_k = None if norm_k is None else without_padding(norm_k, mask)
    if decay is not None:
        steps = real_steps(mask, phi_k)
        total = steps.new_full((1, 1), phi_k.shape[1]) if mask is None else mask.sum(dim=1, keepdim=True)
        remaining = (total - steps).to(phi_k)
        phi_k = phi_k * (decay.to(phi_k) ** remaining[:, :, None])[..., None]
    kv = phi_k.permute(0, 2, 3, 1) @ v.transpose(1, 2)
    k_sum = None if norm_k is None else norm_k.sum(dim=1)
    if initial_state is not None:
        before = initial_state.kv
        if decay is not None:
            before = before * (decay.to(before) ** total.to(before))[:, :, None, None]
        kv = kv + before
        k_sum = k_sum if k_sum is None or initial_state.k_sum is None else k_sum + initial_state.k_sum
    return LinearAttentionState(kv, k_sum)


def parallel_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """All tokens at once through the pos x pos scores: O(pos^2) memory (arguments at the top)."""
    check_normalizer(norm_q, norm_k)
    group = phi_q.shape[2] // v.shape[2]
    scores = causal_scores(phi_q, phi_k, decay, mask)
    v = v if mask is None else without_padding(v, mask)
    values = v.repeat_interleave(group, dim=2).transpose(1, 2)
    numerator = (scores @ values).transpose(1, 2)
    if initial_state is not None:
        numerator = numerator + read_state(phi_q, initial_state.kv, decay, real_steps(mask, phi_q))
    normalizer = None
    if norm_q is not None and norm_k is not None:
        normalizer = running_normalizer(norm_q, norm_k, mask, None if initial_state is None else initial_state.k_sum)
    return LinearAttentionOutput(numerator, normalizer, final_state(phi_k, v, norm_k, decay, mask, initial_state))


# The chunked form: O(pos) time and memory, entirely in matrix products.
#
# The text is cut into chunks of C tokens. Within a chunk the scores are C x C; only the state passes from chunk to chunk:
#
#     numerator = tril(Q K^T) V  +  Q A_before         A_after = A_before + K^T V
#
# (with gamma^distance on each term if there is decay). All chunks of a *segment* go through each product together; segments run
# in sequence, each starting from the state of the one before. A segment is short enough for its intermediates to stay in the
# processor's cache, which on a CPU gains a factor of two. The backward pass is autograd through the same products, also O(pos).

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
    initial_state: LinearAttentionState | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> LinearAttentionOutput:
    """Segment by segment, all chunks of one at once (arguments at the top; ``chunk_size`` changes speed, not the result)."""
    check_normalizer(norm_q, norm_k)
    if mask is not None:
        phi_k, v = without_padding(phi_k, mask), without_padding(v, mask)
        norm_k = None if norm_k is None else without_padding(norm_k, mask)
    batch, n_kv, d_phi, d_head = v.shape[0], v.shape[2], phi_k.shape[3], v.shape[3]
    kv = v.new_zeros(batch, n_kv, d_phi, d_head) if initial_state is None else initial_state.kv.to(v).expand(batch, -1, -1, -1)
    k_sum = None
    if norm_q is not None and norm_k is not None:
        k_sum = (
            v.new_zeros(batch, n_kv, d_phi)
            if initial_state is None or initial_state.k_sum is None
            else initial_state.k_sum.to(v).expand(batch, -1, -1)
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

    of_scores, of_query, of_key, of_state = _weights(decay, mask, batch, n_chunks, size, group, q)
    scores = (q @ k.transpose(1, 2)).mul_(of_scores)
    added = (k if of_key is None else k * of_key).transpose(1, 2) @ values
    states = _states_before(before, added.unflatten(0, (batch, n_kv, n_chunks)), of_state)
    read = (q if of_query is None else q * of_query) @ states[:, :, :-1].flatten(0, 2)
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


def _weights(
    decay: Tensor | None, mask: Tensor | None, batch: int, n_chunks: int, size: int, group: int, like: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Powers of gamma within a chunk that multiply scores, queries, keys and the state; without decay, a triangle of ones."""
    triangle = torch.ones(size, size, device=like.device, dtype=like.dtype).tril()
    if decay is None:
        return triangle.repeat(group, 1), None, None, None
    if mask is None:
        mask = torch.ones(1, n_chunks * size, dtype=torch.bool, device=like.device)
    real = torch.nn.functional.pad(mask, (0, n_chunks * size - mask.shape[1]))
    steps = real.reshape(real.shape[0], 1, n_chunks, size).cumsum(dim=-1).to(like)  # real tokens so far in the chunk
    gamma = decay.to(like)[None, :, None, None]
    within = gamma[..., None] ** (steps[..., :, None] - steps[..., None, :]).clamp(min=0) * triangle

    def rows(weight: Tensor) -> Tensor:
        """[batch or 1, kv_head, chunk, ...] flattened to match the first axis of q, k and the scores."""
        return weight.expand(batch, *weight.shape[1:]).flatten(0, 2)

    return (
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


# The recurrent form: O(1) memory and time per token, for decoding.


def recurrent_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    decay: Float[Tensor, " kv_head"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """One update and one read per token (arguments at the top). States are never changed in place."""
    check_normalizer(norm_q, norm_k)
    batch, pos, n_heads, d_phi = phi_q.shape
    n_kv, d_head = v.shape[2:]
    kv = v.new_zeros(batch, n_kv, d_phi, d_head) if initial_state is None else initial_state.kv.expand(batch, -1, -1, -1)
    k_sum = None
    if norm_k is not None:
        before = None if initial_state is None else initial_state.k_sum
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


# Without the causal mask (ICLCA def. 3.2, eq. 3): every query reads the state of the whole text.


def unmasked_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """A = b_KV + sum_j phi~(k_j) v_j^T over all j, read by every query; arguments at the top.

    A sum over prompt and text is that over the prompt, b'_KV (eq. 11), plus that over the text, so a bias replaces the prompt
    in one layer for every text (th. 4.1). In the next layer the prompt's keys are those of what its tokens have become, which
    depends on the text, as they see it: that layer's bias is right for this text alone (assumption 4.2). Only where the
    prompt's tokens do not see the text is there one bias for all texts in any number of layers. So this is an op: a model of
    text, which predicts what it must not see, stays causal. There is no decay, which would have no direction.
    """
    check_normalizer(norm_q, norm_k)
    whole = final_state(phi_k, v, norm_k, None, mask, initial_state)
    normalizer = None
    if norm_q is not None and whole.k_sum is not None:
        normalizer = read_state(norm_q, whole.k_sum[..., None])[..., 0]
    return LinearAttentionOutput(read_state(phi_q, whole.kv), normalizer, whole)


# What M tokens do to the state before them (ICLCA eq. 19 and 23).
#
#     A' = R_{-M} (gamma^M A + A_written)        D' = D + D_written
#
# A decays once per token and, where RoPE follows the feature map, is then expressed from an origin M tokens later.
# ``A_written`` and ``D_written`` are what the tokens themselves added, in the old coordinates; without them, A' and D' are what
# becomes of a bias across the tokens. The third thing that a text carries over, the shift state, is the second output of
# `kv_shift`.


def carry_state(
    before: LinearAttentionState | None,
    n_tokens: int | Int[Tensor, " batch"],
    written: LinearAttentionState | None = None,
    decay: Float[Tensor, " head"] | None = None,
    rotation: tuple[Float[Tensor, "#batch rotary_dim"], Float[Tensor, "#batch rotary_dim"]] | None = None,
    adjacent_pairs: bool = False,
) -> LinearAttentionState:
    """The state after ``n_tokens`` tokens, from the one before them.

    Args:
        before: A and D before the tokens, one per query head (a KV bias); None for zeros, which needs ``written``.
        n_tokens: M, one number or one per row.
        written: what the tokens added, one per query head; None if they added nothing.
        decay: gamma per query head; None for 1.
        rotation: (cos, sin) of position M; None without RoPE. D is never rotated: it holds unrotated features.
        adjacent_pairs: as in :func:`kvlens.ops.rotary.rotate`.

    Returns:
        A' and D'; ``k_sum`` is None where neither state has one (normalizer "none").
    """
    terms = [] if before is None else [_decayed(before, n_tokens, decay)]
    terms += [] if written is None else [written]
    kv = sum((term.kv for term in terms[1:]), terms[0].kv)
    sums = [term.k_sum for term in terms if term.k_sum is not None]
    if rotation is not None:
        cos, sin = (row[:, None] for row in rotation)
        kv = rebase_state(kv, cos, sin, adjacent_pairs)
    return LinearAttentionState(kv, sum(sums[1:], sums[0]) if sums else None)


def _decayed(state: LinearAttentionState, n_tokens: int | Tensor, decay: Tensor | None) -> LinearAttentionState:
    if decay is None:
        return state
    steps = torch.as_tensor(n_tokens, device=state.kv.device).reshape(-1, 1).to(state.kv)
    return state._replace(kv=state.kv * (decay.to(state.kv) ** steps)[..., None, None])


doors(__name__)
