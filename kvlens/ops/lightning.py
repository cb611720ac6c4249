"""Lightning attention (MiniMax-01, arXiv 2501.08313) and retention: linear attention with one decay per head and no normalizer.

    S_t = a S_{t-1} + k_t v_t^T        z_t = S_t^T q_t        T_t = a I

First the three forms, naive, chunked and recurrent, with flash-linear-attention's argument names: those of
:mod:`kvlens.ops.linear_attention` with phi the identity. Then what is carried over M real tokens, a power of a:

    kbar_j = a^{M-1-j} k_j        qbar_i = a^{i+1} q_i        P = a^M        A_ij = a^{i-j} q_i.k_j (j <= i)
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.ops.linear_attention import (
    LinearAttentionOutput,
    LinearAttentionState,
    OutputAndState,
    chunked_linear_attention,
    naive_linear_attention,
    real_steps,
    recurrent_linear_attention,
    without_padding,
)


def naive_lightning(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """Token by token, one line per equation: the reference.

    Args:
        q, k: scaled and activated by the caller.
        log_decay: log a per head, at most 0.
        mask: True at real tokens; padded positions neither write nor decay.
        initial_state: what came before; zeros if None.
        output_final_state: whether the state after the last real token is returned.
    """
    state = _state(initial_state)
    return _output(naive_linear_attention(q, k, v, None, None, log_decay.exp(), mask, state), output_final_state)


def chunked_lightning(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """Matrix products within chunks, one state from chunk to chunk (arguments as in :func:`naive_lightning`)."""
    state = _state(initial_state)
    return _output(chunked_linear_attention(q, k, v, None, None, log_decay.exp(), mask, state), output_final_state)


def recurrent_lightning(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> OutputAndState:
    """One update and one read per token, for decoding (arguments as in :func:`naive_lightning`)."""
    state = _state(initial_state)
    return _output(recurrent_linear_attention(q, k, v, None, None, log_decay.exp(), mask, state), output_final_state)


def _state(initial_state: Tensor | None) -> LinearAttentionState | None:
    return None if initial_state is None else LinearAttentionState(initial_state, None)


def _output(out: LinearAttentionOutput, output_final_state: bool) -> OutputAndState:
    return out.numerator, out.state.kv if output_final_state else None


# What is carried across a span of tokens: powers of the decay, counted over real tokens.


def carried_queries(
    q: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """qbar_i = a^{i+1} q_i: what a query reads from the state before the first token."""
    q = q if mask is None else without_padding(q, mask)
    return q * _power(real_steps(mask, q), log_decay, q)[..., None]


def carried_keys(
    k: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k"]:
    """kbar_j = a^{M-1-j} k_j: sum_j kbar_j v_j^T is what the tokens write."""
    k = k if mask is None else without_padding(k, mask)
    steps = real_steps(mask, k)
    return k * _power(steps[:, -1:] - steps, log_decay, k)[..., None]


def state_map(
    k: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head d_k d_k"]:
    """P = a^M I: what remains of a state after M real tokens."""
    batch, pos, n_heads, d_k = k.shape
    steps = real_steps(mask, k)[:, -1:] if pos else torch.zeros(1, 1, dtype=torch.long, device=k.device)
    kept = _power(steps, log_decay, k)[:, 0, :, None, None]
    return (kept * torch.eye(d_k, dtype=k.dtype, device=k.device)).expand(batch, n_heads, d_k, d_k)


def effective_attention(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch head pos pos"]:
    """A_ij = a^{i-j} q_i.k_j for j <= i: z_i = sum_j A_ij v_j, exactly, if there is no earlier state."""
    if mask is not None:
        q, k = without_padding(q, mask), without_padding(k, mask)
    steps = real_steps(mask, q)
    distance = (steps[:, :, None] - steps[:, None, :]).clamp(min=0)
    weight = _power(distance.flatten(1), log_decay, q).unflatten(1, distance.shape[1:]).movedim(-1, 1)
    return (torch.einsum("bihk,bjhk->bhij", q, k) * weight).tril()


def _power(steps: Tensor, log_decay: Tensor, like: Tensor) -> Tensor:
    """a^steps [batch or 1, pos, head]."""
    return (log_decay.double().exp() ** steps[..., None]).to(like)  # and not exp(0 * -inf), which is NaN


doors(__name__)
