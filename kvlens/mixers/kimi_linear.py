"""Kimi delta attention: a decay per key channel, from a low-rank gate."""

from typing import Any

import torch
from torch import Tensor

from kvlens.mixers.delta import DeltaMixer, Projected


class KimiMixer(DeltaMixer):
    """Source: Kimi Linear (2510.26692), sec. 3; Transformers' ``KimiLinearDeltaAttention``."""

    serves = ("KimiLinearDeltaAttention",)
    norm_name = "o_norm"
    output_name = "o_proj"

    def sizes(self, module: Any) -> tuple[int, int, int, int]:
        return module.num_heads, module.num_heads, module.head_dim, module.head_dim

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        mixed = torch.cat([part(hidden_states) for part in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        gate = module.g_b_proj(module.g_a_proj(hidden_states)).unflatten(-1, (self.n_heads, self.d_v))
        return Projected(mixed, module.forget_gate(hidden_states), module.b_proj(hidden_states).sigmoid(), gate)
