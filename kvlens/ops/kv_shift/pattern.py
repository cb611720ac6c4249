"""Which tokens a head reads, or is attracted by, under a KV shift: the pattern in terms of raw rows (KVSA eq. 5-6).

A pattern A weights shifted rows, each a mixture of tokens. Its entry A[i, j] is therefore not how much query i reads token j:

    sum_j A[i, j] v^_j  =  sum_t E[i, t] v_t          E[i, t] = sum_{s=0..w} c_s A[i, t + s]

With the values' coefficients, E gives the tokens that are read; with the keys', the tokens whose raw keys drew the attention.
"""

from jaxtyping import Float
from torch import Tensor


def effective_pattern(
    pattern: Float[Tensor, "*batch head query key"], coef: Float[Tensor, "kv_head taps"]
) -> Float[Tensor, "*batch head query key"]:
    """Rewrite a pattern over shifted rows as one over raw rows.

    Args:
        pattern: ``hook_pattern``.
        coef: coefficients as used, ``hook_v_shift_coef`` or ``hook_k_shift_coef``; column 0 belongs to the current token. One
            row per head, or a KV head that several heads share.

    Returns:
        E. Rows before the first key (the shift state) have no column.

    Raises:
        KVLensError: the number of heads is not a multiple of the rows of ``coef``.
    """
    taps = coef.repeat_interleave(pattern.shape[-3] // coef.shape[0], dim=0)[:, :, None, None].to(pattern)
    effective = taps[:, 0] * pattern
    for s in range(1, min(coef.shape[1], pattern.shape[-1])):
        effective[..., :-s] += taps[:, s] * pattern[..., s:]
    return effective
