"""How later queries attend to a prompt's keys: the numbers from which keys are chosen and weights are fitted.

For query i with the whole normalizer n_i (text and prompt), key j of the prompt has the share psi_ij = exp(s_ij) / n_i. The
prompt's part of the normalizer is p_i = sum_j psi_ij, its part of the output a_i = sum_j psi_ij v_j. Keys S with weights w and
values u, with B = u w, give psi_iS w and psi_iS B instead; the error of the head's output is then

    e_i = (psi_iS B - a_i - z_i (psi_iS w - p_i)) / (1 - p_i + psi_iS w)

exactly. Adding a constant to a query's scores changes none of this. Query heads that share a key-value head are rows of one
problem; the leading axis ("cell") runs over prompts and key-value heads.

Sums over the queries are computed cell by cell, so that what is read repeatedly stays in the processor's cache.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.memory import BLOCK_NUMBERS, by_device
from kvlens.ops.landmarks.gram import Gram, Products, Rows, as_rows
from kvlens.ops.softmax_features import ScoreRule
from kvlens.ops.softmax_features.virtual_keys import grouped_key_scores

GRAM_COLUMNS = 128
"""Columns of a Gram matrix that are computed at once; entries above the diagonal are copied by symmetry."""


class Queries(NamedTuple):
    """Reference queries of one layer, with their outputs and normalizers under attention to text and prompt.

    Attributes:
        q: as the model scores them.
        z: the heads' outputs.
        log_n: the logarithm of the whole normalizer.
        positions: within the text, from 0.
    """

    q: Float[Tensor, "batch query head d_head"]
    z: Float[Tensor, "batch query head d_head"]
    log_n: Float[Tensor, "batch query head"]
    positions: Int[Tensor, " query"]

    def part(self, rows: slice | Tensor) -> "Queries":
        """Some of the queries."""
        return Queries(self.q[:, rows], self.z[:, rows], self.log_n[:, rows], self.positions[rows])


def joined(parts: Sequence[Queries]) -> Queries:
    """The queries of several groups of texts after one another."""
    return parts[0] if len(parts) == 1 else Queries(*map(torch.cat, zip(*parts, strict=True), (1, 1, 1, 0)))


class PromptKeys(NamedTuple):
    """A prompt's keys and values in one layer, and how they are scored. ``real`` is None if no row is padded."""

    keys: Float[Tensor, "batch kv_head key d_head"]
    values: Float[Tensor, "batch kv_head key d_head"]
    distance: Int[Tensor, "batch kv_head key"]
    real: Bool[Tensor, "batch key"] | None
    rule: ScoreRule


class Shares(NamedTuple):
    """psi, p, a and z of a block of queries, by cell."""

    psi: Float[Tensor, "cell row key"]
    p: Float[Tensor, "cell row"]
    a: Float[Tensor, "cell row d_head"]
    z: Float[Tensor, "cell row d_head"]


class Statistics(NamedTuple):
    """Sums over the queries, from which keys are chosen.

    Attributes:
        gram: sum_i psi_i psi_i^T.
        with_p: sum_i psi_i p_i.
        with_a: sum_i psi_i (a_i R)^T, R the square root of the metric of outputs.
        z_size: sqrt of the mean of |z_i R|^2.
        n_rows: rows summed over.
    """

    gram: Gram
    with_p: Float[Tensor, "cell key"]
    with_a: Float[Tensor, "cell key d_head"]
    z_size: Float[Tensor, " cell"]
    n_rows: int


def key_shares(queries: Queries, prompt: PromptKeys) -> Float[Tensor, "cell row key"]:
    """psi: the share of every key of the prompt in every query."""
    kv_heads = prompt.keys.shape[1]
    scores = grouped_key_scores(queries.q, prompt.keys, prompt.rule, prompt.distance, queries.positions[None])
    if prompt.real is not None:
        scores = scores.masked_fill(~prompt.real[:, None, None, :], -torch.inf)
    log_n = rearrange(queries.log_n, "b i (g s) -> b g (i s) 1", g=kv_heads)
    return scores.sub_(log_n).exp_().flatten(0, 1)


def shares(queries: Queries, prompt: PromptKeys) -> Shares:
    """The share psi of every key, the prompt's parts p and a of normalizer and output, and the whole output z."""
    psi = key_shares(queries, prompt)
    z = rearrange(queries.z, "b i (g s) d -> (b g) (i s) d", g=prompt.keys.shape[1])
    return Shares(psi, psi.sum(dim=-1), psi @ prompt.values.flatten(0, 1), z)


def blocks_of(queries: Queries, n_keys: int) -> Iterator[Queries]:
    """The queries in blocks small enough that their shares of ``n_keys`` keys fit the memory budget."""
    batch, n, heads = queries.log_n.shape
    size = max(1, by_device(BLOCK_NUMBERS, queries.q.device) // (batch * heads * n_keys))
    for first in range(0, n, size):
        yield queries.part(slice(first, first + size))


def cells_of(queries: Queries, prompt: PromptKeys) -> Iterator[tuple[Queries, PromptKeys]]:
    """Each prompt and key-value head as a separate problem, with the queries of its heads."""
    batch, kv_heads = prompt.keys.shape[:2]
    group = queries.q.shape[2] // kv_heads
    for b, g in product(range(batch), range(kv_heads)):
        row, head, heads = slice(b, b + 1), slice(g, g + 1), slice(g * group, (g + 1) * group)
        real = None if prompt.real is None else prompt.real[row]
        slopes = None if prompt.rule.slopes is None else prompt.rule.slopes[heads]
        q, z, log_n = (x[row, :, heads] for x in (queries.q, queries.z, queries.log_n))
        keys, values, distance = (x[row, head] for x in (prompt.keys, prompt.values, prompt.distance))
        rule = prompt.rule._replace(slopes=slopes)
        yield Queries(q, z, log_n, queries.positions), PromptKeys(keys, values, distance, real, rule)


def statistics(queries: Queries, prompt: PromptKeys, root_metric: Float[Tensor, "batch kv_head d_head d_head"]) -> Statistics:
    """Sums over all queries, a block at a time, in float64. p and a are themselves sums over keys, so the Gram matrix contains
    the other sums: sum_i psi_i p_i = gram 1, sum_i psi_i a_i^T = gram v.

    Args:
        queries, prompt: of one layer.
        root_metric: R such that |e R| is the size of an output error e, such as sqrt(W_O W_O^T).
    """
    batch, kv_heads, n_keys, _ = prompt.keys.shape
    n_rows = queries.log_n[0].numel() // kv_heads
    z = rearrange(queries.z, "b i (g s) d -> b g (i s) d", g=kv_heads) @ root_metric.to(queries.z)
    z_size = (z.double().square().sum(dim=(-1, -2)) / n_rows).sqrt().flatten()
    if as_rows(n_rows, n_keys):
        gram: Gram = Rows([key_shares(block, prompt) for block in blocks_of(queries, n_keys)])
    else:
        products = torch.zeros(batch * kv_heads, n_keys, n_keys, dtype=torch.float64, device=prompt.keys.device)
        for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
            for block in blocks_of(own, n_keys):
                _add_gram(products[cell], key_shares(block, keys)[0])
        gram = Products(products)
    values = (prompt.values.double() @ root_metric.double()).flatten(0, 1)
    sums = gram.times(torch.cat([values, torch.ones_like(values[..., :1])], dim=-1))
    return Statistics(gram, sums[..., -1], sums[..., :-1], z_size, n_rows)


def _add_gram(gram: Float[Tensor, "key key"], psi: Float[Tensor, "row key"]) -> None:
    """Add psi^T psi, computing only one triangle of it."""
    for first in range(0, len(gram), GRAM_COLUMNS):
        some = slice(first, first + GRAM_COLUMNS)
        products = psi[:, some].mT @ psi[:, first:]
        gram[some, first:] += products
        gram[first + GRAM_COLUMNS :, some] += products[:, GRAM_COLUMNS:].mT
