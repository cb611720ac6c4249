"""Structured state-space duality, the recurrence of Mamba-2 (Dao, Gu 2024, arXiv 2405.21060): one decay per token and head.

    S_t = a_t S_{t-1} + b_t k_t v_t^T        z_t = S_t^T q_t        T_t = a_t I

In Mamba-2's names k_t is B_t, q_t is C_t, v_t is x_t, b_t is dt_t and log a_t is dt_t A; its skip connection D x_t is not part
of the recurrence. Queries and keys of a group serve the group's heads. First the three forms, naive, chunked and recurrent;
then what is carried over a sequence of M tokens, with G = cumsum(log a):

    A_ij = e^{G_i - G_j} b_j q_i.k_j (j <= i)    kbar_j = e^{G_{M-1} - G_j} b_j k_j    qbar_i = e^{G_i} q_i    P = e^{G_{M-1}} I

Tensors are named as in :mod:`kvlens.ops.delta_rule`, whose T_t also removes what stood at the key.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.ops.delta_rule import LOWEST_LOG_DECAY, starting_state
from kvlens.ops.linear_attention import OutputAndState

CHUNK_SIZE = 64


def naive_ssd(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """One token after the other, one line an equation: the reference.

    Args:
        q, k: C and B, each of a group of heads.
        v: x.
        log_decay: log a_t = dt_t A, at most 0.
        write_strength: b_t = dt_t.
        mask: True at real tokens; padded positions neither write nor decay, and read 0.
        initial_state: what came before; zeros if None.
        output_final_state: whether the state after the last real token is returned.
    """
    batch, pos, n_heads, _ = v.shape
    q, k = by_head(q, n_heads), by_head(k, n_heads)
    state = starting_state(initial_state, v, k.shape[3])
    outputs = []
    for t in range(pos):
        write = write_strength[:, t, :, None, None] * k[:, t, :, :, None] * v[:, t, :, None, :]
        after = log_decay[:, t].exp()[..., None, None] * state + write
        real = torch.ones(batch, 1, 1, 1, dtype=torch.bool) if mask is None else mask[:, t, None, None, None]
        state = torch.where(real.to(after.device), after, state)
        outputs.append((state.mT @ q[:, t, :, :, None])[..., 0] * real.to(state)[..., 0])
    z = torch.stack(outputs, dim=1) if outputs else v
    return z, state if output_final_state else None


def chunked_ssd(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """Matrix products within chunks, one state from chunk to chunk (arguments as in :func:`naive_ssd`)."""
    pos = v.shape[1]
    state = starting_state(initial_state, v, k.shape[3])
    outputs = []
    for first in range(0, pos, CHUNK_SIZE):
        some = slice(first, first + CHUNK_SIZE)
        here = None if mask is None else mask[:, some]
        decay, write = log_decay[:, some], write_strength[:, some]
        values = v[:, some] if here is None else v[:, some].masked_fill(~here[..., None, None], 0.0)
        pattern = effective_attention(q[:, some], k[:, some], decay, write, here)
        before = carried_queries(q[:, some], decay, here).transpose(1, 2) @ state
        outputs.append((pattern @ values.transpose(1, 2) + before).transpose(1, 2))
        kept = (decay if here is None else decay.masked_fill(~here[..., None], 0.0)).sum(dim=1).exp()
        written = torch.einsum("bjhk,bjhv->bhkv", carried_keys(k[:, some], decay, write, here), values)
        state = kept[..., None, None].to(state) * state + written
    return torch.cat(outputs, dim=1) if outputs else v, state if output_final_state else None


def recurrent_ssd(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """One update and one read per token, for decoding (arguments as in :func:`naive_ssd`)."""
    return naive_ssd(q, k, v, log_decay, write_strength, mask, initial_state, output_final_state)


# What the recurrence carries over a sequence: sums of log-decays, over real tokens.


def carried_queries(
    q: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = e^{G_i} q_i: what a query reads of the state before the first token."""
    summed = summed_decay(log_decay, mask)
    q = by_head(q, log_decay.shape[2])
    q = q if mask is None else q * mask[..., None, None]
    return q * summed.exp()[..., None].to(q)


def carried_keys(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = e^{G_{M-1} - G_j} b_j k_j: sum_j kbar_j v_j^T is what the tokens write."""
    summed = summed_decay(log_decay, mask)
    write = write_strength if mask is None else write_strength * mask[..., None]
    return by_head(k, log_decay.shape[2]) * ((summed[:, -1:] - summed).exp().to(k) * write)[..., None]


def state_map(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head d_k d_k"]:
    """P = e^{G_{M-1}} I: what the tokens leave of a state before them."""
    kept = summed_decay(log_decay, mask)[:, -1].exp() if k.shape[1] else log_decay.new_ones(k.shape[0], log_decay.shape[2])
    return kept[..., None, None].to(k) * torch.eye(k.shape[3], dtype=k.dtype, device=k.device)


def effective_attention(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij = e^{G_i - G_j} b_j q_i.k_j for j <= i: z_i = sum_j A_ij v_j, exactly, where no state stands before."""
    n_heads = log_decay.shape[2]
    summed = summed_decay(log_decay, mask).transpose(1, 2)
    kept = (summed[..., :, None] - summed[..., None, :]).tril().exp().tril()  # above the diagonal e^{...} could overflow
    scores = torch.einsum("bihk,bjhk->bhij", by_head(q, n_heads), by_head(k, n_heads))
    write = write_strength if mask is None else write_strength * mask[..., None]
    pattern = scores * kept.to(q) * write.transpose(1, 2)[:, :, None]
    return pattern if mask is None else pattern * mask[:, None, :, None]


def summed_decay(
    log_decay: Float[Tensor, "batch pos head"], mask: Bool[Tensor, "#batch pos"] | None
) -> Float[Tensor, "batch pos head"]:
    """G: log-decays summed up to each token, its own included; padded positions have none. In float64, where a step below
    ``LOWEST_LOG_DECAY`` counts as that: differences of sums that are -inf would be NaN."""
    real = log_decay if mask is None else log_decay.masked_fill(~mask[..., None], 0.0)
    return real.double().clamp(min=LOWEST_LOG_DECAY).cumsum(dim=1)


def by_head(x: Float[Tensor, "batch pos key_head d_k"], n_heads: int) -> Float[Tensor, "batch pos head d_k"]:
    """Keys or queries of groups as those of their heads."""
    return x if x.shape[2] == n_heads else x.repeat_interleave(n_heads // x.shape[2], dim=2)


doors(__name__)
