"""LFM2's short convolution, which is a whole layer: no state matrix, only the inputs at the last tokens."""

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor, nn

from kvlens.mixers.protocol import Mixer, MixerInputs, RecurrentState
from kvlens.ops.linear_attention import without_padding
from kvlens.ops.short_convolution import short_convolution


class Lfm2Mixer(Mixer):
    """y_t = W_out (c_t * sum_s w_s b_{t-s} x_{t-s}), with b, c and x projected from the residual stream.

    It has no heads: ``hook_conv_state`` is the only hook point that fires.

    Source: LFM2 (2511.23404); Transformers' ``Lfm2ShortConv``.
    """

    serves = ("Lfm2ShortConv",)
    n_heads = n_key_heads = 0
    d_k = d_v = 1

    def __init__(self, module: nn.Module, layer: int) -> None:
        super().__init__(module, layer)
        held: Any = module
        self.conv_rows, self.conv_channels = held.conv_kernel_size - 1, held.conv.in_channels

    def forward(
        self,
        hidden_states: Float[Tensor, "batch pos d_model"],
        state: RecurrentState | None = None,
        mask: Bool[Tensor, "#batch pos"] | None = None,
    ) -> tuple[Float[Tensor, "batch pos d_model"], RecurrentState]:
        """See :class:`Mixer`."""
        module: Any = self.module
        state = RecurrentState() if state is None else state
        conv = hidden_states.new_zeros(1, self.conv_rows, self.conv_channels) if state.conv is None else state.conv
        hidden = hidden_states if mask is None else without_padding(hidden_states, mask)
        b, c, x = module.in_proj(hidden).chunk(3, dim=-1)
        weight = module.conv.weight.squeeze(1)
        mixed, rows = short_convolution(b * x, weight, module.conv.bias, mask, self.hook_conv_state(conv), True)
        none = hidden_states.new_zeros(len(hidden_states), 0, self.d_k, self.d_v)
        return module.out_proj(c * mixed), RecurrentState(state.b_kv, none, None, rows)

    def inputs(self, hidden_states: Tensor, conv: Tensor | None, mask: Tensor | None) -> MixerInputs:
        raise NotImplementedError("a short convolution has no recurrence")

    def finish(self, z: Tensor, gate: Tensor | None) -> Tensor:
        raise NotImplementedError("a short convolution has no recurrence")
