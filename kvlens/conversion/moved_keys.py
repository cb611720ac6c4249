"""Keys that move: a head's keys, their weights and values by gradient steps on the error of the head's own output.

The keys of a prompt are the only places that a subset can choose; keys at any place can do better. With keys k_r, weights w_r
and values u_r (shares, p, a, z and n as in :mod:`kvlens.ops.landmarks`),

    e_i = (sum_r psi_ir u_r - a_i - z_i (sum_r psi_ir - p_i)) / (1 - p_i + sum_r psi_ir),   psi_ir = w_r exp(s(q_i, k_r)) / n_i

is the error of the head's output, exactly, and the mean of |e_i R|^2 over the reference queries is minimized over k, log w and
u. It begins with the fit in closed form, takes no pass through the model, and ends with the values in closed form. An eighth of
the queries is left out and judges: a head for which their error does not fall keeps its fit, as does one that has every key.

New in kvlens; the gradients are in closed form (:func:`slopes`). Polishing (:mod:`kvlens.conversion.gradients`) moves the same
numbers by their effect on the logits.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.ops.landmarks import RESOLVED, LayerKeys, PromptKeys, Queries, Wanted, cells_of, fit_values, fit_weights
from kvlens.ops.softmax_features import distance_scores

MOVING_RATE = 3e-2
"""Of the first Adam step, relative to the size of a head's keys and of its values; of log-weights as it is."""
QUERIES_PER_STEP = 256
"""At most: queries are dealt into equal parts, of which each step reads one; all are read before one is read again."""
JUDGES = 8
"""One of so many queries judges."""
FIRST_MOMENT, SECOND_MOMENT, EPSILON = 0.7, 0.999, 1e-8
"""Adam's, but for a shorter memory of gradients: 100 steps are too few for 0.9."""
LARGEST_LOG_SHARE = 20.0
"""A key that moves may get any score on the way; its share stays finite."""


class Placed(NamedTuple):
    """The keys of one head at any place; ``values`` are weight times value, and ``distance`` is that from the text."""

    keys: Float[Tensor, "r d_key"]
    distance: Int[Tensor, " r"]
    weights: Float[Tensor, " r"]
    values: Float[Tensor, "r d_head"]

    def with_best_values(self, wanted: Wanted) -> "Placed":
        """Those in closed form, given keys and weights."""
        values = fit_values(wanted, self.keys, self.distance, self.weights.double(), self.values)
        return self._replace(values=values.to(self.values))


def fitted_layer(
    prompt: PromptKeys,
    queries: Queries,
    layer: LayerKeys,
    root_metric: Float[Tensor, "batch kv_head d_head d_head"],
    steps: int,
    seed: int,
) -> LayerKeys:
    """``layer``, some keys of the prompt, with fitted weights and values, then moved by ``steps`` gradient steps. A head that
    has every key keeps them as they are.

    Args:
        root_metric: R such that |e R| is the size of an output error e.
    """
    new = LayerKeys(*map(torch.clone, layer))
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        at = divmod(cell, prompt.keys.shape[1])
        used = layer.weights[at] > 0
        n_keys = keys.keys.shape[2] if keys.real is None else int(keys.real.sum())
        if 0 < int(used.sum()) < n_keys:
            found = fitted_head(Wanted.of(own, keys), Placed(*(x[at][used] for x in layer)), root_metric[at], steps, seed)
            for every, some in zip(new, found, strict=True):
                every[at][used] = some.to(every)
    return new


def fitted_head(wanted: Wanted, own: Placed, root_metric: Float[Tensor, "d_head d_head"], steps: int, seed: int) -> Placed:
    """One head's keys with weights and values in closed form, then moved where their weight is not 0."""
    weights = fit_weights(wanted, own.keys, own.distance).to(own.weights)
    start = own._replace(weights=weights, values=weights[:, None] * own.values).with_best_values(wanted)
    used = weights > 0
    if steps and bool(used.any()):
        found = moved(wanted, Placed(*(x[used] for x in start)), root_metric, steps, seed)
        for every, some in zip(start, found, strict=True):
            every[used] = some
    return start


def moved(wanted: Wanted, start: Placed, root_metric: Float[Tensor, "d_head d_head"], steps: int, seed: int) -> Placed:
    """The keys of one head after ``steps`` gradient steps, with values in closed form, or ``start`` if that is no better for
    queries that the steps did not read.

    Args:
        start: the fit in closed form, with positive weights.
        root_metric: R such that |e R| is the size of an output error e.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(wanted.p), generator=generator).to(start.distance.device)
    n_judges = len(order) // JUDGES
    if not n_judges:
        return start
    judging, read, root = wanted.part(order[:n_judges]), wanted.part(order[n_judges:]), root_metric.to(start.keys)
    found = descended(read, start, root, steps, generator)
    better = mean_square(judging, found.with_best_values(read), root) < mean_square(judging, start, root)
    return found.with_best_values(wanted) if better else start


def descended(
    read: Wanted, start: Placed, root: Float[Tensor, "d_head d_head"], steps: int, generator: torch.Generator
) -> Placed:
    """The keys after the steps of Adam, whether or not they are better. Each reads one part of the queries."""
    n_read, before = len(read.p), mean_square(read, start, root)
    size = math.ceil(n_read / math.ceil(n_read / QUERIES_PER_STEP))
    parts = [StepRows.of(read.part(slice(i, i + size)), start.distance, root) for i in range(0, n_read, size)]
    first = start.keys, start.weights.log()[:, None], start.values / start.weights[:, None]
    widths = [x.shape[1] for x in first]
    x = torch.cat(first, dim=1)
    units = torch.cat(
        [unit.expand(n) for unit, n in zip((_size(first[0]), x.new_ones(()), _size(first[2])), widths, strict=True)]
    )
    mean, square, order = torch.zeros_like(x), torch.zeros_like(x), list[int]()
    for step in range(steps):
        keys, log_weights, values = x.split(widths, dim=1)
        order = order or torch.randperm(len(parts), generator=generator).tolist()
        rows = parts[order.pop()]
        slope = units * torch.cat(slopes(rows, keys, log_weights[:, 0], values, root, read.rule.soft_cap), dim=1) / before
        mean.lerp_(slope, 1 - FIRST_MOMENT)
        square.mul_(SECOND_MOMENT).addcmul_(slope, slope, value=1 - SECOND_MOMENT)
        size_of_slope = (square / (1 - SECOND_MOMENT ** (step + 1))).sqrt_().add_(EPSILON)
        rate = MOVING_RATE * (1 + math.cos(math.pi * step / steps)) / 2 / (1 - FIRST_MOMENT ** (step + 1))
        x.addcdiv_(units * mean, size_of_slope, value=-rate)
    keys, log_weights, values = x.split(widths, dim=1)
    weights = log_weights[:, 0].exp()
    return start._replace(keys=keys, weights=weights, values=weights[:, None] * values)


def _size(x: Tensor) -> Float[Tensor, ""]:
    return x.square().mean().sqrt()


@dataclass(frozen=True, eq=False)
class StepRows:
    """What one step reads, a row for each query and head; outputs are times R.

    Attributes:
        q: queries by the scale of the scores.
        added: to the scores: what distance adds, less the logarithm of the normalizer.
        z: outputs.
        wanted: a - z p.
        rest: 1 - p.
    """

    q: Float[Tensor, "row d_key"]
    added: Float[Tensor, "row _"]
    z: Float[Tensor, "row d_head"]
    wanted: Float[Tensor, "row d_head"]
    rest: Float[Tensor, " row"]

    @classmethod
    def of(cls, read: Wanted, distance: Int[Tensor, " r"], root: Float[Tensor, "d_head d_head"]) -> "StepRows":
        queries, rule = read.queries, read.rule
        q, z, log_n = (x[0].flatten(0, 1) for x in (queries.q, queries.z, queries.log_n))
        added, p = -log_n[:, None], read.p.flatten()
        if rule.needs_distance:
            by_distance = distance_scores(rule, distance[None, None], queries.positions[None], queries.q.shape[2])
            added = added + rearrange(by_distance[0].to(q), "s i r -> (i s) r")
        z = z @ root
        return cls(q / rule.scale, added, z, read.a.flatten(0, 1) @ root - z * p[:, None], 1 - p)


def slopes(
    rows: StepRows,
    keys: Float[Tensor, "r d_key"],
    log_weights: Float[Tensor, " r"],
    values: Float[Tensor, "r d_head"],
    root: Float[Tensor, "d_head d_head"],
    soft_cap: float | None,
) -> tuple[Float[Tensor, "r d_key"], Float[Tensor, "r 1"], Float[Tensor, "r d_head"]]:
    """The gradient of the mean of |e R|^2 over some rows in closed form; a share at its limit counts as if it were not."""
    weights = log_weights.exp()
    stored = (weights[:, None] * values) @ root
    if soft_cap:
        capped = (rows.q @ keys.mT).div_(soft_cap).tanh_()
        scores = soft_cap * capped + rows.added
    else:
        scores = torch.addmm(rows.added, rows.q, keys.mT)
    psi = scores.clamp_(max=LARGEST_LOG_SHARE).exp_()
    mass = psi @ weights
    error = torch.addmm(rows.wanted, psi, stored, beta=-1).addcmul_(rows.z, mass[:, None], value=-1)
    whole = mass + rows.rest
    by = whole.clamp(min=RESOLVED)
    of_whole = error.square().sum(dim=1) / by.pow(3) * (whole > RESOLVED)
    error /= by.square()[:, None]
    of_mass = -(error * rows.z).sum(dim=1) - of_whole
    of_scores = (error @ stored.mT).addr_(of_mass, weights).mul_(psi)
    if soft_cap:
        of_scores *= 1 - capped.square_()
    of_values = weights[:, None] * (psi.mT @ error @ root.mT)
    of_log_weights = weights * (of_mass @ psi) + (of_values * values).sum(dim=1)
    each = of_scores.mT @ rows.q, of_log_weights[:, None], of_values
    return tuple(2 / len(psi) * x for x in each)  # type: ignore[return-value]


def mean_square(wanted: Wanted, placed: Placed, root: Float[Tensor, "d_head d_head"]) -> float:
    """The mean of |e R|^2 over the reference queries and the heads that read the keys."""
    total = 0.0
    for psi, p, a, z in wanted.rows(placed.keys, placed.distance):
        off = psi @ placed.weights - p
        error = (psi @ placed.values - a - z * off[:, None]) @ root / (1 + off).clamp(min=RESOLVED)[:, None]
        total += float(error.double().square().sum())
    return total / wanted.p.numel()
