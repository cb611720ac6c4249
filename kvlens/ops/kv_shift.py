"""KV shift: each key and value mixed with its predecessors, one coefficient vector per head (KVSA eq. 4-6).

    x^_i = sum_{s=0..w} c_s x_{i-s}         (index 0 = the current token, w = ``window``)

Before the first token come zeros, or the *shift state*: the last ``w`` raw rows of whatever came before. The returned state
is what the next segment of text needs, so a text can be cut anywhere without changing the result. It holds raw rows, never
shifted ones (the inference code in KVSA app. F keeps the shifted key of the prefill; that is a misprint). The shift ignores
padding: the predecessor of a token is the previous real token, however much padding lies in between.

First :func:`naive_kv_shift`, then :func:`kv_shift`, ``window`` shifted multiply-adds without a loop over tokens. Then the
coefficients from what is trained (sec. 4.6-4.7) and its initial value, and last :func:`effective_pattern`, which tokens a head
reads under a shift.
"""

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError


def naive_kv_shift(
    x: Float[Tensor, "batch pos head d"],
    coef: Float[Tensor, "head taps"],
    initial_state: Float[Tensor, "#batch window head d"] | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d"], Float[Tensor, "batch window head d"]]:
    """The reference for :func:`kvlens.ops.kv_shift.kv_shift`: same arguments, same result, a loop over tokens."""
    batch, pos, head, d = x.shape
    window = coef.shape[1] - 1
    rows, states = [], []
    for b in range(batch):
        before = x.new_zeros(window, head, d) if initial_state is None else initial_state[b % initial_state.shape[0]]
        history = list(before)
        outputs = []
        for i in range(pos):
            if mask is not None and not mask[b, i]:
                outputs.append(x.new_zeros(head, d))
                continue
            history.append(x[b, i])
            outputs.append(torch.stack([coef[:, s, None] * history[-1 - s] for s in range(window + 1)]).sum(0))
        rows.append(torch.stack(outputs) if outputs else x.new_zeros(0, head, d))
        states.append(torch.stack(history[len(history) - window :]) if window else x.new_zeros(0, head, d))
    return torch.stack(rows), torch.stack(states)


def kv_shift(
    x: Float[Tensor, "batch pos head d"],
    coef: Float[Tensor, "head taps"],
    initial_state: Float[Tensor, "#batch window head d"] | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d"], Float[Tensor, "batch window head d"]]:
    """Mix each row with its ``window`` predecessors.

    Args:
        x: raw keys, values or queries.
        coef: ``window + 1`` coefficients per head; column 0 multiplies the current token. Our ``coef`` for keys is the
            paper's (alpha_1, alpha_2), for values (beta_1, beta_2).
        initial_state: the raw rows before the first token, oldest first; zeros if None.
        mask: True at real tokens; None if there is no padding.

    Returns:
        The shifted rows (zeros at padded tokens) and the new shift state: the raw last ``window`` rows of
        [old state; real tokens].

    Source: KVSA eq. 4-6; windows above 1, sec. 4.7.
    """
    window = coef.shape[1] - 1
    if initial_state is None:
        initial_state = x.new_zeros(1, window, *x.shape[2:])
    if initial_state.shape[1] != window:
        raise KVLensError(
            f"kv_shift: expected a shift state of {window} rows for {window + 1} coefficients, got {initial_state.shape[1]}"
        )
    initial_state = initial_state.to(x.dtype).expand(x.shape[0], -1, -1, -1)
    if mask is not None:
        return _shift_real_tokens(x, coef, initial_state, mask)
    extended = torch.cat([initial_state, x], dim=1)  # row w + i is token i
    pos, taps = x.shape[1], coef.to(x.dtype)[:, :, None]
    shifted = x * taps[:, 0]
    for s in range(1, window + 1):  # out of place: an in-place sum over a slice would cost the backward pass a copy
        shifted = torch.addcmul(shifted, extended[:, window - s : window - s + pos], taps[:, s])
    return shifted, extended[:, pos:].clone()


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


Parametrization = Literal["free", "gate", "clamp"]
Init = Literal["uniform", "identity"]


def coefficients_from_parameter(
    parameter: Float[Tensor, "head taps"], parametrization: Parametrization
) -> Float[Tensor, "head taps"]:
    """The coefficients as used, from the parameter as trained."""
    if parametrization == "gate":
        return parameter.softmax(dim=-1)
    if parametrization == "clamp":
        return parameter.clamp(0.0, 1.0)
    return parameter


def initial_shift_parameter(
    n_heads: int,
    window: int,
    parametrization: Parametrization,
    init: Init,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "head taps"]:
    """Draw the initial parameter, in float32.

    ``uniform`` (KVSA sec. 2.2 and 4.7): all coefficients but the last ~ U(0, 1), the last is 1 minus the others. A gate cannot
    hold the negative last coefficient that this may give for windows above 1, so its coefficients are drawn uniformly
    from the simplex, which is the same distribution for window 1. ``identity``: (1, 0, ...), for a shift grafted onto a trained
    model; a gate reaches it only in the limit, and :class:`kvlens.KVShiftConfig` refuses the pair.
    """
    if init == "identity":
        return torch.eye(1, window + 1).repeat(n_heads, 1)
    if parametrization == "gate":
        exponential = -torch.rand(n_heads, window + 1, generator=generator).clamp(1e-7, 1 - 1e-7).log()
        return (exponential / exponential.sum(dim=-1, keepdim=True)).log()
    others = torch.rand(n_heads, window, generator=generator)
    return torch.cat([others, 1 - others.sum(dim=-1, keepdim=True)], dim=-1)


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


doors(__name__)
