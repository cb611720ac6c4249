"""The selective scan of Mamba-1 (Gu, Dao 2023, arXiv 2312.00752): a decay of its own for each token, channel and state.

    S_t = a_t o S_{t-1} + b_t k_t v_t        z_t = S_t . q_t        T_t = Diag(a_t)

A channel is a head here, whose value is a single number. In Mamba's names k_t is B_t and q_t is C_t, which all channels share,
v_t is the channel's x_t, b_t is its dt_t, and log a_t is dt_t A, with one A per channel and state; its skip connection D x_t is
not part of the recurrence. First the recurrence, token by token; then what it carries over a sequence of M tokens, with
G = cumsum(log a), one line for each state n where it has an index:

    A_ij = sum_n q_in e^{G_in - G_jn} b_j k_jn (j <= i)    kbar_j = e^{G_{M-1} - G_j} o b_j k_j
    qbar_i = e^{G_i} o q_i                                  P = Diag(e^{G_{M-1}})

Tensors are named as in :mod:`kvlens.ops.ssd`, whose decay is the same for all states of a head.
"""

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.ops.delta_rule import starting_state
from kvlens.ops.linear_attention import OutputAndState
from kvlens.ops.ssd import by_head, summed_decay

KeyRows = Float[Tensor, "batch pos key_head d_k"]
Values = Float[Tensor, "batch pos head d_v"]
LogDecay = Float[Tensor, "batch pos head d_k"]
WriteStrength = Float[Tensor, "batch pos head"]
Mask = Bool[Tensor, "#batch pos"]


def selective_scan(
    q: KeyRows,
    k: KeyRows,
    v: Values,
    log_decay: LogDecay,
    write_strength: WriteStrength,
    mask: Mask | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """One token after the other, one line an equation, as Transformers runs it without CUDA kernels.

    Args:
        q, k: C and B, each of a group of heads.
        v: x.
        log_decay: log a_t = dt_t A, at most 0.
        write_strength: b_t = dt_t.
        mask: True at real tokens; padded positions neither write nor decay, and read 0.
        initial_state: what came before; zeros if None.
        output_final_state: whether the state after the last real token is returned.
    """
    _, pos, n_heads, _ = v.shape
    state = starting_state(initial_state, v, k.shape[3])
    kept, written = _real(log_decay, mask).exp(), write_strength if mask is None else write_strength * mask[..., None]
    values = v if mask is None else v.masked_fill(~mask[..., None, None], 0.0)
    keys, queries = k.split(1, dim=1), (q if mask is None else q * mask[..., None, None]).split(1, dim=1)
    outputs = []
    for t in range(pos):
        key, query = (by_head(x[t], n_heads)[:, 0, :, :, None] for x in (keys, queries))
        state = kept[:, t, :, :, None] * state + written[:, t, :, None, None] * key * values[:, t, :, None]
        outputs.append((state * query).sum(dim=2))
    return torch.stack(outputs, dim=1) if outputs else v, state if output_final_state else None


def carried_queries(q: KeyRows, log_decay: LogDecay, mask: Mask | None = None) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = e^{G_i} o q_i: what a query reads of the state before the first token."""
    q = by_head(q if mask is None else q * mask[..., None, None], log_decay.shape[2])
    return q * _summed(log_decay, mask).exp().to(q)


def carried_keys(
    k: KeyRows, log_decay: LogDecay, write_strength: WriteStrength, mask: Mask | None = None
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = e^{G_{M-1} - G_j} o b_j k_j: sum_j kbar_j v_j^T is what the tokens write."""
    summed = _summed(log_decay, mask)
    write = write_strength if mask is None else write_strength * mask[..., None]
    return by_head(k, log_decay.shape[2]) * (summed[:, -1:] - summed).exp().to(k) * write[..., None]


def state_map(k: KeyRows, log_decay: LogDecay, mask: Mask | None = None) -> Float[Tensor, "batch head d_k d_k"]:
    """P = Diag(e^{G_{M-1}}): what the tokens leave of a state before them."""
    return _real(log_decay, mask).double().sum(dim=1).exp().to(k).diag_embed()


def effective_attention(
    q: KeyRows, k: KeyRows, log_decay: LogDecay, write_strength: WriteStrength, mask: Mask | None = None
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij = sum_n q_in e^{G_in - G_jn} b_j k_jn for j <= i: z_i = sum_j A_ij v_j, exactly, where no state stands before.

    One state after the other, so that no tensor has positions twice and states as well.
    """
    n_heads = log_decay.shape[2]
    summed = rearrange(_summed(log_decay, mask), "batch pos head n -> n batch head pos")
    q, k = by_head(q, n_heads), by_head(k, n_heads)
    write = write_strength if mask is None else write_strength * mask[..., None]
    pattern = q.new_zeros(q.shape[0], n_heads, q.shape[1], q.shape[1])
    for n, total in enumerate(summed):
        kept = (total[..., :, None] - total[..., None, :]).tril().exp().tril()  # above the diagonal e^{...} could overflow
        read, wrote = q[..., n].transpose(1, 2), (k[..., n] * write).transpose(1, 2)
        pattern = pattern + read[..., :, None] * kept.to(q) * wrote[..., None, :]
    return pattern if mask is None else pattern * mask[:, None, :, None]


def _real(log_decay: LogDecay, mask: Mask | None) -> LogDecay:
    """The log-decays, 0 at padded positions."""
    return log_decay if mask is None else log_decay.masked_fill(~mask[..., None, None], 0.0)


def _summed(log_decay: LogDecay, mask: Mask | None) -> LogDecay:
    """G, as :func:`kvlens.ops.ssd.summed_decay` sums a decay for each head, of each state."""
    by_state = rearrange(log_decay, "batch pos head n -> batch pos (head n)")
    return rearrange(summed_decay(by_state, mask), "batch pos (head n) -> batch pos head n", n=log_decay.shape[3])


doors(__name__)
