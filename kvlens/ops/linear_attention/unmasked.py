"""Linear attention without the causal mask (ICLCA def. 3.2, eq. 3): every query reads the state of the whole text."""

from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.linear_attention.parallel import final_state
from kvlens.ops.linear_attention.state import read_state
from kvlens.ops.linear_attention.types import LinearAttentionOutput, LinearAttentionState, check_normalizer


def unmasked_linear_attention(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    norm_q: Float[Tensor, "batch pos head d_phi"] | None = None,
    norm_k: Float[Tensor, "batch pos kv_head d_phi"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    state: LinearAttentionState | None = None,
) -> LinearAttentionOutput:
    """A = b_KV + sum_j phi~(k_j) v_j^T over all j, read by every query; arguments in :mod:`kvlens.ops.linear_attention.types`.

    A bias replaces a prompt in one layer (th. 4.1), and in that alone: in the next, what the prompt's tokens have become
    depends on the text, which they see (assumption 4.2). So it is an op, and a model with linear attention stays causal. There
    is no decay, which would have no direction.
    """
    check_normalizer(norm_q, norm_k)
    whole = final_state(phi_k, v, norm_k, None, mask, state)
    normalizer = None
    if norm_q is not None and whole.k_sum is not None:
        normalizer = read_state(norm_q, whole.k_sum[..., None])[..., 0]
    return LinearAttentionOutput(read_state(phi_q, whole.kv), normalizer, whole)
