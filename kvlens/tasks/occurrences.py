"""The previous occurrence of each token, which every induction-like task needs."""

import torch
from jaxtyping import Int
from torch import Tensor


def previous_occurrence(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Return for each position the last earlier position with the same token, or -1.

    A stable sort puts equal tokens next to each other in the order of their positions, so the left neighbor is the previous
    occurrence: O(length log(length)) work, and no length x length table.

    Args:
        tokens: token ids, of any range.
    """
    order = tokens.argsort(dim=1, stable=True)
    in_order = tokens.gather(1, order)
    repeats = in_order[:, 1:] == in_order[:, :-1]
    return torch.full_like(tokens, -1).scatter_(1, order[:, 1:], torch.where(repeats, order[:, :-1], -1))
