"""RoPE, the fast form."""

import torch
from jaxtyping import Float
from torch import Tensor


def rotate(
    x: Float[Tensor, "*lead d"],
    cos: Float[Tensor, "*#lead rotary_dim"],
    sin: Float[Tensor, "*#lead rotary_dim"],
    adjacent_pairs: bool = False,
) -> Float[Tensor, "*lead d"]:
    """Rotate the first ``rotary_dim`` features of ``x``; the others pass through. ``-sin`` rotates back.

    Args:
        x: row vectors in the last axis.
        cos, sin: rows of a :class:`RotaryTable`, broadcast over the axes before.
        adjacent_pairs: pairs (0, 1), (2, 3), ... as GPT-J does, instead of (i, i + rotary_dim / 2) as GPT-NeoX does.
    """
    rotary_dim = cos.shape[-1]
    turned = x[..., :rotary_dim]
    # the sign goes into the rows, which all heads share, not into the features
    if adjacent_pairs:
        flipped = torch.stack([turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
        sin = torch.stack([-sin[..., ::2], sin[..., 1::2]], dim=-1).flatten(-2)
    else:
        half = rotary_dim // 2
        flipped = torch.cat([turned[..., half:], turned[..., :half]], dim=-1)
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
    turned = torch.addcmul(turned * cos, flipped, sin)
    return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], dim=-1)
