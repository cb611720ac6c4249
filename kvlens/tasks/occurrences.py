"""Where did this token stand before? The question behind every induction-like task."""

import torch
from jaxtyping import Int
from torch import Tensor


def previous_occurrence(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Return for each position the last earlier one that holds the same token, or -1.

    A stable sort puts equal tokens side by side in the order of their positions, so the neighbor to the left is the
    previous occurrence: length x log(length) work, and no length x length table.

    Args:
        tokens: of any range.
    """
    order = tokens.argsort(dim=1, stable=True)
    in_order = tokens.gather(1, order)
    repeats = in_order[:, 1:] == in_order[:, :-1]
    return torch.full_like(tokens, -1).scatter_(1, order[:, 1:], torch.where(repeats, order[:, :-1], -1))
