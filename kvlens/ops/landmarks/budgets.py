"""How many keys each head gets."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import checked


@checked
def greedy_budgets(
    gain: Float[Tensor, "layer batch kv_head r"], total: Int[Tensor, " batch"]
) -> Int[Tensor, "layer batch kv_head"]:
    """Keys per head so that the sum of removed errors is largest, ``total`` keys per prompt.

    One key after the other goes to the head where it removes most. A key that opens the way for a better one counts as much
    as that one does (the gains' running maximum from the right), so that no head stops at a small step before a large one.

    Args:
        gain: what the first, second, ... key removes, in one unit for all heads; heads end where their keys do.
        total: of each prompt.
    """
    ahead = gain.flip(-1).cummax(dim=-1).values.flip(-1)
    flat = ahead.transpose(0, 1).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    given = (rank < total[:, None]) & (flat > 0)
    return given.view(gain.shape[1], gain.shape[0], *gain.shape[2:]).transpose(0, 1).sum(dim=-1)
