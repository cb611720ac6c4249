"""MiniMax' lightning attention: linear attention with a fixed decay by head and layer, a norm across heads, and a gate."""

from typing import Any

import torch
from torch import Tensor, nn

from kvlens.mixers.protocol import Mixer, MixerInputs
from kvlens.mixers.rules import Lightning


class MiniMaxMixer(Mixer):
    """q, k, v after SiLU; no rotary positions, no normalizer, no convolution.

    Source: MiniMax-01 (2501.08313), sec. 2.2; Transformers' ``MiniMaxLightningAttention``.
    """

    serves = ("MiniMaxLightningAttention",)
    rule = Lightning()

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__(module, layer)
        held: Any = module
        self.n_heads = self.n_key_heads = held.num_attention_heads
        self.d_k = self.d_v = held.head_dim

    def as_module_returns(self, output: Tensor) -> tuple[Tensor, None]:
        return output, None

    def is_in_cache(self, cache: Any) -> bool:
        index, held = getattr(self.module, "layer_idx", self.layer), getattr(cache, "linear_cache", ())
        return index < len(held) and isinstance(held[index], Tensor)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module: Any = self.module
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        qkv = module.act_fn(module.qkv_proj(hidden_states)).unflatten(-1, (self.n_heads, 3 * self.d_k)).to(wide)
        q, k, v = qkv.split(self.d_k, dim=-1)
        log_decay = -module.slope_rate.flatten().to(wide)
        return MixerInputs(q, k, v, log_decay, None, module.output_gate(hidden_states).sigmoid(), None)

    def finish(self, z: Tensor, gate: Tensor | None) -> Tensor:
        module: Any = self.module
        assert gate is not None
        output: Tensor = module.out_proj((gate * module.norm(z.flatten(2))).to(gate.dtype))
        return output
