"""Qwen3.5's gated delta rule, dense and with experts: Qwen3-Next's with separate projections."""

from typing import Any

from torch import Tensor

from kvlens.mixers.delta import DeltaMixer, Projected, softplus_decay


class Qwen35Mixer(DeltaMixer):
    """Source: Gated Delta Networks (Yang et al. 2412.06464); Transformers' ``Qwen3_5GatedDeltaNet``."""

    serves = ("Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        gate = module.in_proj_z(hidden_states).unflatten(-1, (self.n_heads, self.d_v))
        log_decay = softplus_decay(module, module.in_proj_a(hidden_states))
        return Projected(module.in_proj_qkv(hidden_states), log_decay, module.in_proj_b(hidden_states).sigmoid(), gate)
