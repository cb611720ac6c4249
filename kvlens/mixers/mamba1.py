"""Mamba-1's layers: a short convolution over x, the selective scan, a skip connection and a gate."""

from typing import Any

import torch
from torch import Tensor, nn

from kvlens.mixers.protocol import Mixer, MixerInputs
from kvlens.mixers.rules import Selective
from kvlens.ops.linear_attention import without_padding
from kvlens.ops.short_convolution import short_convolution


class Mamba1Mixer(Mixer):
    """Each channel is a head with a single value: k is B and q is C, which all of them share, v is the channel's x, and the
    write strength its dt. D x_t is read at its own token alone and belongs to the context.

    Source: Mamba (2312.00752), named as a further case of the conversion in ICLCA sec. 7; Transformers' ``MambaMixer``, and the
    same layer in Falcon-Mamba and Jamba, which also normalize dt, B and C.
    """

    serves = ("MambaMixer", "FalconMambaMixer", "JambaMambaMixer")
    n_key_heads = d_v = 1

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__(module, layer)
        held: Any = module
        self.n_heads, self.d_k = held.intermediate_size, held.ssm_state_size
        self.conv_rows, self.conv_channels = held.conv_kernel_size - 1, held.intermediate_size

    @property
    def rule(self) -> Selective:  # type: ignore[override]
        """The recurrence with this layer's D."""
        module: Any = self.module
        return Selective(module.D)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module: Any = self.module
        x = hidden_states if mask is None else without_padding(hidden_states, mask)
        mixed, gate = module.in_proj(x).chunk(2, dim=-1)
        convolution = module.conv1d
        mixed, rows = short_convolution(
            mixed, convolution.weight.squeeze(1), convolution.bias, mask, conv, output_final_state=True
        )
        v = module.act(mixed)
        v = v if mask is None else without_padding(v, mask)
        parts = module.x_proj(v).split([module.time_step_rank, self.d_k, self.d_k], dim=-1)
        norms = (getattr(module, f"{name}_layernorm", None) for name in ("dt", "b", "c"))  # Mamba itself has none
        dt, k, q = (part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True))
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        projected = torch.nn.functional.linear(dt, module.dt_proj.weight).to(wide)
        write = torch.nn.functional.softplus(projected + module.dt_proj.bias.to(wide))
        log_decay = -module.A_log.to(wide).exp() * write[..., None]
        k, q, v = k.to(wide)[:, :, None], q.to(wide)[:, :, None], v.to(wide)[..., None]
        return MixerInputs(q, k, v, log_decay, write, gate, rows)

    def finish(self, z: Tensor, gate: Tensor | None) -> Tensor:
        module: Any = self.module
        assert gate is not None
        output: Tensor = module.out_proj((z.squeeze(-1) * torch.nn.functional.silu(gate.to(z))).to(gate.dtype))
        return output
