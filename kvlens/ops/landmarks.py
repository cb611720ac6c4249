"""Reducing a prompt's keys to a few: how queries attend to them, and the weights and values of those that are kept.

Based on Attention Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284; :mod:`kvlens.ops.attention_matching`), which
selects keys by their attention or by matching pursuit, then fits weights to the normalizer and values to the output. Here keys
are selected by the output error, the fit of the values corrects for the error that the weights leave in the normalizer, and
keys are allotted to the heads where they reduce the error most. Weights are never negative, as in Attention Matching.

In this order: the naive forms; Gram matrices; how queries attend to the prompt (:func:`shares`, :func:`statistics`), from which
:mod:`kvlens.ops.pursuit` chooses keys; weights and values (:func:`fit_weights`, :func:`fit_values`) and the errors that remain
(:func:`output_errors`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.memory import BLOCK_NUMBERS, NUMBERS_AT_ONCE, by_device
from kvlens.ops.softmax_attention import ScaledFeatures
from kvlens.ops.softmax_features import ScoreRule, grouped_key_scores, naive_score

# The references: one head, one query, one key at a time, every fit solved from scratch from its rows. For small problems.


def naive_share(
    q: Float[Tensor, " d"], key: Float[Tensor, " d"], log_n: float, rule: ScoreRule, head: int, apart: int
) -> float:
    """psi: the key's share of the whole normalizer."""
    return math.exp(naive_score(q, key, rule, head, apart) - log_n)


def naive_fit_weights(psi: Float[Tensor, "row r"], p: Float[Tensor, " row"]) -> Float[Tensor, " r"]:
    """The w >= 0 that minimizes |psi w - p|^2: the best of all sets of keys whose unconstrained weights are positive."""
    best, least = torch.zeros(psi.shape[1], dtype=psi.dtype), float(p.square().sum())
    for n in range(1, psi.shape[1] + 1):
        for kept in torch.combinations(torch.arange(psi.shape[1]), n):
            w = torch.linalg.lstsq(psi[:, kept], p[:, None]).solution[:, 0]
            error = float((psi[:, kept] @ w - p).square().sum())
            if bool((w > 0).all()) and error < least:
                best, least = torch.zeros_like(best), error
                best[kept] = w
    return best


def naive_fit_values(
    psi: Float[Tensor, "row r"],
    p: Float[Tensor, " row"],
    a: Float[Tensor, "row d"],
    z: Float[Tensor, "row d"],
    w: Float[Tensor, " r"],
) -> Float[Tensor, "r d"]:
    """The B that minimizes the sum of |e_i|^2, without a ridge."""
    whole = 1 - p + psi @ w
    target = (a + z * (psi @ w - p)[:, None]) / whole[:, None]
    return torch.linalg.lstsq(psi / whole[:, None], target).solution


# Gram matrices sum_i x_i x_i^T of keys' shares, without N x N numbers where a prompt has more keys than there are queries.
# Choosing r of N keys reads the diagonal and one column for each chosen key. `Products` stores the matrix; `Rows` stores the
# rows x_i themselves, and computes a column when it is read.

T = TypeVar("T", bound=tuple)


@dataclass(frozen=True)
class Products:
    """The products of all pairs of keys."""

    products: Float[Tensor, "cell key key"]

    def diagonal(self) -> Float[Tensor, "cell key"]:
        return self.products.diagonal(dim1=-2, dim2=-1).clone()

    def column(self, j: Int[Tensor, " cell"]) -> Float[Tensor, "cell key"]:
        return self.products[torch.arange(len(j), device=j.device), j]

    def among(self, index: Int[Tensor, "cell r"]) -> Float[Tensor, "cell r r"]:
        every = torch.arange(len(index), device=index.device)[:, None, None]
        return self.products[every, index[:, :, None], index[:, None, :]]

    def times(self, x: Float[Tensor, "cell key d"]) -> Float[Tensor, "cell key d"]:
        return self.products @ x


@dataclass(frozen=True)
class Rows:
    """The rows, in blocks. Products of a block are computed in its dtype, and added in float64."""

    blocks: Sequence[Float[Tensor, "cell row key"]]

    def diagonal(self) -> Float[Tensor, "cell key"]:
        return _total(block.square().sum(dim=1) for block in self.blocks)

    def column(self, j: Int[Tensor, " cell"]) -> Float[Tensor, "cell key"]:
        every = torch.arange(len(j), device=j.device)
        return _total((block[every, :, j][:, None] @ block).squeeze(1) for block in self.blocks)

    def among(self, index: Int[Tensor, "cell r"]) -> Float[Tensor, "cell r r"]:
        some = [block.gather(2, index[:, None].expand(-1, block.shape[1], -1)) for block in self.blocks]
        return _total(x.mT @ x for x in some)

    def times(self, x: Float[Tensor, "cell key d"]) -> Float[Tensor, "cell key d"]:
        return _total(block.mT @ (block @ x.to(block)) for block in self.blocks)


Gram = Products | Rows


def as_rows(n_rows: int, n_keys: int) -> bool:
    """Whether the rows are fewer numbers than the products."""
    return n_rows < n_keys


def by_cell(cells: int, n_rows: int, n_keys: int, device: torch.device) -> bool:
    """Whether keys are chosen one cell at a time, so that each path ends where its own gains are too small: on a CPU, where the
    Gram matrices or rows of all cells do not fit its cache; on an accelerator, where they are more than it should hold.
    """
    most = min(BLOCK_NUMBERS, NUMBERS_AT_ONCE) if device.type == "cpu" else by_device(NUMBERS_AT_ONCE, device)
    return cells * n_keys * min(n_rows, n_keys) > most


def concatenated(parts: Iterable[T], make: Callable[..., T]) -> T:
    """Tuples of tensors with a leading cell axis, for all cells."""
    return make(*(torch.cat(x) for x in zip(*parts, strict=True)))


def _total(parts: Iterator[Tensor]) -> Tensor:
    *_, whole = accumulate((x.double() for x in parts), torch.Tensor.add_)
    return whole


# How later queries attend to a prompt's keys: the numbers from which keys are chosen and weights are fitted.
#
# For query i with the whole normalizer n_i (text and prompt), key j of the prompt has the share psi_ij = exp(s_ij) / n_i. The
# prompt's part of the normalizer is p_i = sum_j psi_ij, its part of the output a_i = sum_j psi_ij v_j. Keys S with weights w
# and values u, with B = u w, give psi_iS w and psi_iS B instead; the error of the head's output is then
#
#     e_i = (psi_iS B - a_i - z_i (psi_iS w - p_i)) / (1 - p_i + psi_iS w)
#
# exactly. Adding a constant to a query's scores changes none of this. Query heads that share a key-value head are rows of one
# problem; the leading axis ("cell") runs over prompts and key-value heads.
#
# Sums over the queries are computed cell by cell, so that what is read repeatedly stays in the processor's cache.

GRAM_ROWS = 128
"""Rows of a Gram matrix that are computed at once; entries below the diagonal are copied by symmetry."""


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


def joined_queries(parts: Sequence[Queries]) -> Queries:
    """The queries of several groups of texts after one another."""
    return parts[0] if len(parts) == 1 else Queries(*map(torch.cat, zip(*parts, strict=True), (1, 1, 1, 0)))


class PromptKeys(NamedTuple):
    """A prompt's keys and values in one layer, and how they are scored. ``real`` is None if no row is padded."""

    keys: Float[Tensor, "batch kv_head key d_head"]
    values: Float[Tensor, "batch kv_head key d_head"]
    distance: Int[Tensor, "batch kv_head key"]
    real: Bool[Tensor, "batch key"] | None
    rule: ScoreRule


class LayerKeys(NamedTuple):
    """The keys kept in one layer, by prompt and key-value head; ``values`` are weight times value. Weight 0 means no key."""

    keys: Float[Tensor, "batch kv_head r d_key"]
    distance: Int[Tensor, "batch kv_head r"]
    weights: Float[Tensor, "batch kv_head r"]
    values: Float[Tensor, "batch kv_head r d_head"]


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
    return rearrange(scores.sub_(log_n).exp_(), "b g row key -> (b g) row key")


def shares(
    queries: Queries, prompt: PromptKeys
) -> tuple[
    Float[Tensor, "cell row key"], Float[Tensor, "cell row"], Float[Tensor, "cell row d_head"], Float[Tensor, "cell row d_head"]
]:
    """The share psi of every key, the prompt's shares p and a of normalizer and output, and the whole output z."""
    psi = key_shares(queries, prompt)
    z = rearrange(queries.z, "b i (g s) d -> (b g) (i s) d", g=prompt.keys.shape[1])
    return psi, psi.sum(dim=-1), psi @ rearrange(prompt.values, "b g key d -> (b g) key d"), z


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
        gram = Products(_mirrored(products))
    values = rearrange(prompt.values.double() @ root_metric.double(), "b g key d -> (b g) key d")
    sums = gram.times(torch.cat([values, torch.ones_like(values[..., :1])], dim=-1))
    return Statistics(gram, sums[..., -1], sums[..., :-1], z_size, n_rows)


def _add_gram(gram: Float[Tensor, "key key"], psi: Float[Tensor, "row key"]) -> None:
    """Add psi^T psi on and above the diagonal, and little below."""
    for first in range(0, len(gram), GRAM_ROWS):
        gram[first : first + GRAM_ROWS, first:] += psi[:, first : first + GRAM_ROWS].mT @ psi[:, first:]


def _mirrored(gram: Float[Tensor, "cell key key"]) -> Float[Tensor, "cell key key"]:
    """With what is above the diagonal below it, too; in place."""
    for first in range(0, gram.shape[1], GRAM_ROWS):
        rows, later = slice(first, first + GRAM_ROWS), slice(first + GRAM_ROWS, None)
        gram[:, later, rows] = gram[:, rows, later].mT
    return gram


# Weights and values of the kept keys, in closed form: first the normalizer, then the output.
#
#     w >= 0:  sum_i (psi_iS w - p_i)^2 -> min                                          (non-negative least squares)
#     B:       sum_i |psi_iS B - a_i - z_i (psi_iS w - p_i)|^2 / (1 - p_i + psi_iS w)^2 -> min, ridge towards w v
#
# Weights stay non-negative so that the normalizer stays positive for queries outside the fit. The second objective is the
# head's output error itself, which is linear in B once w is known.

RIDGE_WEIGHTS, RIDGE_VALUES = 1e-9, 1e-6
"""Relative to the mean diagonal of the Gram matrix; 1e-8 to 1e-5 change the error of the logits by less than 1 %."""
RESOLVED = 1e-6
"""The smallest share of a normalizer that is larger than the rounding of shares in float32."""


class Errors(NamedTuple):
    """Relative errors over queries, per query head, of the head's output and of the prompt's share of the normalizer."""

    output: Float[Tensor, "batch head"]
    mass: Float[Tensor, "batch head"]


class Wanted(NamedTuple):
    """What the keys of one head are to give for each reference query, and how they are scored.

    Attributes:
        queries: of the heads that read the keys.
        p, a: the prompt's shares of the normalizer and of the output.
    """

    queries: Queries
    p: Float[Tensor, "query group"]
    a: Float[Tensor, "query group d_head"]
    rule: ScoreRule

    @classmethod
    def of(cls, queries: Queries, prompt: PromptKeys) -> "Wanted":
        """Of one key-value head of one prompt: every key's share is computed here, once for all fits."""
        parts = [shares(block, prompt)[1:3] for block in blocks_of(queries, prompt.keys.shape[2])]
        p, a = (torch.cat(x, dim=1)[0].unflatten(0, (-1, queries.q.shape[2])) for x in zip(*parts, strict=True))
        return cls(queries, p, a, prompt.rule)

    def part(self, rows: slice | Tensor) -> "Wanted":
        return self._replace(queries=self.queries.part(rows), p=self.p[rows], a=self.a[rows])

    def rows(self, keys: Float[Tensor, "r d_key"], distance: Int[Tensor, " r"]) -> Iterator[tuple[Tensor, ...]]:
        """In blocks, a row for each query and head: the shares of these keys [row, r], p, a and z."""
        first = 0
        for block in blocks_of(self.queries, max(1, len(keys))):
            some = slice(first, first := first + len(block.positions))
            z = block.z[0].flatten(0, 1)
            psi = key_shares(block, PromptKeys(keys[None, None], keys[None, None], distance[None, None], None, self.rule))
            yield psi[0], self.p[some].flatten(), self.a[some].flatten(0, 1), z


def fit_weights(wanted: Wanted, keys: Float[Tensor, "r d_key"], distance: Int[Tensor, " r"]) -> Float[Tensor, " r"]:
    """The weights w of one head's keys, by non-negative least squares."""
    gram, target = (torch.zeros(len(keys), n, dtype=torch.float64, device=keys.device) for n in (len(keys), 1))
    for psi, p, _, _ in wanted.rows(keys, distance):
        gram += psi.mT @ psi
        target += psi.mT @ p[:, None]
    return nonnegative_weights(gram[None], target.mT, torch.ones_like(distance[None], dtype=torch.bool))[0]


def nonnegative_weights(
    gram: Float[Tensor, "cell r r"], target: Float[Tensor, "cell r"], active: Bool[Tensor, "cell r"]
) -> Float[Tensor, "cell r"]:
    """Least squares on the active keys, repeated without those whose weight is negative until none is.

    Args:
        gram, target: sums over rows of the products of all pairs of keys, and of each key with the target of the weighted sum.
    """
    for _ in range(active.shape[1] + 1):
        w = solve(gram, target[..., None], active, RIDGE_WEIGHTS).squeeze(-1)
        negative = active & (w < 0)
        if not bool(negative.any()):
            break
        active = active & ~negative
    return w


def fit_values(
    wanted: Wanted,
    keys: Float[Tensor, "r d_key"],
    distance: Int[Tensor, " r"],
    w: Float[Tensor, " r"],
    start: Float[Tensor, "r d_head"],
) -> Float[Tensor, "r d_head"]:
    """The products B of one head's weights and values, near ``start``, given the weights; 0 where the weight is 0."""
    r, d = start.shape
    gram, right = (torch.zeros(r, n, dtype=torch.float64, device=w.device) for n in (r, d))
    for psi, p, a, z in wanted.rows(keys, distance):
        off = psi @ w.to(psi) - p
        whole = (1 + off).clamp(min=RESOLVED)[:, None]
        target = (a + z * off[:, None] - psi @ start) / whole
        psi = psi / whole
        gram += psi.mT @ psi
        right += psi.mT @ target
    return (start + solve(gram[None], right[None], (w > 0)[None], RIDGE_VALUES)[0]) * (w > 0)[:, None]


def output_errors(
    queries: Queries,
    prompt: PromptKeys,
    phi: Callable[[Queries], ScaledFeatures],
    b_kv: Float[Tensor, "batch kv_head r d_head"],
    b_d: Float[Tensor, "batch kv_head r"],
) -> Errors:
    """Root mean square errors over the queries if features ``phi``, b_KV and b_D replace the prompt, in float64.

    The output's error is relative to the outputs, the mass's relative to the prompt's share of the normalizer. Where the whole
    normalizer is lost (below :data:`RESOLVED` of what it was: the prompt had all of the attention, and the features have none),
    what is left of the text is below the rounding of the shares, and the output counts as lost, an error of 100 %.
    """
    group, sums = queries.q.shape[2] // prompt.keys.shape[1], None
    stored = rearrange(torch.cat([b_kv, b_d[..., None]], dim=-1).double(), "b g r d -> (b g) r d")
    for block in blocks_of(queries, prompt.keys.shape[2]):
        _, p, a, z = (t.double() for t in shares(block, prompt))
        features, log_scale = phi(block)
        size = (log_scale - block.log_n).double().clamp(max=300.0).exp()  # keeps very poor features finite
        rows = rearrange(features * size[..., None], "b i (g s) r -> (b g) (i s) r", s=group)
        read = rows @ stored
        off = read[..., -1] - p
        whole = (1 + off)[..., None]
        is_lost = whole.abs() < RESOLVED
        e = torch.where(is_lost, -z, (read[..., :-1] - a - z * off[..., None]) / torch.where(is_lost, 1.0, whole))
        squares = torch.stack([e.square().sum(-1), z.square().sum(-1), off.square(), p.square()])
        of_heads = reduce(squares, "what cell (i s) -> what cell s", "sum", s=group)
        sums = of_heads if sums is None else sums + of_heads
    assert sums is not None
    e, z, off, p = rearrange(sums, "what (b g) s -> what b (g s)", b=len(queries.q))
    tiny = torch.finfo(e.dtype).tiny
    return Errors((e / z.clamp(min=tiny)).sqrt(), (off / p.clamp(min=tiny)).sqrt())


def solve(gram: Tensor, right: Tensor, active: Tensor, ridge: float) -> Tensor:
    """Ridge least squares over the active unknowns; 0 for the others."""
    on = active.to(gram)
    size = (gram.diagonal(dim1=-2, dim2=-1) * on).sum(dim=-1) / on.sum(dim=-1).clamp(min=1)
    size = torch.where(size > 0, size, 1.0)[:, None]
    scaled = gram / size[..., None] * on[:, :, None] * on[:, None] + torch.diag_embed(ridge * on + (1 - on))
    return torch.linalg.solve(scaled, right / size[..., None] * on[..., None])


def _gather(x: Float[Tensor, "batch kv_head key d"], index: Int[Tensor, "cell r"]) -> Float[Tensor, "cell r d"]:
    x = rearrange(x, "b g key d -> (b g) key d")
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


doors(__name__)
