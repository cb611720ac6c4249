"""How many keys each head gets."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def greedy_budgets(
    gain: Float[Tensor, "layer batch kv_head r"], total: Int[Tensor, " batch"]
) -> Int[Tensor, "layer batch kv_head"]:
    """Keys per head that maximize the total error removed, ``total`` keys per prompt.

    Keys are assigned one at a time to the head where the next key removes most. A key that enables a better one counts as much
    as that one (a running maximum of the gains from the right), so that no head stops at a small gain before a large one.

    Args:
        gain: error removed by the first, second, ... key, in the same unit for all heads.
        total: keys per prompt.
    """
    ahead = gain.flip(-1).cummax(dim=-1).values.flip(-1)
    flat = ahead.transpose(0, 1).flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    given = (rank < total[:, None]) & (flat > 0)
    return given.view(gain.shape[1], gain.shape[0], *gain.shape[2:]).transpose(0, 1).sum(dim=-1)
