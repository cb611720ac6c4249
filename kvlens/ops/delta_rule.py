"""The gated delta rule and Kimi delta attention, with everything that a KV bias needs.

    S_t = T_t S_{t-1} + b_t k_t v_t^T        z_t = S_t^T q_t        T_t = (I - b_t k_t k_t^T) Diag(a_t)

The state first decays, then loses b_t times what the key reads from it, then gains b_t times the value. ``a_t`` is one number
per head in the gated delta rule (Yang et al. 2412.06464) and one per head and key channel in Kimi delta attention (Kimi Linear,
2510.26692). With equal channels the second reduces to the first, so one set of functions serves both. Removing before decaying
would be a different rule.

The forms, in this order: naive (a matrix T_t per token, the reference), chunked (matrix products), recurrent (O(1) per token,
for decoding); each also carries a bias: what queries read of it (qbar), what keys write (kbar), the map P that acts on it, and
the attention A. Arguments of every form, in this order:

- ``q``, ``k`` [batch, pos, key_head, d_k]: normalized and scaled by the caller; ``head`` is a multiple of ``key_head``, and
  value head h reads key head h // (head / key_head);
- ``v`` [batch, pos, head, d_v];
- ``log_decay`` [batch, pos, head] or [batch, pos, head, d_k]: log a_t, at most 0; a step below -100 counts as -100 in the fast
  forms (e^-100 is 4e-44);
- ``write_strength`` [batch, pos, head]: b_t, from 0 to 2 for keys of norm 1;
- ``mask`` [batch, pos]: True at real tokens, None for no padding. Padded positions do not change the state, and read zeros;
- ``initial_state`` [batch or 1, head, d_k, d_v]: what came before, or None for zeros;
- ``output_final_state``: whether the state after the last real token is returned (flash-linear-attention's names).

No form changes its arguments in place. Inputs should be in float32 or better.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from kvlens.checks import Count, doors, ensure
from kvlens.ops.linear_attention import OutputAndState, without_padding

LOWEST_LOG_DECAY = -100.0
"""A factor e^-100 = 4e-44 erases a state in any precision, while sums of such steps keep their digits and avoid -inf."""


class CarriedOutput(NamedTuple):
    """z without a bias, what each query reads from a bias, the state without a bias, and the map that acts on a bias.

    With a bias b_KV before the first token, z = output + b_KV^T carried_q and S = final_state + state_map b_KV.
    """

    output: Float[Tensor, "batch pos head d_v"]
    carried_q: Float[Tensor, "batch pos head d_k"]
    final_state: Float[Tensor, "batch head d_k d_v"]
    state_map: Float[Tensor, "batch head d_k d_k"]

    @classmethod
    def split(cls, z: Tensor, final: Tensor, d_v: int) -> "CarriedOutput":
        """Split what was read from a :func:`state_with_map`, and the final one, into the parts of the state and of the map."""
        return cls(z[..., :d_v], z[..., d_v:], final[..., :d_v], final[..., d_v:])


def masked(
    mask: Tensor | None, k: Tensor, log_decay: Tensor, write_strength: Tensor, *reads: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The arguments with zeros at padded positions: a padded token has T = I and writes nothing."""
    if mask is None:
        return k, log_decay, write_strength, list(reads)
    k, log_decay, write_strength, *others = (without_padding(x, mask) for x in (k, log_decay, write_strength, *reads))
    return k, log_decay, write_strength, others


def starting_state(initial_state: Tensor | None, v: Tensor, d_k: int) -> Tensor:
    """``initial_state`` for each row of the batch, in v's dtype; zeros without one."""
    batch, _, n_heads, d_v = v.shape
    if initial_state is None:
        return v.new_zeros(batch, n_heads, d_k, d_v)
    return initial_state.to(v).expand(batch, -1, -1, -1)


def state_with_map(initial_state: Tensor | None, initial_map: Tensor | None, v: Tensor, d_k: int) -> Tensor:
    """[S, P] side by side: P obeys the recurrence of S without the writes, so it can be appended as further columns of S."""
    before = identity_state(v, d_k) if initial_map is None else initial_map.to(v).expand(v.shape[0], -1, -1, -1)
    return torch.cat([starting_state(initial_state, v, d_k), before], dim=-1)


def identity_state(v: Tensor, d_k: int) -> Tensor:
    """I for each row and head: the map of no tokens."""
    return torch.eye(d_k, dtype=v.dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)


def naive_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """S_t = T_t S_{t-1} + b_t k_t v_t^T and z_t = S_t^T q_t (arguments at the top)."""
    group = v.shape[2] // k.shape[2]
    maps = naive_token_maps(k, log_decay, write_strength, mask)
    k, log_decay, write_strength, (q, v) = masked(mask, k, log_decay, write_strength, q, v)
    S = starting_state(initial_state, v, k.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        key, query = (x[:, t].repeat_interleave(group, dim=1) for x in (k, q))
        S = maps[:, t] @ S + write_strength[:, t, :, None, None] * key[..., :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhkd,bhk->bhd", S, query))
    z = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return z, S if output_final_state else None


def naive_token_maps(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k d_k"]:
    """T_t = (I - b_t k_t k_t^T) Diag(a_t), the identity at padded positions."""
    k, log_decay, write_strength, _ = masked(mask, k, log_decay, write_strength)
    d_k = k.shape[-1]
    key = k.repeat_interleave(write_strength.shape[2] // k.shape[2], dim=2)
    decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None].expand(*log_decay.shape, d_k)).exp()
    removal = torch.eye(d_k, dtype=k.dtype) - write_strength[..., None, None] * key[..., :, None] * key[..., None, :]
    return removal * decay[..., None, :]


def naive_carried(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """kbar [batch, pos, head, d_k], qbar [batch, pos, head, d_k] and P [batch, head, d_k, d_k], as products of matrices."""
    maps = naive_token_maps(k, log_decay, write_strength, mask)
    k, log_decay, write_strength, (q,) = masked(mask, k, log_decay, write_strength, q)
    group, pos = write_strength.shape[2] // k.shape[2], k.shape[1]
    keys, queries = (x.repeat_interleave(group, dim=2) for x in (k, q))
    identity = torch.eye(k.shape[-1], dtype=k.dtype).expand(maps.shape[0], maps.shape[2], -1, -1)
    carried_k, carried_q = torch.zeros_like(keys), torch.zeros_like(queries)
    later = identity
    for j in reversed(range(pos)):
        carried_k[:, j] = torch.einsum("bhkc,bhc->bhk", later, write_strength[:, j, :, None] * keys[:, j])
        later = later @ maps[:, j]
    before = identity
    for i in range(pos):
        before = maps[:, i] @ before
        carried_q[:, i] = torch.einsum("bhkc,bhk->bhc", before, queries[:, i])
    return carried_k, carried_q, before


def naive_carried_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    initial_map: Float[Tensor, "#batch head d_k d_k"] | None = None,
) -> CarriedOutput:
    """The context's own output and state, and what the tokens do to a bias before ``initial_map``."""
    output, final = naive_delta_rule(q, k, v, log_decay, write_strength, mask, initial_state, True)
    _, carried_q, state_map = naive_carried(q, k, log_decay, write_strength, mask)
    before = identity_state(v, k.shape[-1]) if initial_map is None else initial_map
    assert final is not None
    return CarriedOutput(output, torch.einsum("bihk,bhkc->bihc", carried_q, before), final, state_map @ before)


# The chunked form: matrix products within a chunk of C tokens, and one state from chunk to chunk.
#
# Within a chunk, with G the cumulative log decay up to and including each token and S the state before the chunk,
#
#     z = (Q e^G - QK W) S + QK U        S' = Diag(e^{G_C}) S + Kd^T (U - W S)
#     (I + L) U = diag(b) V              (I + L) W = diag(b) (K e^G)        L = tril_{-1}(diag(b) KK)
#
# with QK_ij = sum_c q_ic k_jc e^{G_ic - G_jc} for j <= i, KK likewise, and Kd = K e^{G_C - G}. Every exponent is at most 0, so
# nothing overflows however strong the decay is. U is what the tokens would write if the state were empty, and W S is what they
# remove from it. Hence, for the tokens of a chunk, qbar is a row of Q e^G - QK W, kbar is a column of Kd^T (I + L)^{-1}
# diag(b), and P is Diag(e^{G_C}) - Kd^T W; across chunks each is a matrix product (Yang et al. 2412.06464, sec. 3.3; Kimi
# Linear 2510.26692, sec. 3.1). The backward pass is autograd through the same products.
#
# `Chunks` is everything that does not depend on the state before, for all chunks at once.

BLOCK = 16
"""Block size with a decay per channel: within a block products are formed pair by pair, between blocks as matrix products."""


@dataclass(frozen=True)
class Chunks:
    """The matrices of the equations above, [batch, head, chunk, ...].

    Attributes:
        pos: number of tokens before the last chunk was padded.
        d_written: columns of ``written``; 0 if it is None.
        q_decayed: Q e^G [size, d_k]; ``scores``: QK [size, size]; both None without queries.
        k_to_end: Kd = K e^{G_C - G} [size, d_k].
        write: b [size, 1].
        system: tril(diag(b) KK) [size, size]; its diagonal is taken to be 1.
        removed: W [size, d_k].
        written: U [size, d_v]; None without values.
        end_decay: e^{G_C} [d_k or 1, 1].
    """

    pos: int
    d_written: int
    q_decayed: Tensor | None
    scores: Tensor | None
    k_to_end: Tensor
    write: Tensor
    system: Tensor
    removed: Tensor
    written: Tensor | None
    end_decay: Tensor

    def maps(self) -> Float[Tensor, "batch head chunk d_k d_k"]:
        """P of each chunk."""
        d_k = self.k_to_end.shape[-1]
        decay = self.end_decay * torch.eye(d_k, dtype=self.write.dtype, device=self.write.device)
        return decay - self.k_to_end.transpose(-1, -2) @ self.removed

    def local_carried_keys(self, times_write_strength: bool) -> Float[Tensor, "batch head chunk size d_k"]:
        """diag(b) (I + L)^{-T} Kd: each key as it contributes to the state at the end of its chunk."""
        keys = torch.linalg.solve_triangular(self.system.transpose(-1, -2), self.k_to_end, upper=True, unitriangular=True)
        return keys * self.write if times_write_strength else keys

    def joined(self, x: Tensor) -> Tensor:
        """[batch, head, chunk, size, d] as [batch, pos, head, d], without what fills the last chunk."""
        return x.flatten(2, 3)[:, :, : self.pos].transpose(1, 2)


def chunks_of(
    q: Tensor | None,
    k: Tensor,
    log_decay: Tensor,
    write_strength: Tensor,
    mask: Tensor | None,
    chunk_size: int,
    v: Tensor | None = None,
) -> Chunks:
    """Cut the tokens into chunks; the last one is padded with tokens that change nothing."""
    ensure("delta rule: chunk_size", Count, chunk_size)
    reads = [x for x in (v, q) if x is not None]
    k, log_decay, write_strength, reads = masked(mask, k, log_decay, write_strength, *reads)
    pos = write_strength.shape[1]
    key_heads, size = k.shape[2], max(1, min(chunk_size, pos))
    by_channel = log_decay.dim() == 4

    def cut(x: Tensor) -> Tensor:
        """[batch, pos, head, d] as [batch, head, chunk, size, d]."""
        missing = -pos % size if pos else 1
        x = pad(x, (0, 0, 0, 0, 0, missing)) if missing else x
        return rearrange(x, "batch (chunk size) head d -> batch head chunk size d", size=size)

    def per_key_head(x: Tensor) -> Tensor:
        return rearrange(x, "batch (key_head group) ... -> batch key_head group ...", key_head=key_heads)

    # differences of long sums lose digits, so the sums are in float64 whatever the dtype of the rest
    steps = (log_decay if by_channel else log_decay[..., None]).clamp(min=LOWEST_LOG_DECAY)
    cumulated = per_key_head(cut(steps).double().cumsum(-2))
    b = per_key_head(cut(write_strength[..., None]))
    from_start, to_end = cumulated.to(k).exp(), (cumulated[..., -1:, :] - cumulated).to(k).exp()

    keys = cut(k).unsqueeze(2)
    queries = None if q is None else cut(reads[-1]).unsqueeze(2)
    products = decayed_products([keys] if queries is None else [keys, queries], keys, cumulated)
    system = b * products[0]
    right = [b * keys * from_start]
    if v is not None:
        right.append(b * per_key_head(cut(reads[0])))
    solved = torch.linalg.solve_triangular(system, torch.cat(right, dim=-1), upper=False, unitriangular=True).flatten(1, 2)
    d_k = k.shape[-1]
    return Chunks(
        pos,
        0 if v is None else v.shape[-1],
        None if queries is None else (queries * from_start).flatten(1, 2),
        None if queries is None else products[1].flatten(1, 2),
        (keys * to_end).flatten(1, 2),
        b.flatten(1, 2),
        system.flatten(1, 2),
        solved[..., :d_k],
        None if v is None else solved[..., d_k:],
        from_start[..., -1, :, None].flatten(1, 2),
    )


def decayed_products(rows: list[Tensor], keys: Tensor, cumulated: Tensor) -> list[Tensor]:
    """sum_c x_ic k_jc e^{G_ic - G_jc} for j <= i, else 0 [..., size, size], for each x in ``rows``.

    Args:
        rows, keys: [..., size, d_k].
        cumulated: G [..., size, 1] or, with a decay per channel, [..., size, d_k], in float64.
    """
    size = keys.shape[-2]
    later = torch.ones(size, size, dtype=torch.bool, device=keys.device).triu(1)
    if cumulated.shape[-1] == 1:
        gaps = (cumulated - cumulated.transpose(-1, -2)).to(keys).masked_fill(later, -torch.inf)
        weight = gaps.exp()
        return [(x @ keys.transpose(-1, -2)) * weight for x in rows]
    blocks = [_block_of_rows(rows, keys, cumulated, start) for start in range(0, size, BLOCK)]
    return [torch.cat(parts, dim=-2) for parts in zip(*blocks, strict=True)]


def _block_of_rows(rows: list[Tensor], keys: Tensor, cumulated: Tensor, start: int) -> list[Tensor]:
    """Rows ``start`` to ``start + BLOCK`` of :func:`decayed_products`, for a decay per channel.

    Between the block's tokens and all earlier ones, the decay splits at the start of the block into two factors of at most 1.
    """
    size, here = keys.shape[-2], slice(start, start + BLOCK)
    before = cumulated[..., start - 1 : start, :] if start else torch.zeros_like(cumulated[..., :1, :])
    within = (cumulated[..., here, :] - before).to(keys)
    n_rows = within.shape[-2]
    later = torch.ones(n_rows, n_rows, dtype=torch.bool, device=keys.device).triu(1)[..., None]
    gaps = (within.unsqueeze(-2) - within.unsqueeze(-3)).masked_fill(later, -torch.inf)
    near_keys = gaps.exp() * keys[..., None, here, :]
    far_keys = keys[..., :start, :] * (before - cumulated[..., :start, :]).to(keys).exp()
    blocks = []
    for x in rows:
        near = (near_keys @ x[..., here, :, None]).squeeze(-1)
        far = (x[..., here, :] * within.exp()) @ far_keys.transpose(-1, -2)
        blocks.append(pad(torch.cat([far, near], dim=-1), (0, size - start - n_rows)))
    return blocks


CHUNK_SIZE = 64


def chunked_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
    chunk_size: int = CHUNK_SIZE,
) -> OutputAndState:
    """z, and the state after the last real token (arguments at the top; ``chunk_size`` changes speed, not the result)."""
    state = starting_state(initial_state, v, k.shape[-1])
    chunks = chunks_of(q, k, log_decay, write_strength, mask, chunk_size, v)
    z, final = _scan(chunks, state)
    return chunks.joined(z), final if output_final_state else None


def carried_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    initial_map: Float[Tensor, "#batch head d_k d_k"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> CarriedOutput:
    """The context's own z and state, and in addition what the tokens do to a bias before them.

    Args:
        initial_state: what the context has written before these tokens.
        initial_map: P of the tokens between the bias and these; None for the identity.
    """
    d_k, d_v = k.shape[-1], v.shape[-1]
    chunks = chunks_of(q, k, log_decay, write_strength, mask, chunk_size, v)
    z, final = _scan(chunks, state_with_map(initial_state, initial_map, v, d_k))
    return CarriedOutput.split(chunks.joined(z), final, d_v)


def carried_queries(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = (T_i ... T_0)^T q_i: what a query reads of the state before the first token."""
    chunks = chunks_of(q, k, log_decay, write_strength, mask, chunk_size)
    return chunks.joined(_scan(chunks, identity_state(write_strength, k.shape[-1]))[0])


def carried_keys(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    times_write_strength: bool = True,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = (T_{M-1} ... T_{j+1}) b_j k_j: sum_j kbar_j v_j^T is what the tokens write.

    Args:
        times_write_strength: False leaves out b_j; the norm of a row is then the token's survival, 0 at padded positions.
    """
    chunks = chunks_of(None, k, log_decay, write_strength, mask, chunk_size)
    local = chunks.local_carried_keys(times_write_strength)
    maps = chunks.maps()
    later = identity_state(write_strength, k.shape[-1])
    carried: list[Tensor] = []
    for keys, one in zip(reversed(local.unbind(2)), reversed(maps.unbind(2)), strict=True):
        carried.append(keys @ later.transpose(-1, -2))
        later = later @ one
    return chunks.joined(torch.stack(carried[::-1], dim=2))


def state_map(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> Float[Tensor, "batch head d_k d_k"]:
    """P = T_{M-1} ... T_0: the tokens make P S + (what they write) of a state S before them. P is not normal."""
    chunks = chunks_of(None, k, log_decay, write_strength, mask, chunk_size)
    product = identity_state(write_strength, k.shape[-1])
    for one in chunks.maps().unbind(2):
        product = one @ product
    return product


def effective_attention(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A = QK (I + L)^{-1} diag(b): z_i = sum_j A_ij v_j, exactly, if there is no earlier state. All tokens form one chunk."""
    chunks = chunks_of(q, k, log_decay, write_strength, mask, max(1, k.shape[1]))
    assert chunks.scores is not None
    solved = torch.linalg.solve_triangular(chunks.system, chunks.scores, upper=False, left=False, unitriangular=True)
    pos = k.shape[1]
    return (solved * chunks.write.transpose(-1, -2)).squeeze(2)[..., :pos, :pos]  # no token makes a chunk of one


def _scan(chunks: Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """z [batch, head, chunk, size, d] and the last state, which may have more columns than what is written."""
    assert chunks.scores is not None
    assert chunks.q_decayed is not None
    wider = state.shape[-1] - chunks.d_written
    outputs = []
    parts = (chunks.q_decayed, chunks.scores, chunks.k_to_end, chunks.removed, chunks.end_decay)
    written = [None] * chunks.scores.shape[2] if chunks.written is None else chunks.written.unbind(2)
    for one, q, scores, k, removed, decay in zip(written, *(part.unbind(2) for part in parts), strict=True):
        change = -(removed @ state)
        if one is not None:
            change = change + (torch.nn.functional.pad(one, (0, wider)) if wider else one)
        outputs.append(q @ state + scores @ change)
        state = decay * state + k.transpose(-1, -2) @ change
    return torch.stack(outputs, dim=2), state


# Token by token, in O(d_k d_v) per token, for decoding.


def recurrent_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """S = Diag(a) S + b k (v - (Diag(a) S)^T k)^T, then z = S^T q (arguments at the top)."""
    k, log_decay, write_strength, (q, v) = masked(mask, k, log_decay, write_strength, q, v)
    group = v.shape[2] // k.shape[2]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    decay = log_decay.exp()[..., None]  # [batch, pos, head(, d_k), 1]
    decay = decay if log_decay.dim() == 4 else decay[..., None]
    state = starting_state(initial_state, v, k.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t]
        key = k[:, t, :, None]
        change = (v[:, t, :, None] - key @ state) * write_strength[:, t, :, None, None]
        state = state + key.transpose(-1, -2) * change
        outputs.append((q[:, t, :, None] @ state).squeeze(2))
    z = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return z, state if output_final_state else None


def recurrent_carried_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    initial_map: Float[Tensor, "#batch head d_k d_k"] | None = None,
) -> CarriedOutput:
    """:func:`kvlens.ops.delta_rule.carried_delta_rule`, token by token."""
    d_k, d_v = k.shape[-1], v.shape[-1]
    both, values = state_with_map(initial_state, initial_map, v, d_k), torch.nn.functional.pad(v, (0, d_k))
    z, final = recurrent_delta_rule(q, k, values, log_decay, write_strength, mask, both, output_final_state=True)
    assert final is not None
    return CarriedOutput.split(z, final, d_v)


doors(__name__)
