"""Heads of different sizes in one tensor, as in a layer that has both attention and a recurrent state."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def joined_heads(parts: Sequence[Float[Tensor, "..."]], dim: int = -2) -> Float[Tensor, "..."]:
    """Concatenate along the axis of heads; narrower vectors are padded with zeros, which add nothing to a product.

    Args:
        parts: equal in shape except along the axis of heads and the axis after it, which is padded.
        dim: the axis of heads, counted from the end; nothing is padded if it is the last.
    """
    if len(parts) == 1:
        return parts[0]
    if dim < -1:
        widest = max(part.shape[dim + 1] for part in parts)
        after = [0, 0] * (-dim - 2)
        parts = [torch.nn.functional.pad(part, (*after, 0, widest - part.shape[dim + 1])) for part in parts]
    return torch.cat(list(parts), dim=dim)
