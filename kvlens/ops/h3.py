"""H3 (Fu et al. 2023, arXiv 2212.14052), whose initial states hold a prompt as a KV bias does (ICLCA sec. 7).

    kbar_t = sum_{s<K} c_s o k_{t-s}                                      the shift SSM, which remembers the last K - 1 keys
    X_t = A X_{t-1} + B kbar_t v_t^T                                      the diagonal SSM, m states of each entry of k v^T
    z_t = (sum_m C_m X_tm + D kbar_t v_t^T)^T q_t

A, B, C and D have one number per head and state (D: per head). The prompt is the pair of the last keys and X:

    z_i = sum_{j<=i} A_ij v_j + sum_m C_m A_m^{i+1} X_m^T q_i        A_ij = (sum_m C_m A_m^{i-j} B_m + D [i = j]) q_i.kbar_j

First the recurrence, token by token, then its attention, then what queries read of a state. A is real here; the paper's may be
complex. No class of Transformers or TransformerLens has this layer, and no public checkpoint is in such a form, so it is an op
with its laws, not a mixer of the bridge.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.ops.short_convolution import short_convolution


class DiagonalSSM(NamedTuple):
    """The diagonal SSM of each head: A, B, C by state, and D, which skips it."""

    A: Float[Tensor, "head state"]
    B: Float[Tensor, "head state"]
    C: Float[Tensor, "head state"]
    D: Float[Tensor, " head"]


class H3State(NamedTuple):
    """What the tokens so far leave: the last keys as they came, oldest first, and X."""

    last_k: Float[Tensor, "#batch rows head d_k"]
    states: Float[Tensor, "#batch head state d_k d_v"]


def h3_attention(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    shift: Float[Tensor, "head d_k kernel"],
    ssm: DiagonalSSM,
    initial_state: H3State | None = None,
) -> tuple[Float[Tensor, "batch pos head d_v"], H3State]:
    """z per token and the state after the last one: one token after the other, one line an equation.

    Args:
        q, k, v: projections of the input.
        shift: c_s of each channel of the keys, oldest first: the last one multiplies the current token.
        ssm: the diagonal SSM.
        initial_state: what came before, such as a prompt; zeros if None.
    """
    kbar, last_k = _shifted(k, shift, None if initial_state is None else initial_state.last_k)
    X = q.new_zeros(len(q), *ssm.A.shape, k.shape[3], v.shape[3])
    if initial_state is not None:
        X = initial_state.states.to(q).expand(len(q), -1, -1, -1, -1)
    outputs = []
    for t in range(q.shape[1]):
        written = kbar[:, t, :, :, None] * v[:, t, :, None]
        X = ssm.A[:, :, None, None] * X + ssm.B[:, :, None, None] * written[:, :, None]
        memory = (ssm.C[:, :, None, None] * X).sum(dim=2) + ssm.D[:, None, None] * written
        outputs.append(torch.einsum("bhkv,bhk->bhv", memory, q[:, t]))
    return torch.stack(outputs, dim=1) if outputs else v, H3State(last_k, X)


def effective_attention(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    shift: Float[Tensor, "head d_k kernel"],
    ssm: DiagonalSSM,
    last_k: Float[Tensor, "#batch rows head d_k"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij of the tokens' own keys and values; ``last_k`` are the keys before them, which the first ones still see."""
    kbar, _ = _shifted(k, shift, last_k)
    n = q.shape[1]
    powers = ssm.A[..., None] ** torch.arange(n, device=q.device)
    kernel = (ssm.B[..., None] * ssm.C[..., None] * powers).sum(dim=1)  # head, lag
    kernel = kernel + ssm.D[:, None] * (torch.arange(n, device=q.device) == 0)
    lag = torch.arange(n, device=q.device)[:, None] - torch.arange(n, device=q.device)
    return torch.einsum("bihk,bjhk->bhij", q, kbar) * kernel[:, lag.clamp(min=0)].tril()


def carried_queries(q: Float[Tensor, "batch pos head d_k"], ssm: DiagonalSSM) -> Float[Tensor, "batch pos head state d_k"]:
    """C_m A_m^{i+1} q_i: with what each query reads X_m, the states before the first token."""
    steps = torch.arange(1, q.shape[1] + 1, device=q.device)
    return torch.einsum("hmi,bihk->bihmk", ssm.C[..., None] * ssm.A[..., None] ** steps, q)


def _shifted(k: Tensor, shift: Tensor, last_k: Tensor | None) -> tuple[Tensor, Tensor]:
    """kbar, and the last K - 1 keys as they came."""
    by_channel, by_head = "batch pos head d_k -> batch pos (head d_k)", "batch pos (head d_k) -> batch pos head d_k"
    before = None if last_k is None else rearrange(last_k, by_channel)
    filters = rearrange(shift, "head d_k taps -> (head d_k) taps")
    shifted, rows = short_convolution(rearrange(k, by_channel), filters, initial_state=before, output_final_state=True)
    assert rows is not None
    return rearrange(shifted, by_head, head=k.shape[2]), rearrange(rows, by_head, head=k.shape[2])


doors(__name__)
