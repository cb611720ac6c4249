"""OLMo-Hybrid's gated delta rule: separate projections, and a write strength of up to 2."""

from typing import Any

import torch
from torch import Tensor

from kvlens.mixers.delta import DeltaMixer, Projected, softplus_decay


class OlmoHybridMixer(DeltaMixer):
    """Source: Gated Delta Networks (Yang et al. 2412.06464); Transformers' ``OlmoHybridGatedDeltaNet``."""

    serves = ("OlmoHybridGatedDeltaNet",)
    norm_name = "o_norm"
    output_name = "o_proj"

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        mixed = torch.cat([part(hidden_states) for part in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        write = module.b_proj(hidden_states).sigmoid() * (2.0 if module.allow_neg_eigval else 1.0)
        gate = module.g_proj(hidden_states).unflatten(-1, (self.n_heads, self.d_v))
        return Projected(mixed, softplus_decay(module, module.a_proj(hidden_states)), write, gate)
