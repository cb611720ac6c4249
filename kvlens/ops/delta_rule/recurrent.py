"""The delta rule token by token, in O(d_k d_v) per token, for decoding. States are never changed in place."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.delta_rule.types import CarriedOutput, DeltaRuleOutput, masked, starting_state, state_with_map


def recurrent_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> DeltaRuleOutput:
    """S = Diag(a) S + b k (v - (Diag(a) S)^T k)^T, then z = S^T q (arguments in :mod:`kvlens.ops.delta_rule.types`)."""
    k, log_decay, write_strength, (q, v) = masked(mask, k, log_decay, write_strength, q, v)
    group = v.shape[2] // k.shape[2]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=2), k.repeat_interleave(group, dim=2)
    decay = log_decay.exp()[..., None]  # [batch, pos, head(, d_k), 1]
    decay = decay if log_decay.dim() == 4 else decay[..., None]
    state = starting_state(initial_state, v, k.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        state = state * decay[:, t]
        key = k[:, t, :, None]
        change = (v[:, t, :, None] - key @ state) * write_strength[:, t, :, None, None]
        state = state + key.transpose(-1, -2) * change
        outputs.append((q[:, t, :, None] @ state).squeeze(2))
    z = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return DeltaRuleOutput(z, state if output_final_state else None)


def recurrent_carried_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    initial_map: Float[Tensor, "#batch head d_k d_k"] | None = None,
) -> CarriedOutput:
    """:func:`kvlens.ops.delta_rule.carried_delta_rule`, token by token."""
    d_k, d_v = k.shape[-1], v.shape[-1]
    both, values = state_with_map(initial_state, initial_map, v, d_k), torch.nn.functional.pad(v, (0, d_k))
    z, final = recurrent_delta_rule(q, k, values, log_decay, write_strength, mask, both, output_final_state=True)
    assert final is not None
    return CarriedOutput.split(z, final, d_v)
