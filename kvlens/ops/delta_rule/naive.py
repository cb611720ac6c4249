"""The delta rule, the obvious form: one matrix T_t per token, token by token. In float64 it is the reference."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.delta_rule.types import CarriedOutput, DeltaRuleOutput, identity_state, masked, starting_state


def naive_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    output_final_state: bool = False,
) -> DeltaRuleOutput:
    """S_t = T_t S_{t-1} + b_t k_t v_t^T and z_t = S_t^T q_t (arguments in :mod:`kvlens.ops.delta_rule.types`)."""
    group = v.shape[2] // k.shape[2]
    maps = naive_token_maps(k, log_decay, write_strength, mask)
    k, log_decay, write_strength, (q, v) = masked(mask, k, log_decay, write_strength, q, v)
    S = starting_state(initial_state, v, k.shape[-1])
    outputs = []
    for t in range(v.shape[1]):
        key, query = (x[:, t].repeat_interleave(group, dim=1) for x in (k, q))
        S = maps[:, t] @ S + write_strength[:, t, :, None, None] * key[..., :, None] * v[:, t, :, None, :]
        outputs.append(torch.einsum("bhkd,bhk->bhd", S, query))
    z = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    return DeltaRuleOutput(z, S if output_final_state else None)


def naive_token_maps(
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> Float[Tensor, "batch pos head d_k d_k"]:
    """T_t = (I - b_t k_t k_t^T) Diag(a_t), the identity at padded positions."""
    k, log_decay, write_strength, _ = masked(mask, k, log_decay, write_strength)
    d_k = k.shape[-1]
    key = k.repeat_interleave(write_strength.shape[2] // k.shape[2], dim=2)
    decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None].expand(*log_decay.shape, d_k)).exp()
    removal = torch.eye(d_k, dtype=k.dtype) - write_strength[..., None, None] * key[..., :, None] * key[..., None, :]
    return removal * decay[..., None, :]


def naive_carried(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """kbar [batch, pos, head, d_k], qbar [batch, pos, head, d_k] and P [batch, head, d_k, d_k], as products of matrices."""
    maps = naive_token_maps(k, log_decay, write_strength, mask)
    k, log_decay, write_strength, (q,) = masked(mask, k, log_decay, write_strength, q)
    group, pos = write_strength.shape[2] // k.shape[2], k.shape[1]
    keys, queries = (x.repeat_interleave(group, dim=2) for x in (k, q))
    identity = torch.eye(k.shape[-1], dtype=k.dtype).expand(maps.shape[0], maps.shape[2], -1, -1)
    carried_k, carried_q = torch.zeros_like(keys), torch.zeros_like(queries)
    later = identity
    for j in reversed(range(pos)):
        carried_k[:, j] = torch.einsum("bhkc,bhc->bhk", later, write_strength[:, j, :, None] * keys[:, j])
        later = later @ maps[:, j]
    before = identity
    for i in range(pos):
        before = maps[:, i] @ before
        carried_q[:, i] = torch.einsum("bhkc,bhk->bhc", before, queries[:, i])
    return carried_k, carried_q, before


def naive_carried_delta_rule(
    q: Float[Tensor, "batch pos key_head d_k"],
    k: Float[Tensor, "batch pos key_head d_k"],
    v: Float[Tensor, "batch pos head d_v"],
    log_decay: Float[Tensor, "batch pos head *channel"],
    write_strength: Float[Tensor, "batch pos head"],
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch head d_k d_v"] | None = None,
    initial_map: Float[Tensor, "#batch head d_k d_k"] | None = None,
) -> CarriedOutput:
    """The context's own output and state, and what the tokens do to a bias before ``initial_map``."""
    output, final = naive_delta_rule(q, k, v, log_decay, write_strength, mask, initial_state, True)
    _, carried_q, state_map = naive_carried(q, k, log_decay, write_strength, mask)
    before = identity_state(v, k.shape[-1]) if initial_map is None else initial_map
    assert final is not None
    return CarriedOutput(output, torch.einsum("bihk,bhkc->bihc", carried_q, before), final, state_map @ before)
