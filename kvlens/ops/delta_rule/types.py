"""What the forms of the delta rule share: one set of arguments, one layout, one return.

    S_t = T_t S_{t-1} + b_t k_t v_t^T        z_t = S_t^T q_t        T_t = (I - b_t k_t k_t^T) Diag(a_t)

The state first decays, then loses b_t times what the key reads from it, then gains b_t times the value. ``a_t`` is one number
per head in the gated delta rule (Yang et al. 2412.06464) and one per head and key channel in Kimi delta attention (Kimi Linear,
2510.26692). With equal channels the second reduces to the first, so one set of functions serves both. Removing before decaying
would be a different rule.

Arguments of every form, in this order:

- ``q``, ``k`` [batch, pos, key_head, d_k]: normalized and scaled by the caller; ``head`` is a multiple of ``key_head``, and
  value head h reads key head h // (head / key_head);
- ``v`` [batch, pos, head, d_v];
- ``log_decay`` [batch, pos, head] or [batch, pos, head, d_k]: log a_t, at most 0; a step below -100 counts as -100 in the fast
  forms (e^-100 is 4e-44);
- ``write_strength`` [batch, pos, head]: b_t, from 0 to 2 for keys of norm 1;
- ``mask`` [batch, pos]: True at real tokens, None for no padding. Padded positions do not change the state, and read zeros;
- ``initial_state`` [batch or 1, head, d_k, d_v]: what came before, or None for zeros;
- ``output_final_state``: whether the state after the last real token is returned (flash-linear-attention's names).

The forms: ``naive`` (a matrix T_t per token, the reference), ``recurrent`` (O(1) per token, for decoding),
``chunked`` (matrix products). No form changes its arguments in place. Inputs should be in float32 or better.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.linear_attention.state import without_padding

LOWEST_LOG_DECAY = -100.0
"""A factor e^-100 = 4e-44 erases a state in any precision, while sums of such steps keep their digits and avoid -inf."""


class DeltaRuleOutput(NamedTuple):
    """z per token, and the state after the last real token if it was requested."""

    output: Float[Tensor, "batch pos head d_v"]
    final_state: Float[Tensor, "batch head d_k d_v"] | None


class CarriedOutput(NamedTuple):
    """z without a bias, what each query reads from a bias, the state without a bias, and the map that acts on a bias.

    With a bias b_KV before the first token, z = output + b_KV^T carried_q and S = final_state + state_map b_KV.
    """

    output: Float[Tensor, "batch pos head d_v"]
    carried_q: Float[Tensor, "batch pos head d_k"]
    final_state: Float[Tensor, "batch head d_k d_v"]
    state_map: Float[Tensor, "batch head d_k d_k"]

    @classmethod
    def split(cls, z: Tensor, final: Tensor, d_v: int) -> "CarriedOutput":
        """Split what was read from a :func:`state_with_map`, and the final one, into the parts of the state and of the map."""
        return cls(z[..., :d_v], z[..., d_v:], final[..., :d_v], final[..., d_v:])


def masked(
    mask: Tensor | None, k: Tensor, log_decay: Tensor, write_strength: Tensor, *reads: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """The arguments with zeros at padded positions: a padded token has T = I and writes nothing."""
    if mask is None:
        return k, log_decay, write_strength, list(reads)
    k, log_decay, write_strength, *others = (without_padding(x, mask) for x in (k, log_decay, write_strength, *reads))
    return k, log_decay, write_strength, others


def starting_state(initial_state: Tensor | None, v: Tensor, d_k: int) -> Tensor:
    """``initial_state`` for each row of the batch, in v's dtype; zeros without one."""
    batch, _, n_heads, d_v = v.shape
    if initial_state is None:
        return v.new_zeros(batch, n_heads, d_k, d_v)
    return initial_state.to(v).expand(batch, -1, -1, -1)


def state_with_map(initial_state: Tensor | None, initial_map: Tensor | None, v: Tensor, d_k: int) -> Tensor:
    """[S, P] side by side: P obeys the recurrence of S without the writes, so it can be appended as further columns of S."""
    before = identity_state(v, d_k) if initial_map is None else initial_map.to(v).expand(v.shape[0], -1, -1, -1)
    return torch.cat([starting_state(initial_state, v, d_k), before], dim=-1)


def identity_state(v: Tensor, d_k: int) -> Tensor:
    """I for each row and head: the map of no tokens."""
    return torch.eye(d_k, dtype=v.dtype, device=v.device).expand(v.shape[0], v.shape[2], -1, -1)
