"""The short convolution, the obvious form: token by token, over a list of the real rows so far."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.short_convolution.convolution import ShortConvolutionOutput


def naive_short_convolution(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel kernel"],
    bias: Float[Tensor, " channel"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch rows channel"] | None = None,
    output_final_state: bool = False,
) -> ShortConvolutionOutput:
    """y_t = sum_s w_{K-1-s} x_{t-s} + bias over the real tokens of each row."""
    batch, pos, channels = x.shape
    kernel = weight.shape[1]
    output = torch.zeros_like(x)
    last = []
    for b in range(batch):
        past = [x.new_zeros(channels)] * (kernel - 1)
        if initial_state is not None:
            past = list(initial_state[b if initial_state.shape[0] > 1 else 0])
        for t in range(pos):
            if mask is not None and not mask[b if mask.shape[0] > 1 else 0, t]:
                continue
            past = [*past, x[b, t]]
            window = torch.stack(past[len(past) - kernel :], dim=1)
            output[b, t] = (window * weight).sum(1) + (0 if bias is None else bias)
        last.append(torch.stack(past[len(past) - kernel + 1 :]) if kernel > 1 else x.new_zeros(0, channels))
    return ShortConvolutionOutput(output, torch.stack(last) if output_final_state else None)
