"""Keys that move: a head's keys, their weights and values by gradient steps on the error of the head's own output.

The keys of a prompt are the only places that a subset can choose; keys at any place can do better. With keys k_r, weights w_r
and values u_r (shares, p, a, z and n as in :mod:`kvlens.ops.landmarks`),

    e_i = (sum_r psi_ir u_r - a_i - z_i (sum_r psi_ir - p_i)) / (1 - p_i + sum_r psi_ir),   psi_ir = w_r exp(s(q_i, k_r)) / n_i

is the error of the head's output, exactly, and the mean of |e_i R|^2 over the reference queries is minimized over k, log w and
u. It begins with the fit in closed form, takes no pass through the model, and ends with the values in closed form. An eighth of
the queries is left out and judges: a head for which their error does not fall keeps its fit, as does one that has every key.

New in kvlens. Polishing (:mod:`kvlens.conversion.gradients`) moves the same numbers by their effect on the logits.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.conversion.gradients import descend
from kvlens.ops.landmarks import RESOLVED, LayerKeys, PromptKeys, Queries, blocks_of, cells_of, shares, values_at
from kvlens.ops.softmax_features import ScoreRule, grouped_key_scores

MOVING_RATE = 3e-2
"""Of the first Adam step, relative to the size of a head's keys and of its values; of log-weights as it is."""
QUERIES_PER_STEP = 512
"""At most: queries are dealt into equal parts, of which each step reads one."""
JUDGES = 8
"""One of so many queries judges."""
LARGEST_LOG_SHARE = 20.0
"""A key that moves may get any score on the way; its share stays finite."""


class Placed(NamedTuple):
    """The keys of one head at any place; ``values`` are weight times value."""

    keys: Float[Tensor, "r d_key"]
    weights: Float[Tensor, " r"]
    values: Float[Tensor, "r d_head"]

    def times(self, root: Float[Tensor, "d_head d_head"]) -> "Placed":
        return self._replace(values=self.values @ root)


class Wanted(NamedTuple):
    """What the keys of one head are to give for each reference query, and how they are scored.

    Attributes:
        p, a: the prompt's shares of the normalizer and of the output.
        distance: of the keys from the text.
    """

    queries: Queries
    p: Float[Tensor, "query group"]
    a: Float[Tensor, "query group d_head"]
    rule: ScoreRule
    distance: Int[Tensor, " r"]

    @classmethod
    def of(cls, queries: Queries, prompt: PromptKeys, distance: Int[Tensor, " r"]) -> "Wanted":
        parts = [shares(block, prompt) for block in blocks_of(queries, prompt.keys.shape[2])]
        group = queries.q.shape[2]
        p, a = (torch.cat([part[i][0] for part in parts]).unflatten(0, (-1, group)) for i in (1, 2))
        return cls(queries, p, a, prompt.rule, distance)

    def times(self, root: Float[Tensor, "d_head d_head"]) -> "Wanted":
        """With x R in place of every output x."""
        return self._replace(queries=self.queries._replace(z=self.queries.z @ root), a=self.a @ root)

    def part(self, rows: slice | Tensor) -> "Wanted":
        return self._replace(queries=self.queries.part(rows), p=self.p[rows], a=self.a[rows])

    def blocks(self, r: int) -> Iterator["Wanted"]:
        first = 0
        for block in blocks_of(self.queries, r):
            last = first + len(block.positions)
            yield self.part(slice(first, last))
            first = last


def moved_layer(
    prompt: PromptKeys, queries: Queries, layer: LayerKeys, root_metric: Tensor, steps: int, seed: int
) -> LayerKeys:
    """The keys of every head, moved where it does not keep them all."""
    new = LayerKeys(layer.keys.clone(), layer.distance, layer.weights.clone(), layer.values.clone())
    kv_heads = prompt.keys.shape[1]
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        at = divmod(cell, kv_heads)
        used = layer.weights[at] > 0
        n_keys = keys.keys.shape[2] if keys.real is None else int(keys.real.sum())
        if 0 < int(used.sum()) < n_keys:
            start = Placed(layer.keys[at][used], layer.weights[at][used], layer.values[at][used])
            found = moved(own, keys, start, layer.distance[at][used], root_metric[at], steps, seed)
            for every, some in zip((new.keys, new.weights, new.values), found, strict=True):
                every[at][used] = some.to(every)
    return new


def moved(
    queries: Queries,
    prompt: PromptKeys,
    start: Placed,
    distance: Int[Tensor, " r"],
    root_metric: Float[Tensor, "d_head d_head"],
    steps: int,
    seed: int,
) -> Placed:
    """The keys of one head after ``steps`` gradient steps, with values in closed form, or ``start`` if that is no better for
    queries that the steps did not read.

    Args:
        queries, prompt: of one key-value head and one prompt.
        start: the fit in closed form, with positive weights.
        distance: of the keys from the text.
        root_metric: R such that |e R| is the size of an output error e.
    """
    with torch.inference_mode(False), torch.enable_grad():
        # whoever converts in inference mode has tensors without gradients
        queries, distance, root = Queries(*map(torch.clone, queries)), distance.clone(), root_metric.to(start.keys, copy=True)
        wanted = Wanted.of(queries, prompt, distance)
        first = (start.keys.clone(), start.weights.log(), start.values / start.weights[:, None])
        units = _size(first[0]), first[1].new_ones(()), _size(first[2])
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(wanted.p), generator=generator).to(distance.device)
        n_judges = len(order) // JUDGES
        if not n_judges:
            return start
        judging, read = wanted.part(order[:n_judges]), wanted.part(order[n_judges:])
        before, sized = mean_square(read, start, root), read.times(root)
        n_read = len(read.p)
        size = math.ceil(n_read / math.ceil(n_read / QUERIES_PER_STEP))
        blocks = [sized.part(slice(i, i + size)) for i in range(0, n_read, size)]
        changes = [torch.zeros_like(x).requires_grad_() for x in first]

        def now() -> Placed:
            keys, log_weights, values = (x + unit * change for x, unit, change in zip(first, units, changes, strict=True))
            return Placed(keys, log_weights.exp(), log_weights.exp()[:, None] * values)

        def loss_on(rows: Int[Tensor, " row"]) -> Float[Tensor, ""]:
            return _squares(blocks[int(rows)], now().times(root)).mean() / before

        sizes = dict(n_rows=len(blocks), rows_per_step=1, steps=steps)
        for _ in descend(changes, loss_on, learning_rate=MOVING_RATE, generator=generator, **sizes):
            pass
    with torch.no_grad():
        found = now()
        judged = found._replace(values=_values(read, found))
        better = mean_square(judging, judged, root) < mean_square(judging, start, root)
        return found._replace(values=_values(wanted, found)) if better else start


def _size(x: Tensor) -> Float[Tensor, ""]:
    return x.square().mean().sqrt()


def _shares(wanted: Wanted, placed: Placed) -> Float[Tensor, "row r"]:
    """psi without its weight: the keys' shares in the normalizer of every query, a row for each query head."""
    queries, distance = wanted.queries, wanted.distance[None, None]
    scores = grouped_key_scores(queries.q, placed.keys[None, None], wanted.rule, distance, queries.positions[None])
    log_n = rearrange(queries.log_n, "1 i s -> (i s) 1")
    return (scores[0, 0] - log_n).clamp(max=LARGEST_LOG_SHARE).exp()


def _rows(wanted: Wanted) -> tuple[Tensor, Tensor, Tensor]:
    """p, a and z, a row for each query head."""
    return wanted.p.flatten(), wanted.a.flatten(0, 1), wanted.queries.z[0].flatten(0, 1)


def _squares(wanted: Wanted, placed: Placed) -> Float[Tensor, " row"]:
    """|e|^2."""
    psi, (p, a, z) = _shares(wanted, placed), _rows(wanted)
    off = psi @ placed.weights - p
    error = torch.addmm(torch.addcmul(a, z, off[:, None]), psi, placed.values, beta=-1)
    return error.square().sum(dim=-1) / (1 + off).clamp(min=RESOLVED).square()


def mean_square(wanted: Wanted, placed: Placed, root: Tensor) -> float:
    """The mean of |e R|^2 over the reference queries and the heads that read the keys."""
    blocks, sized = wanted.times(root).blocks(len(placed.weights)), placed.times(root)
    total = sum(float(_squares(some, sized).double().sum()) for some in blocks)
    return total / wanted.p.numel()


def _values(wanted: Wanted, placed: Placed) -> Float[Tensor, "r d_head"]:
    """The values in closed form, given keys and weights."""
    blocks = wanted.blocks(len(placed.weights))
    rows = ((_shares(some, placed), *_rows(some)) for some in blocks)
    return values_at(rows, placed.weights.double(), placed.values).to(placed.values)
