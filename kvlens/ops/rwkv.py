"""The recurrence of RWKV-5 and 6 (Peng et al. 2024, arXiv 2404.05892): a decay per key channel, a bonus for a token's own key.

    z_t = (S_{t-1} + Diag(u) k_t v_t^T)^T q_t        S_t = Diag(a_t) S_{t-1} + k_t v_t^T

A query reads *before* its token is written, which the bonus u stands in for. In RWKV's names q_t is the receptance r_t, a_t is
w_t: the same for all tokens in RWKV-5, of each token in RWKV-6. First the recurrence, token by token, then the same in chunks;
then what is carried over M tokens, with G = cumsum(log a), one line for each key channel n where it has an index:

    A_ij = sum_n q_in e^{G_{i-1,n} - G_jn} k_jn (j < i)    A_ii = sum_n q_in u_n k_in    kbar_j = e^{G_{M-1} - G_j} o k_j
    qbar_i = e^{G_{i-1}} o q_i                              P = Diag(e^{G_{M-1}})

Tensors are named as in :mod:`kvlens.ops.selective_scan`, whose queries read what their own token has written.
"""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from kvlens.checks import doors
from kvlens.ops import selective_scan
from kvlens.ops.delta_rule import LOWEST_LOG_DECAY, decayed_products, starting_state
from kvlens.ops.linear_attention import OutputAndState
from kvlens.ops.selective_scan import Mask, Values

CHUNK_SIZE = 32
ByChannel = Float[Tensor, "batch pos head d_k"]
Bonus = Float[Tensor, "head d_k"]


def naive_rwkv(
    q: ByChannel,
    k: ByChannel,
    v: Values,
    log_decay: ByChannel,
    bonus: Bonus,
    mask: Mask | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """One token after the other, one line an equation: the reference.

    Args:
        q: the receptance.
        k, v: keys and values.
        log_decay: log a_t, at most 0.
        bonus: u.
        mask: True at real tokens; padded positions neither write nor decay, and read 0.
        initial_state: what came before; zeros if None.
        output_final_state: whether the state after the last real token is returned.
    """
    state = starting_state(initial_state, v, k.shape[3])
    outputs = []
    for t in range(v.shape[1]):
        written = k[:, t, :, :, None] * v[:, t, :, None, :]
        read = state + bonus.to(v)[..., None] * written
        after = log_decay[:, t, :, :, None].exp() * state + written
        real = torch.ones(len(v), dtype=torch.bool, device=v.device) if mask is None else mask[:, t].expand(len(v))
        state = torch.where(real[:, None, None, None], after, state)
        outputs.append(torch.where(real[:, None, None], (read.mT @ q[:, t, :, :, None])[..., 0], 0.0))
    return torch.stack(outputs, dim=1) if outputs else v, state if output_final_state else None


def chunked_rwkv(
    q: ByChannel,
    k: ByChannel,
    v: Values,
    log_decay: ByChannel,
    bonus: Bonus,
    mask: Mask | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """Matrix products within chunks, one state from chunk to chunk (arguments as in :func:`naive_rwkv`)."""
    pos, state, states = v.shape[1], starting_state(initial_state, v, k.shape[3]), []
    if not pos:
        return v, state if output_final_state else None
    q, k, v, log_decay = (_cut(x if mask is None else x.masked_fill(~mask[..., None, None], 0.0)) for x in (q, k, v, log_decay))
    behind = log_decay.double().clamp(min=LOWEST_LOG_DECAY).cumsum(dim=-2)
    whole = behind[..., -1:, :]
    kept, written = whole.to(v).exp().mT, (k * (whole - behind).to(k).exp()).mT @ v
    for chunk in range(v.shape[2]):
        states.append(state)
        state = kept[:, :, chunk] * state + written[:, :, chunk]
    before = (q * _before(behind).to(q).exp()) @ torch.stack(states, dim=2)
    within = (_reads_of_earlier(q, k, behind) + _reads_of_itself(q, k, bonus[:, None])) @ v
    z = rearrange(before + within, "batch head chunk size d -> batch (chunk size) head d")[:, :pos]
    return z, state if output_final_state else None


def _cut(x: Float[Tensor, "batch pos head d"]) -> Float[Tensor, "batch head chunk size d"]:
    """Chunks of tokens; the last is filled up with zeros, which neither write nor decay."""
    size = min(CHUNK_SIZE, x.shape[1])
    filled = pad(x, (0, 0, 0, 0, 0, -x.shape[1] % size))
    return rearrange(filled, "batch (chunk size) head d -> batch head chunk size d", size=size)


def _reads_of_earlier(q: Tensor, k: Tensor, behind: Tensor) -> Float[Tensor, "*batch pos pos"]:
    """A_ij for j < i, else 0: the delta rule's product of a query with keys up to the token before it."""
    (products,) = decayed_products([pad(q[..., 1:, :], (0, 0, 0, 1))], k, behind)
    return pad(products[..., :-1, :], (0, 0, 1, 0))


def _reads_of_itself(q: Tensor, k: Tensor, bonus: Tensor) -> Float[Tensor, "*batch pos pos"]:
    """A_ii, on the diagonal; ``bonus`` [head, ..., d_k]."""
    return (q * bonus[..., None, :].to(q) * k).sum(dim=-1).diag_embed()


def _before(behind: Float[Tensor, "*batch pos d_k"]) -> Float[Tensor, "*batch pos d_k"]:
    """G before each token."""
    return pad(behind[..., :-1, :], (0, 0, 1, 0))


# What the recurrence carries over a sequence: sums of log-decays, over real tokens.


def carried_queries(q: ByChannel, log_decay: ByChannel, mask: Mask | None = None) -> ByChannel:
    """qbar_i = e^{G_{i-1}} o q_i: what a query reads of the state before the first token."""
    q = q if mask is None else q * mask[..., None, None]
    return (q.transpose(1, 2) * _before(_summed(log_decay, mask)).exp().to(q)).transpose(1, 2)


def carried_keys(k: ByChannel, log_decay: ByChannel, mask: Mask | None = None) -> ByChannel:
    """kbar_j = e^{G_{M-1} - G_j} o k_j: sum_j kbar_j v_j^T is what the tokens write."""
    return selective_scan.carried_keys(k, log_decay, torch.ones_like(k[..., 0]), mask)


def state_map(k: ByChannel, log_decay: ByChannel, mask: Mask | None = None) -> Float[Tensor, "batch head d_k d_k"]:
    """P = Diag(e^{G_{M-1}}): what the tokens leave of a state before them."""
    return selective_scan.state_map(k, log_decay, mask)


def effective_attention(
    q: ByChannel, k: ByChannel, log_decay: ByChannel, bonus: Bonus, mask: Mask | None = None
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij of the top, exact where no state stands before: z_i = sum_j A_ij v_j."""
    if not q.shape[1]:
        return q.new_zeros(q.shape[0], q.shape[2], 0, 0)
    q, k = ((x if mask is None else x * mask[..., None, None]).transpose(1, 2) for x in (q, k))
    return _reads_of_earlier(q, k, _summed(log_decay, mask)) + _reads_of_itself(q, k, bonus)


def _summed(log_decay: ByChannel, mask: Mask | None) -> Float[Tensor, "batch head pos d_k"]:
    """G in float64, as :func:`kvlens.ops.ssd.summed_decay` sums a decay for each head."""
    real = log_decay if mask is None else log_decay.masked_fill(~mask[..., None, None], 0.0)
    return real.double().clamp(min=LOWEST_LOG_DECAY).cumsum(dim=1).transpose(1, 2)


doors(__name__)
