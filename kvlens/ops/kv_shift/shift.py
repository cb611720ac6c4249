"""KV shift, the fast form (KVSA eq. 4-6): ``window`` shifted multiply-adds, no loop over tokens.

    x^_i = sum_{s=0..w} c_s x_{i-s}         (index 0 = the current token, w = ``window``)

Before the first token come zeros, or the *shift state*: the last ``w`` raw rows of whatever came before. The returned state
is what the next segment of text needs, so a text can be cut anywhere without changing the result. It holds raw rows, never
shifted ones (the inference code in KVSA app. F keeps the shifted key of the prefill; that is a misprint).

The shift ignores padding: the predecessor of a token is the previous real token, however much padding lies in between.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.errors import KVLensError


def kv_shift(
    x: Float[Tensor, "batch pos head d"],
    coef: Float[Tensor, "head taps"],
    state: Float[Tensor, "#batch window head d"] | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d"], Float[Tensor, "batch window head d"]]:
    """Mix each row with its ``window`` predecessors.

    Args:
        x: raw keys, values or queries.
        coef: ``window + 1`` coefficients per head; column 0 multiplies the current token. Our ``coef`` for keys is the
            paper's (alpha_1, alpha_2), for values (beta_1, beta_2).
        state: the raw rows before the first token, oldest first; zeros if None.
        mask: True at real tokens; None if there is no padding.

    Returns:
        The shifted rows (zeros at padded tokens) and the new shift state: the raw last ``window`` rows of
        [old state; real tokens].

    Source: KVSA eq. 4-6; windows above 1, sec. 4.7.
    """
    window = coef.shape[1] - 1
    if state is None:
        state = x.new_zeros(1, window, *x.shape[2:])
    if state.shape[1] != window:
        raise KVLensError(
            f"kv_shift: expected a shift state of {window} rows for {window + 1} coefficients, got {state.shape[1]}"
        )
    state = state.to(x.dtype).expand(x.shape[0], -1, -1, -1)
    if mask is not None:
        return _shift_real_tokens(x, coef, state, mask)
    extended = torch.cat([state, x], dim=1)  # row w + i is token i
    return _shift_all(x, coef, extended), extended[:, x.shape[1] :].clone()


def _shift_all(x: Tensor, coef: Tensor, extended: Tensor) -> Tensor:
    """Out of place, because each in-place sum over a slice would cost the backward pass a copy."""
    window, pos = coef.shape[1] - 1, x.shape[1]
    taps = coef.to(x.dtype)[:, :, None]
    shifted = x * taps[:, 0]
    for s in range(1, window + 1):
        shifted = torch.addcmul(shifted, extended[:, window - s : window - s + pos], taps[:, s])
    return shifted


def _shift_real_tokens(x: Tensor, coef: Tensor, state: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Move the real tokens of each row to its front, behind the state, and read predecessors by rank."""
    window = state.shape[1]
    rank = mask.cumsum(dim=1) - 1  # a real token's index among the real tokens of its row
    front = torch.argsort(~mask, dim=1, stable=True)
    packed = torch.cat([state, _take_rows(x, front)], dim=1)  # row w + r is the token of rank r

    shifted = torch.zeros_like(x)
    for s in range(window + 1):
        predecessor = _take_rows(packed, (rank + window - s).clamp(min=0))
        shifted = shifted + predecessor * coef.to(x.dtype)[:, s, None]
    shifted = torch.where(mask[:, :, None, None], shifted, 0.0)

    n_real = mask.sum(dim=1, keepdim=True)
    last = _take_rows(packed, n_real + torch.arange(window, device=x.device))
    return shifted, last


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Row ``index[b, i]`` of ``x[b]``, for ``x`` of shape [batch, row, ...]."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]
