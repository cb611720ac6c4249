"""IH, the function that an induction head computes: find what followed the current token earlier and copy it (KVSA def. 1).

    IH(x)_L = sum_{s=0..L} p_Ls x_s        p_L = softmax_s( x_L . x_{s-1} / sigma - m |L - s| )        x_{-1} = 0

The score compares the current row with the *predecessor* of each visible row, so that attention falls on the rows that
followed an earlier occurrence of the current one; ``m`` is an ALiBi slope, ``sigma`` a temperature. One attention head whose
keys are shifted by one (alpha = (0, 1)), whose values are not shifted (beta = (1, 0)) and whose projections are the identity
computes exactly this function (th. 2).

The sum runs over every row that causal attention sees. KVSA def. 1 omits the first row and the current one, but the heads in
its theorems see them; the equality holds for the sum over all visible rows.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def induction_head(x: Float[Tensor, "batch pos d_model"], sigma: float, slope: float) -> Float[Tensor, "batch pos d_model"]:
    """IH(x) at every position.

    Args:
        x: rows of a text, before any head.
        sigma: temperature; scores are divided by it (TransformerLens' ``attn_scale``).
        slope: ALiBi slope m, subtracted once for each position of distance.

    Returns:
        The rows that an induction head writes.

    Source: KVSA def. 1, th. 2.
    """
    pos = x.shape[1]
    predecessors = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1)
    positions = torch.arange(pos, device=x.device, dtype=x.dtype)  # an integer distance would make the slope float32
    distance = positions[:, None] - positions
    scores = torch.einsum("bqd,bkd->bqk", x, predecessors) / sigma - slope * distance
    return scores.masked_fill(distance < 0, -torch.inf).softmax(dim=-1) @ x
