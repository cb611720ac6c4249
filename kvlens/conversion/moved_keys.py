"""Keys that move: a head's keys, their weights and values by gradient steps on the error of the head's own output.

The keys of a prompt are the only places that a subset can choose; keys at any place can do better. With keys k_r, weights w_r
and values u_r (shares, p, a, z and n as in :mod:`kvlens.ops.landmarks`),

    e_i = (sum_r psi_ir u_r - a_i - z_i (sum_r psi_ir - p_i)) / (1 - p_i + sum_r psi_ir),   psi_ir = w_r exp(s(q_i, k_r)) / n_i

is the error of the head's output, exactly, and the mean of |e_i R|^2 over the reference queries is minimized over k, log w and
u. It begins with the fit in closed form, takes no pass through the model, and ends with the values in closed form. A head for
which that does not lower the error keeps its fit, as does one that has every key.

New in kvlens. Polishing (:mod:`kvlens.conversion.gradients`) moves the same numbers by their effect on the logits.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.conversion.gradients import descend
from kvlens.ops.landmarks import RESOLVED, PromptKeys, Queries, blocks_of, shares, values_at
from kvlens.ops.softmax_features import ScoreRule, grouped_key_scores

MOVING_RATE = 2e-2
"""Of the first Adam step, relative to the size of a head's keys and of its values; of log-weights as it is."""
QUERIES_PER_STEP = 512
LARGEST_LOG_SHARE = 20.0
"""A key that moves may get any score on the way; its share stays finite."""


class Placed(NamedTuple):
    """The keys of one head at any place; ``values`` are weight times value."""

    keys: Float[Tensor, "r d_key"]
    weights: Float[Tensor, " r"]
    values: Float[Tensor, "r d_head"]


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

    def part(self, rows: slice | Int[Tensor, " row"]) -> "Wanted":
        return self._replace(queries=self.queries.part(rows), p=self.p[rows], a=self.a[rows])

    def blocks(self, r: int) -> Iterator["Wanted"]:
        first = 0
        for block in blocks_of(self.queries, r):
            last = first + len(block.positions)
            yield self.part(slice(first, last))
            first = last


def moved(
    queries: Queries,
    prompt: PromptKeys,
    start: Placed,
    distance: Int[Tensor, " r"],
    root_metric: Float[Tensor, "d_head d_head"],
    steps: int,
    seed: int,
) -> Placed:
    """The keys of one head after ``steps`` gradient steps, with values in closed form, or ``start`` if that is no better.

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
        before = mean_square(wanted, start, root)
        changes = [torch.zeros_like(x).requires_grad_() for x in first]

        def now() -> Placed:
            keys, log_weights, values = (x + unit * change for x, unit, change in zip(first, units, changes, strict=True))
            return Placed(keys, log_weights.exp(), log_weights.exp()[:, None] * values)

        def loss_on(rows: Int[Tensor, " row"]) -> Float[Tensor, ""]:
            error = _errors(wanted.part(rows), now())
            return (error @ root).square().sum() / (before * len(error))

        n, generator = len(queries.positions), torch.Generator().manual_seed(seed)
        sizes = dict(n_rows=n, rows_per_step=QUERIES_PER_STEP, steps=steps)
        for _ in descend(changes, loss_on, learning_rate=MOVING_RATE, generator=generator, **sizes):
            pass
    with torch.no_grad():
        found = now()
        found = found._replace(values=_values(wanted, found))
        return found if mean_square(wanted, found, root) < before else start


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


def _errors(wanted: Wanted, placed: Placed) -> Float[Tensor, "row d_head"]:
    psi, (p, a, z) = _shares(wanted, placed), _rows(wanted)
    off = psi @ placed.weights - p
    return (psi @ placed.values - a - z * off[:, None]) / (1 + off).clamp(min=RESOLVED)[:, None]


def mean_square(wanted: Wanted, placed: Placed, root: Tensor) -> float:
    """The mean of |e R|^2 over the reference queries and the heads that read the keys."""
    blocks = wanted.blocks(len(placed.weights))
    total = sum(float((_errors(some, placed) @ root).double().square().sum()) for some in blocks)
    return total / wanted.p.numel()


def _values(wanted: Wanted, placed: Placed) -> Float[Tensor, "r d_head"]:
    """The values in closed form, given keys and weights."""
    blocks = wanted.blocks(len(placed.weights))
    rows = ((_shares(some, placed), *_rows(some)) for some in blocks)
    return values_at(rows, placed.weights.double(), placed.values).to(placed.values)
