"""Qwen3-Next's gated delta rule: queries, keys, values and gate in one projection, interleaved by key head."""

from typing import Any

import torch
from torch import Tensor

from kvlens.mixers.delta import DeltaMixer, Projected, softplus_decay


class Qwen3NextMixer(DeltaMixer):
    """Source: Gated Delta Networks (Yang et al. 2412.06464); Transformers' ``Qwen3NextGatedDeltaNet``."""

    serves = ("Qwen3NextGatedDeltaNet",)

    def project(self, module: Any, hidden_states: Tensor) -> Projected:
        ordered = module.fix_query_key_value_ordering(module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states))
        q, k, v, gate, b, a = ordered
        mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
        return Projected(mixed, softplus_decay(module, a), b.sigmoid(), gate)
