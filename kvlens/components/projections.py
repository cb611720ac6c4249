"""Queries, keys and values from the residual stream: x W + b for each head."""

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

NO_COPY_ROWS = 16
"""With at most this many tokens over all rows, copying a weight matrix costs more than the product with it."""


def project_heads(
    x: Float[Tensor, "batch pos d_model"], weight: Float[Tensor, "head d_model d_head"], bias: Float[Tensor, "head d_head"]
) -> Float[Tensor, "batch pos head d_head"]:
    """x W + b per head: for many tokens one product with all heads' weights (as in TransformerLens), for few one per head."""
    batch, pos = x.shape[:2]
    if batch * pos > NO_COPY_ROWS:
        together = rearrange(weight, "head d_model d_head -> d_model (head d_head)")
        return linear(x, together.T, bias.flatten()).unflatten(-1, bias.shape)
    rows = x.reshape(1, batch * pos, -1).expand(weight.shape[0], -1, -1)
    by_head = torch.baddbmm(bias[:, None], rows, weight)  # [head, batch x pos, d_head]; einops would take a tenth of the time
    return by_head.transpose(0, 1).reshape(batch, pos, *bias.shape)
