"""The three forms of lightning attention, with flash-linear-attention's argument names; linear attention does the sums."""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention import LinearAttentionOutput, LinearAttentionState
from kvlens.ops.linear_attention.chunked import chunked_linear_attention
from kvlens.ops.linear_attention.naive import naive_linear_attention
from kvlens.ops.linear_attention.recurrent import recurrent_linear_attention


class LightningOutput(NamedTuple):
    """z per token, and the state after the last real token if it was requested."""

    output: Float[Tensor, "batch pos head d_v"]
    final_state: Float[Tensor, "batch head d_k d_v"] | None


def naive_lightning(
    q: Float[Tensor, "batch pos head d_k"],
    k: Float[Tensor, "batch pos head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, " head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> LightningOutput:
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
) -> LightningOutput:
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
) -> LightningOutput:
    """One update and one read per token, for decoding (arguments as in :func:`naive_lightning`)."""
    state = _state(initial_state)
    return _output(recurrent_linear_attention(q, k, v, None, None, log_decay.exp(), mask, state), output_final_state)


def _state(initial_state: Tensor | None) -> LinearAttentionState | None:
    return None if initial_state is None else LinearAttentionState(initial_state, None)


def _output(out: LinearAttentionOutput, output_final_state: bool) -> LightningOutput:
    return LightningOutput(out.numerator, out.state.kv if output_final_state else None)
