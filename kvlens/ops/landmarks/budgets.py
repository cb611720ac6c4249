"""How many keys each head gets, and how far the paths have to go by which keys are chosen.

Keys are given to the heads where they remove most error: all steps of all paths whose gain is above one waterline. A path whose
gains have sunk below it gets no more keys, so it need not go on, and a lower bound of the waterline is known as soon as some
paths are. A gain may rise again: the *level* of a step is the largest gain of the next :data:`AHEAD` steps, and never above the
level of an earlier step.
"""

from collections.abc import Callable, Sequence

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.ops.landmarks.choice import AHEAD, Chosen

FIRST_STEPS = 4
"""A path's first part has this many times the average number of keys; only those still above the waterline then go on."""


def levels(gain: Float[Tensor, "*cell r"]) -> Float[Tensor, "*cell r"]:
    """The gains as they decide on budgets: never rising, and no lower than a gain that soon follows."""
    padded = torch.nn.functional.pad(gain, (0, AHEAD - 1))
    return padded.unfold(-1, AHEAD, 1).amax(dim=-1).cummin(dim=-1).values


def by_prompt(gains: Sequence[Float[Tensor, "cell _"]], batch: int) -> Float[Tensor, "batch layer kv_head r"]:
    """Levels of all layers; where a path has ended, 0."""
    longest = max(gain.shape[-1] for gain in gains)
    padded = [torch.nn.functional.pad(levels(gain), (0, longest - gain.shape[-1])) for gain in gains]
    return rearrange(torch.stack(padded), "l (b g) r -> b l g r", b=batch)


def waterline(gains: Sequence[Float[Tensor, "cell _"]], total: Int[Tensor, " batch"]) -> Float[Tensor, " batch"]:
    """The level of the last key that a prompt gets, if there were no other paths: a lower bound if there are."""
    if not gains:
        return torch.zeros(len(total), dtype=torch.float64, device=total.device)
    sunk = by_prompt(gains, len(total)).flatten(1).sort(dim=1, descending=True).values
    last = sunk.gather(1, (total[:, None] - 1).clamp(max=sunk.shape[1] - 1)).squeeze(1)
    return torch.where(total <= sunk.shape[1], last, 0.0)


def budgets_by_gain(
    gains: Sequence[Float[Tensor, "cell _"]], total: Int[Tensor, " batch"]
) -> Int[Tensor, "layer batch kv_head"]:
    """Keys per head that maximize the error removed: the ``total`` highest levels of each prompt.

    Args:
        gains: of each layer, the error that the first, second, ... key removes, in the same unit for all heads.
        total: keys per prompt.
    """
    level = by_prompt(gains, len(total))
    flat = level.flatten(1)
    order = flat.argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(1, order, torch.arange(order.shape[1], device=order.device).expand_as(order))
    given = (rank < total[:, None]) & (flat > 0)
    return given.view(level.shape).sum(dim=-1).transpose(0, 1)


def lazy_paths(
    path: Callable[[int, int, Tensor], Chosen], n_layers: int, n_keys: int, wanted: Int[Tensor, " batch"], n_kv_heads: int
) -> list[Chosen]:
    """The paths of all heads, as far as they get keys: cut at the waterline, they are the whole paths cut there.

    Args:
        path: of a layer, the path of at most so many steps, which may end where its levels are below a number for each prompt.
        n_keys: steps of a whole path.
        wanted: keys per head, on average, of each prompt.
    """
    total, first = wanted * n_layers * n_kv_heads, min(n_keys, FIRST_STEPS * int(wanted.max()))
    found: list[Chosen] = []
    for layer in range(n_layers):
        found.append(path(layer, first, waterline([each.gain for each in found], total)))
    for layer, short in enumerate(found):
        floor = waterline([each.gain for each in found], total)
        ends = levels(short.gain)[:, -AHEAD].unflatten(0, (len(wanted), -1)) if short.gain.shape[1] >= AHEAD else floor[:, None]
        if short.gain.shape[1] == first < n_keys and bool((ends >= floor[:, None]).any()):
            found[layer] = path(layer, n_keys, floor)
    return found
