"""The short causal convolution in front of a recurrent layer, one filter per channel; the activation is left to the caller.

    y_t = sum_{s=0..K-1} w_{K-1-s} x_{t-s} + bias        (torch's order: the last weight multiplies the current token)

Before the first token come zeros or the raw rows of what came before, and the predecessor of a token is the previous real
token, however many padded positions lie in between: the real tokens are moved together, convolved and moved back, and so
round as they do without padding. First the naive form, token by token, then the fast one.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError

Convolved = tuple[Float[Tensor, "batch pos channel"], Float[Tensor, "batch rows channel"] | None]
"""The convolved rows, and the last K - 1 raw rows of [initial state; real tokens] if they were requested."""


def naive_short_convolution(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel kernel"],
    bias: Float[Tensor, " channel"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch rows channel"] | None = None,
    output_final_state: bool = False,
) -> Convolved:
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
    return output, torch.stack(last) if output_final_state else None


def short_convolution(
    x: Float[Tensor, "batch pos channel"],
    weight: Float[Tensor, "channel kernel"],
    bias: Float[Tensor, " channel"] | None = None,
    mask: Bool[Tensor, "#batch pos"] | None = None,
    initial_state: Float[Tensor, "#batch rows channel"] | None = None,
    output_final_state: bool = False,
) -> Convolved:
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
    if not x.shape[1]:
        return x, initial_state.clone() if output_final_state else None
    order = None if mask is None else _real_tokens_first(mask.expand(x.shape[0], -1))
    extended = torch.cat([initial_state, x if order is None else _taken(x, order)], dim=1)
    filters, added = weight.to(x).unsqueeze(1), None if bias is None else bias.to(x)
    output = torch.nn.functional.conv1d(extended.transpose(1, 2), filters, added, groups=x.shape[2]).transpose(1, 2)
    if mask is None or order is None:
        return output, extended[:, x.shape[1] :].clone() if output_final_state else None
    output = torch.where(mask[..., None], _taken(output, order.argsort(dim=1)), 0.0)
    last = mask.expand(x.shape[0], -1).sum(dim=1, keepdim=True) + torch.arange(rows, device=x.device)
    return output, _taken(extended, last) if output_final_state else None


def _real_tokens_first(mask: Bool[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """The order of positions in which the real tokens of each row stand together, as if there were no padding."""
    return (~mask).long().argsort(dim=1, stable=True)


def _taken(x: Float[Tensor, "batch pos channel"], index: Int[Tensor, "batch taken"]) -> Float[Tensor, "batch taken channel"]:
    """The rows of ``x`` at ``index``."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


doors(__name__)
