"""Mamba-2's layers: a short convolution over x, B and C, the state-space recurrence, a skip connection and a gated norm."""

from typing import Any

import torch
from torch import Tensor, nn

from kvlens.mixers.protocol import Mixer, MixerInputs
from kvlens.mixers.rules import StateSpace
from kvlens.ops.linear_attention import without_padding
from kvlens.ops.short_convolution import short_convolution


class Mamba2Mixer(Mixer):
    """k is B, q is C (each of a group of heads), v is x, and the write strength is dt. D x_t is read at its own token alone and
    belongs to the context. Transformers stores the state transposed, [head, d_v, d_k].

    Source: Mamba-2 (2405.21060); Transformers' ``Mamba2Mixer``, and the same layer in Bamba, Granite 4, Nemotron-H and
    Falcon-H1, which also scales the projections.
    """

    serves = ("Mamba2Mixer", "BambaMixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer", "FalconH1Mixer")

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__(module, layer)
        held: Any = module
        self.n_heads, self.n_key_heads = held.num_heads, held.n_groups
        self.d_k, self.d_v = held.ssm_state_size, held.head_dim
        self.conv_rows, self.conv_channels = held.conv_kernel_size - 1, held.conv_dim

    @property
    def rule(self) -> StateSpace:  # type: ignore[override]
        """The recurrence with this layer's D."""
        module: Any = self.module
        return StateSpace(module.D)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module: Any = self.module
        x = hidden_states if mask is None else without_padding(hidden_states, mask)
        projected = module.in_proj(x * getattr(module, "ssm_in_multiplier", 1.0))
        if hasattr(module, "mup_vector"):
            projected = projected * module.mup_vector
        gate, mixed, dt = projected.split([module.intermediate_size, self.conv_channels, self.n_heads], dim=-1)
        convolution = module.conv1d
        mixed, rows = short_convolution(
            mixed, convolution.weight.squeeze(1), convolution.bias, mask, conv, output_final_state=True
        )
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        mixed = module.act(mixed).to(wide)
        keys = self.n_key_heads * self.d_k
        v, k, q = mixed.split([module.intermediate_size, keys, keys], dim=-1)
        k, q = (part.unflatten(-1, (self.n_key_heads, self.d_k)) for part in (k, q))
        write = torch.nn.functional.softplus(dt.to(wide) + module.dt_bias.to(wide)).clamp(*module.time_step_limit)
        log_decay = -module.A_log.to(wide).exp() * write
        return MixerInputs(q, k, v.unflatten(-1, (self.n_heads, self.d_v)), log_decay, write, gate, rows)

    def finish(self, z: Tensor, gate: Tensor | None) -> Tensor:
        module: Any = self.module
        assert gate is not None
        z = z.flatten(2)
        normed = module.norm(z, gate) if getattr(module, "mamba_rms_norm", True) else z * module.act(gate)  # not in Falcon-H1
        output: Tensor = module.out_proj(normed.to(gate.dtype))
        return output
