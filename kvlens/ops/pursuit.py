"""Which of a prompt's keys to keep, and how many per head: orthogonal matching pursuit on normalizer and output together.

In this order: the naive forms; which keys (:func:`choose_keys`, from the statistics of :mod:`kvlens.ops.landmarks`, which fits
their weights and values); how many per head (:func:`budgets_by_gain`), and how far the paths have to go (:func:`lazy_paths`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.memory import NUMBERS_AT_ONCE, by_device
from kvlens.ops.landmarks import (
    Gram,
    Products,
    PromptKeys,
    Queries,
    Statistics,
    as_rows,
    by_cell,
    cells_of,
    concatenated,
    statistics,
)

# The references: every fit solved from scratch from its rows. For small problems.


def naive_choose_keys(
    psi: Float[Tensor, "row key"], p: Float[Tensor, " row"], a: Float[Tensor, "row d"], z: Float[Tensor, "row d"], r: int
) -> tuple[list[int], list[float]]:
    """Orthogonal matching pursuit: each step takes the key that leaves least of [a, kappa |z| p] after refitting all keys.

    ``a`` and ``z`` are measured in the metric of outputs. Returns the keys, and the mean squared error that each one removed.
    """
    size = z.square().sum(dim=1).mean().sqrt()
    target = torch.cat([a, KAPPA * size * p[:, None]], dim=1)
    chosen: list[int] = []
    gains: list[float] = []
    left = float(target.square().sum())
    for _ in range(r):
        free = [j for j in range(psi.shape[1]) if j not in chosen]
        after = {j: _left_of(target, psi[:, [*chosen, j]]) for j in free}
        best = min(free, key=after.__getitem__)
        chosen.append(best)
        gains.append((left - after[best]) / len(psi))
        left = after[best]
    return chosen, gains


def naive_greedy_budgets(gain: Float[Tensor, "head r"], total: int) -> Int[Tensor, " head"]:
    """Keys per head: of all ways to distribute ``total`` keys, the one that removes most error."""
    counts = torch.cartesian_prod(*[torch.arange(gain.shape[1] + 1)] * len(gain))
    counts = counts[counts.sum(dim=1) == total]
    removed = [sum(float(gain[head, :n].sum()) for head, n in enumerate(c.tolist())) for c in counts]
    return counts[max(range(len(counts)), key=removed.__getitem__)]


def _left_of(target: Tensor, columns: Tensor) -> float:
    """Squared error of the best linear combination of columns."""
    return float((target - columns @ torch.linalg.lstsq(columns, target).solution).square().sum())


# Which keys.
#
# Each step takes the key that, with all earlier ones refitted, explains most of [a R, kappa |z| p]. The steps are those of a
# pivoted Cholesky decomposition of the Gram matrix of the shares, so r steps cost M r^2 per key-value head. On stories260K (128
# tokens, 8 keys per head, equal budgets) the error of the logits after the same fit is 1.6 %, with keys chosen by the
# normalizer alone 2.1 %, with those of most attention 2.7 %.

KAPPA = 0.5
"""Weight of the normalizer's error relative to the output's. 0.25 to 1 differ by a few percent; 2 is 10 % worse."""
FEW_STEPS = 64
"""Steps for which there is room at first; twice as many where a path goes on."""
AHEAD = 8
"""A path ends where so many gains in a row are too small."""


class Chosen(NamedTuple):
    """Keys in the order in which they were chosen.

    Attributes:
        keys: indices into the prompt's keys.
        gain: the mean squared error that each one removed.
    """

    keys: Int[Tensor, "cell r"]
    gain: Float[Tensor, "cell r"]


LayerOfKeys = tuple[Queries, PromptKeys, Float[Tensor, "batch kv_head d_head d_head"]]


def choose_among(
    layers: Sequence[LayerOfKeys],
    r: int,
    floor: Float[Tensor, " batch"] | None = None,
    before: Sequence[Chosen] | None = None,
) -> list[Chosen]:
    """The first ``r`` keys of every head of some layers, in one path of them all, which is long enough for each; of long
    prompts, one head at a time (:func:`~kvlens.ops.landmarks.by_cell`).

    Arguments as in :func:`~kvlens.ops.landmarks.statistics` for each layer, and :func:`choose_keys`, ``floor`` for each prompt.
    ``before`` are shorter paths; those that have ended are not followed again where heads are followed by themselves.
    """
    queries, prompt, _ = layers[0]
    batch, kv_heads, n_keys, _ = prompt.keys.shape
    cells, floors = batch * kv_heads, None if floor is None else floor.repeat_interleave(kv_heads)
    if not by_cell(cells, queries.log_n[0].numel() // kv_heads, n_keys, queries.q.device):
        every = [statistics(*each) for each in layers]
        found = choose_keys(_together(every), r, None if floors is None else floors.repeat(len(layers)))
        return [Chosen(*each) for each in zip(*(x.split(cells) for x in found), strict=True)]
    known: Sequence[Chosen | None] = before or [None] * len(layers)
    return [_head_by_head(*each, r, floors, short) for each, short in zip(layers, known, strict=True)]


def _together(every: Sequence[Statistics]) -> Statistics:
    """The statistics of layers whose heads' keys are chosen at once."""
    if len(every) == 1:
        return every[0]
    gram = Products(torch.cat([each.gram.products for each in every]))  # type: ignore[union-attr]
    with_p, with_a = torch.cat([each.with_p for each in every]), torch.cat([each.with_a for each in every])
    return Statistics(gram, with_p, with_a, torch.cat([each.z_size for each in every]), every[0].n_rows)


def _head_by_head(
    queries: Queries, prompt: PromptKeys, root_metric: Tensor, r: int, floors: Tensor | None, before: Chosen | None
) -> Chosen:
    found = []
    for cell, own in enumerate(cells_of(queries, prompt)):
        if before is not None and floors is not None and not bool(_goes_on(before.gain, floors)[cell]):
            found.append(Chosen(*(x[cell : cell + 1] for x in before)))
            continue
        root = root_metric.flatten(0, 1)[cell][None, None]
        found.append(choose_keys(statistics(*own, root), r, None if floors is None else floors[cell : cell + 1]))
    longest = max(each.gain.shape[1] for each in found)
    return concatenated((Chosen(*(F.pad(x, (0, longest - x.shape[1])) for x in each)) for each in found), Chosen)


def layers_at_once(queries: Queries, n_kv_heads: int, n_keys: int) -> int:
    """For how many layers keys are chosen at once: on a CPU one at a time, so that what is read repeatedly stays in its cache;
    on an accelerator, where the time goes into starting many small steps, as many as the memory budget allows.
    """
    batch, n_queries, n_heads = queries.log_n.shape
    if queries.q.device.type == "cpu" or as_rows(n_queries * n_heads // n_kv_heads, n_keys):
        return 1
    return max(1, by_device(NUMBERS_AT_ONCE, queries.q.device) // (batch * n_kv_heads * n_keys**2))


def choose_keys(sums: Statistics, r: int, floor: Float[Tensor, " cell"] | None = None) -> Chosen:
    """The first ``r`` keys by matching pursuit, or fewer, if before that the gains of every cell are below ``floor``."""
    with_p = sums.with_p[..., None]
    target = torch.cat([sums.with_a, KAPPA * sums.z_size[:, None, None] * with_p], dim=-1)
    none = target.new_full((len(target),), -torch.inf)
    index, gain = _matching_pursuit(sums.gram, target, r, none if floor is None else floor * sums.n_rows)
    return Chosen(index, gain / sums.n_rows)


def _matching_pursuit(
    gram: Gram, target: Float[Tensor, "cell key d"], r: int, least: Float[Tensor, " cell"]
) -> tuple[Int[Tensor, "cell r"], Float[Tensor, "cell r"]]:
    """Choose, one at a time, the key whose residual column explains most of the residual target.

    ``columns`` are those of the Cholesky factor, and ``rows`` is what each removes from the target: the residual Gram matrix is
    gram - columns^T columns, and the residual target is target - columns^T rows. Neither is formed; only the squared lengths
    of their rows are updated.
    """
    cells, n_keys, d = target.shape
    device = target.device
    every = torch.arange(cells, device=device)
    left, size = gram.diagonal(), target.square().sum(dim=-1)
    floor = 1e-9 * left.amax(dim=-1, keepdim=True) + torch.finfo(target.dtype).tiny
    columns, rows = target.new_zeros(cells, min(r, FEW_STEPS), n_keys), target.new_zeros(cells, r, d)
    index, gain = torch.zeros(cells, r, dtype=torch.long, device=device), target.new_zeros(cells, r)
    taken = torch.zeros(cells, n_keys, dtype=torch.bool, device=device)
    for step in range(r):
        if step == columns.shape[1]:
            columns = torch.cat([columns, columns.new_zeros(cells, min(step, r - step), n_keys)], dim=1)
        explained = torch.where(left > floor, size / left.clamp(min=floor), 0.0).masked_fill_(taken, -1.0)
        gain[:, step], j = explained.max(dim=-1)
        root = left[every, j].clamp(min=floor[:, 0]).sqrt()[:, None]
        earlier, before = columns[:, :step], columns[every, :step, j][:, None]
        row = (target[every, j] - (before @ rows[:, :step]).squeeze(1)) / root
        along = (rows[:, :step] @ row[..., None]).mT
        taken_out, met = (torch.cat([before, along], dim=1) @ earlier).unbind(dim=1)
        column = (gram.column(j) - taken_out) / root
        along_row = (target @ row[..., None]).squeeze(-1) - met
        size = (size + column * (column * row.square().sum(dim=-1, keepdim=True) - 2 * along_row)).clamp_(min=0)
        left -= column.square()
        columns[:, step], rows[:, step], index[:, step] = column, row, j
        taken[every, j] = True
        some = slice(step + 1 - AHEAD, step + 1)
        if (step + 1) % AHEAD == 0 and bool((gain[:, some].amax(dim=1) < least).all()):
            return index[:, : step + 1], gain[:, : step + 1]
    return index, gain


# How many keys each head gets, and how far the paths have to go by which keys are chosen.
#
# Keys are given to the heads where they remove most error: all steps of all paths whose gain is above one waterline. A path
# whose gains have sunk below it gets no more keys, so it need not go on, and a lower bound of the waterline is known as soon as
# some paths are. A gain may rise again: the *level* of a step is the largest gain of the next `AHEAD` steps, and never above
# the level of an earlier step.

FIRST_STEPS = 4
"""A path's first stretch has this many times the average number of keys; only those still above the waterline then go on."""


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
    return reduce(given.long(), "b (l g r) -> l b g", "sum", l=level.shape[1], g=level.shape[2])


def lazy_paths(
    path: Callable[[Sequence[int], int, Tensor, Sequence[Chosen] | None], list[Chosen]],
    n_layers: int,
    n_keys: int,
    wanted: Int[Tensor, " batch"],
    n_kv_heads: int,
    at_once: int = 1,
) -> list[Chosen]:
    """The paths of all heads, as far as they get keys: cut at the waterline, they are the whole paths cut there.

    Args:
        path: of some layers, the paths of at most so many steps, which may end where their levels are below a number for each
            prompt; and shorter ones, if there are any.
        n_keys: steps of a whole path.
        wanted: keys per head, on average, of each prompt.
        at_once: with how many layers ``path`` is called.
    """
    total, first = wanted * n_layers * n_kv_heads, min(n_keys, FIRST_STEPS * int(wanted.max()))
    found: list[Chosen] = []
    for start in range(0, n_layers, at_once):
        some = list(range(start, min(start + at_once, n_layers)))
        found += path(some, first, waterline([each.gain for each in found], total), None)
    waiting = list(range(n_layers)) if first < n_keys else []
    while True:
        floor = waterline([each.gain for each in found], total)
        floors = floor.repeat_interleave(n_kv_heads)
        waiting = [i for i in waiting if found[i].gain.shape[1] == first and bool(_goes_on(found[i].gain, floors).any())]
        if not waiting:
            return found
        some, waiting = waiting[:at_once], waiting[at_once:]
        for layer, longer in zip(some, path(some, n_keys, floor, [found[i] for i in some]), strict=True):
            found[layer] = longer


def _goes_on(gain: Float[Tensor, "cell r"], floor: Float[Tensor, " cell"]) -> Bool[Tensor, " cell"]:
    """Which paths end above the waterline, so that the next key may be above it, too."""
    return levels(gain)[:, -AHEAD] >= floor if gain.shape[1] >= AHEAD else torch.ones_like(floor, dtype=torch.bool)


doors(__name__)
