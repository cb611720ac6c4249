"""A short causal convolution with one filter per channel; the activation is left to the caller.

    y_t = sum_{s=0..K-1} w_{K-1-s} x_{t-s} + bias        (torch's order: the last weight multiplies the current token)

It is the KV shift (:mod:`kvlens.ops.kv_shift`) with one coefficient vector per channel: before the first token come zeros or
the raw rows of what came before, and the predecessor of a token is the previous real token, however many padded positions
lie in between.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import checked
from kvlens.errors import KVLensError
from kvlens.ops.kv_shift import kv_shift


class ShortConvolutionOutput(NamedTuple):
    """The convolved rows, and the last K - 1 raw rows of [initial state; real tokens] if they were requested."""

    output: Float[Tensor, "batch pos channel"]
    final_state: Float[Tensor, "batch rows channel"] | None


@checked
def short_convolution(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel kernel"],
    bias: Float[Tensor, " channel"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch rows channel"] | None = None,
    output_final_state: bool = False,
) -> ShortConvolutionOutput:
    """Convolve each channel with its own filter.

    Args:
        x: raw rows.
        weight: one filter per channel; column K - 1 multiplies the current token.
        bias: added to each row.
        mask: True at real tokens; None if there is no padding. The output is zero at padded positions.
        initial_state: the raw K - 1 rows before the first token, oldest first; zeros if None.
        output_final_state: whether the last K - 1 raw rows are returned.

    Raises:
        KVLensError: ``initial_state`` does not have K - 1 rows.
    """
    rows = weight.shape[1] - 1
    if initial_state is None:
        initial_state = x.new_zeros(1, rows, x.shape[2])
    if initial_state.shape[1] != rows:
        raise KVLensError(
            f"short_convolution: a kernel of {rows + 1} needs an initial state of {rows} rows, got {initial_state.shape[1]}"
        )
    initial_state = initial_state.to(x).expand(x.shape[0], -1, -1)
    if mask is not None:
        taps = weight.to(x).flip(-1)
        mixed, last = kv_shift(x[..., None], taps, initial_state[..., None], mask.expand(x.shape[0], -1))
        output = mixed.squeeze(-1) if bias is None else torch.where(mask[..., None], mixed.squeeze(-1) + bias.to(x), 0.0)
        return ShortConvolutionOutput(output, last.squeeze(-1) if output_final_state else None)
    extended = torch.cat([initial_state, x], dim=1)
    filters, added = weight.to(x).unsqueeze(1), None if bias is None else bias.to(x)
    output = torch.nn.functional.conv1d(extended.transpose(1, 2), filters, added, groups=x.shape[2]).transpose(1, 2)
    return ShortConvolutionOutput(output, extended[:, x.shape[1] :].clone() if output_final_state else None)
