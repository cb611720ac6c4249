"""What the forms of linear attention share: one set of arguments, one layout, one return.

    A_i = gamma A_{i-1} + phi~(k_i) v_i^T        D_i = D_{i-1} + phi(k_i)
    numerator_i = phi~(q_i)^T A_i                normalizer_i = phi(q_i)^T D_i

``phi~`` are the features of the numerator (rotated, if RoPE follows the feature map), ``phi`` those of the normalizer.
A head's output is numerator / normalizer (normalizer "kernel") or the numerator alone (normalizer "none"). The division is
left to the caller, because a KV bias first adds a term to both.

Arguments of every form, in this order:

- ``phi_q`` [batch, pos, head, d_phi], ``phi_k`` [batch, pos, kv_head, d_phi], ``v`` [batch, pos, kv_head, d_head]; ``head``
  is a multiple of ``kv_head`` (GQA: query head h reads key-value head h // (head / kv_head));
- ``norm_q``, ``norm_k``: the features of the normalizer, or both None for no normalizer;
- ``decay`` [kv_head]: gamma, in (0, 1], or None for 1;
- ``mask`` [batch, pos]: True at real tokens, None for no padding. Padded positions add nothing and do not decay;
- ``state``: what came before (:class:`LinearAttentionState`), or None for zeros.

The forms: ``naive`` (a loop over time, the reference), ``parallel`` (materializes the pos x pos scores), ``chunked`` (O(pos)),
``recurrent`` (O(1) per token). Sums are accumulated in the precision of the inputs, which should be float32 or better.
"""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError


class LinearAttentionState(NamedTuple):
    """The state of linear attention: A and D after the last real token. The rows of a batch may share an initial state."""

    kv: Float[Tensor, "#batch kv_head d_phi d_head"]
    k_sum: Float[Tensor, "#batch kv_head d_phi"] | None


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
