"""The common parts of all layers with a delta rule: projections, a short convolution, normalized keys, a gated norm."""

from abc import abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers.activations import ACT2FN

from kvlens.mixers.protocol import Mixer, MixerInputs
from kvlens.mixers.rules import DeltaRule
from kvlens.ops.short_convolution import short_convolution

NORM_EPS = 1e-6
"""Added to the squared norm of a key or query, as in flash-linear-attention's kernels and Transformers' torch forms."""


class Projected(NamedTuple):
    """A family's projections of the residual stream.

    Attributes:
        mixed: queries, keys and values concatenated, before the convolution.
        log_decay: log a_t, at most 0; per channel in KDA.
        write_strength: b_t.
        gate: gate of the norm's output, before its activation.
    """

    mixed: Float[Tensor, "batch pos channel"]
    log_decay: Float[Tensor, "batch pos head *d_k"]
    write_strength: Float[Tensor, "batch pos head"]
    gate: Float[Tensor, "batch pos head d_v"]


class DeltaMixer(Mixer):
    """A layer with the (gated) delta rule. A subclass defines its projections (:meth:`project`), norm and output."""

    rule = DeltaRule()
    norm_name = "norm"
    output_name = "out_proj"

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__(module, layer)
        held: Any = module
        self.n_key_heads, self.n_heads, self.d_k, self.d_v = self.sizes(held)
        self.conv_rows, self.conv_channels = held.conv_kernel_size - 1, held.conv_dim

    def sizes(self, module: Any) -> tuple[int, int, int, int]:
        """The numbers of key heads and heads, d_k and d_v."""
        return module.num_k_heads, module.num_v_heads, module.head_k_dim, module.head_v_dim

    @abstractmethod
    def project(self, module: Any, hidden_states: Float[Tensor, "batch pos d_model"]) -> Projected:
        """The family's own projections."""

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        module: Any = self.module
        projected = self.project(module, hidden_states)
        convolution = module.conv1d
        mixed, rows = short_convolution(
            projected.mixed, convolution.weight.squeeze(1), convolution.bias, mask, conv, output_final_state=True
        )
        wide = torch.promote_types(hidden_states.dtype, torch.float32)
        mixed = ACT2FN[module.activation](mixed).to(wide)
        keys, values = self.n_key_heads * self.d_k, self.n_heads * self.d_v
        q, k, v = mixed.split([keys, keys, values], dim=-1)
        q, k = (_normalized(x.unflatten(-1, (self.n_key_heads, self.d_k))) for x in (q, k))
        return MixerInputs(
            q * self.d_k**-0.5,
            k,
            v.unflatten(-1, (self.n_heads, self.d_v)),
            projected.log_decay.to(wide),
            projected.write_strength.to(wide),
            projected.gate,
            rows,
        )

    def finish(self, z: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        module: Any = self.module
        normed = getattr(module, self.norm_name)(z.reshape(-1, self.d_v), gate.reshape(-1, self.d_v))
        output: Tensor = getattr(module, self.output_name)(normed.reshape(*z.shape[:2], -1).to(gate.dtype))
        return output


def softplus_decay(module: Any, a: Float[Tensor, "batch pos head"]) -> Float[Tensor, "batch pos head"]:
    """log a_t = -e^{A_log} softplus(a + dt_bias), in float32 or better: half precision would make it -inf."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return -module.A_log.to(wide).exp() * torch.nn.functional.softplus(a.to(wide) + module.dt_bias.to(wide))


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)
