"""KV shift, the obvious form: walk along each row and keep the last ``window`` real rows in a list."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def naive_kv_shift(
    x: Float[Tensor, "batch pos head d"],
    coef: Float[Tensor, "head taps"],
    state: Float[Tensor, "#batch window head d"] | None = None,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d"], Float[Tensor, "batch window head d"]]:
    """The reference for :func:`kvlens.ops.kv_shift.kv_shift`: same arguments, same result, a loop over tokens."""
    batch, pos, head, d = x.shape
    window = coef.shape[1] - 1
    rows, states = [], []
    for b in range(batch):
        before = x.new_zeros(window, head, d) if state is None else state[b % state.shape[0]]
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
