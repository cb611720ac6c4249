"""How published methods choose a prompt's keys: by attention received, by attention expected, by matching attention's output.

First the naive forms: one query, one head, one key at a time. Then, by the method that uses it:

- :func:`attention_received`: from the prompt's own queries, a block of them at a time (H2O, SnapKV);
- :func:`expected_log_attention`: from queries that are normally distributed (Expected Attention, Devoto et al. 2025);
- :func:`match_keys`, :func:`match_mass`, :func:`match_output`: Attention Matching (Zweiger, Fu, Guo, Kim 2026, 2602.16284).

:mod:`kvlens.ops.landmarks` is kvlens' own choice, by the error of the output.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from einops import repeat
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.memory import BLOCK_NUMBERS
from kvlens.ops.landmarks import (
    Gram,
    Products,
    PromptKeys,
    Queries,
    Rows,
    as_rows,
    blocks_of,
    by_cell,
    cells_of,
    concatenated,
    key_shares,
    nonnegative_weights,
    solve,
)
from kvlens.ops.softmax_features import ScoreRule, virtual_key_scores


def naive_attention_received(
    q: Float[Tensor, "query d"], keys: Float[Tensor, "key d"], weight: Float[Tensor, " key"], scale: float, sink: float | None
) -> Float[Tensor, " key"]:
    """Attention of one head, summed over the queries; key j has the same position as query j."""
    received = [0.0] * len(keys)
    for i in range(len(q)):
        parts = [float(weight[j]) * math.exp(float(q[i] @ keys[j]) / scale) for j in range(i + 1)]
        whole = sum(parts) + (0.0 if sink is None else math.exp(sink))
        for j, part in enumerate(parts):
            received[j] += part / whole
    return torch.tensor(received, dtype=q.dtype)


def naive_expected_log_attention(q: Float[Tensor, "query d"], key: Float[Tensor, " d"], scale: float) -> float:
    """Compute it from the mean and covariance of one head's queries."""
    mean = q.mean(dim=0)
    covariance = sum(torch.outer(row - mean, row - mean) for row in q) / len(q)
    return float(mean @ key) / scale + float(key @ covariance @ key) / (2 * scale**2)


def attention_received(
    q: Float[Tensor, "batch query head d_head"],
    query_distance: Int[Tensor, "batch query"],
    counts: Float[Tensor, "batch query"],
    keys: Float[Tensor, "batch kv_head key d_head"],
    distance: Int[Tensor, "batch kv_head key"],
    weight: Float[Tensor, "batch kv_head key"],
    rule: ScoreRule,
    sink: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head key"]:
    """sum_i counts_i w_j exp(s_ij) / (sum_l w_l exp(s_il) + exp(sink)), over the keys that query i sees.

    Args:
        q, keys: as the model scores them.
        query_distance, distance: how many positions each token lies before the text, 1 for the prompt's last token. A query
            sees the keys whose distance is at least its own.
        counts: how often each query counts; 0 leaves it out, as for padding.
        weight: weight of each key, 0 where there is no key.
        sink: log-score of an attention sink that every query sees in addition (GPT-OSS).
    """
    heads, group = q.shape[2], q.shape[2] // keys.shape[1]
    received = q.new_zeros(q.shape[0], heads, keys.shape[2])
    far, used = (repeat(x, "b g key -> b 1 (g s) key", s=group) for x in (distance, weight))
    size = max(1, BLOCK_NUMBERS // received.numel())
    for first in range(0, q.shape[1], size):
        some = slice(first, first + size)
        if not bool(counts[:, some].any()):
            continue
        near = query_distance[:, some]
        scores = virtual_key_scores(q[:, some], keys, rule, distance, -near)
        scores = scores.masked_fill((far < near[:, :, None, None]) | (used == 0), -torch.inf)
        largest = scores.amax(dim=-1, keepdim=True)
        if sink is not None:
            largest = torch.maximum(largest, sink[:, None].to(largest))
        largest = torch.where(largest.isfinite(), largest, 0.0)
        parts = used * (scores - largest).exp()
        whole = parts.sum(dim=-1, keepdim=True)
        if sink is not None:
            whole = whole + (sink[:, None] - largest).exp()
        pattern = torch.where(whole == 0, 0.0, parts / whole)
        received += torch.einsum("bi,bihj->bhj", counts[:, some], pattern)
    return received


def expected_log_attention(
    q: Float[Tensor, "batch query head d_head"],
    counts: Float[Tensor, "batch query"],
    keys: Float[Tensor, "batch kv_head key d_head"],
    scale: float,
) -> Float[Tensor, "batch head key"]:
    """log E exp(q.k / scale) = mu.k / scale + k^T Sigma k / (2 scale^2) for q ~ N(mu, Sigma).

    mu and Sigma are the mean and covariance of the rows of ``q``, each counted ``counts`` times (0 leaves it out).
    """
    by_head = repeat(keys, "b g key d -> b (g s) key d", s=q.shape[2] // keys.shape[1])
    share = (counts / counts.sum(dim=1, keepdim=True))[:, :, None, None]
    mean = (share * q).sum(dim=1, keepdim=True)
    centered = share.sqrt() * (q - mean)
    covariance = torch.einsum("bihd,bihe->bhde", centered, centered)
    variance = ((by_head @ covariance) * by_head).sum(dim=-1)
    return torch.einsum("bihd,bhjd->bhj", mean, by_head) / scale + variance / (2 * scale**2)


# Attention Matching: match the mass and output of attention over the prompt.
#
# For query i, key j of the prompt has the mass E_ij = exp(s_ij - max_j s_ij); the whole prompt has the mass m_i = sum_j E_ij
# and the output y_i = sum_j E_ij v_j / m_i. The kept keys S get weights w >= 0 (their logarithms are the paper's beta) and
# values C:
#
#     w:  sum_i (E_iS w - m_i)^2 -> min                        C:  sum_i |x_i C - y_i|^2 -> min,  x_i = E_iS * w / (E_iS w)
#
# The text after the prompt, and how much attention it leaves for the prompt, play no role here; in kvlens' own fit
# (`fit_weights` and `fit_values` of `kvlens.ops.landmarks`) they do.

MatchedBy = Literal["attention", "pursuit"]
LEAST = 1e-12
"""Smallest weight during matching pursuit, as in the authors' code."""
RIDGE = 1e-9
"""Ridge of the fit of the values, relative to the mean diagonal of the Gram matrix, for keys that never get attention."""


class Masses(NamedTuple):
    """Sums over the queries, in float64.

    Attributes:
        gram: sum_i E_i E_i^T.
        with_m: sum_i E_i m_i.
        attention: sum_i (E_i / m_i)^2.
    """

    gram: Gram
    with_m: Float[Tensor, "cell key"]
    attention: Float[Tensor, "cell key"]


class Matched(NamedTuple):
    """Chosen keys in order, and the sums of :class:`Masses` over these keys alone."""

    keys: Int[Tensor, "cell r"]
    gram: Float[Tensor, "cell r r"]
    with_m: Float[Tensor, "cell r"]


def masses(queries: Queries, prompt: PromptKeys) -> Masses:
    """The sums of one layer from which its keys are chosen and their weights fitted."""
    batch, kv_heads, n_keys, _ = prompt.keys.shape
    double = dict(dtype=torch.float64, device=prompt.keys.device)
    keep_rows = batch * kv_heads == 1 and as_rows(queries.log_n.numel(), n_keys)
    products = torch.zeros(0 if keep_rows else batch * kv_heads, n_keys, n_keys, **double)  # type: ignore[call-overload]
    attention = torch.zeros(batch * kv_heads, n_keys, **double)  # type: ignore[call-overload]
    rows = []
    for cell, e, _ in _by_cell(queries, prompt):
        if keep_rows:
            rows.append(e[None])
        else:
            products[cell] += e.mT @ e
        attention[cell] += (e / e.sum(dim=-1, keepdim=True)).square().sum(dim=0)
    gram: Gram = Rows(rows) if keep_rows else Products(products)
    return Masses(gram, gram.times(torch.ones_like(attention[..., None])).squeeze(-1), attention)


def match_among(queries: Queries, prompt: PromptKeys, r: int, by: MatchedBy) -> Matched:
    """:func:`match_keys` for every head of one layer; for long prompts, one head at a time, so that memory stays bounded."""
    cells = prompt.keys.shape[0] * prompt.keys.shape[1]
    if not by_cell(cells, queries.log_n[0].numel() // prompt.keys.shape[1], prompt.keys.shape[2], queries.q.device):
        return match_keys(masses(queries, prompt), r, by)
    return concatenated((match_keys(masses(*own), r, by) for own in cells_of(queries, prompt)), Matched)


def match_keys(sums: Masses, r: int, by: MatchedBy) -> Matched:
    """Choose ``r`` keys, by the highest root mean square attention or by matching pursuit on the mass.

    Each step of the pursuit takes the key that correlates most with the residual mass, then refits all weights.
    """
    index = sums.attention.topk(r, dim=-1).indices if by == "attention" else _pursued(sums, r)
    return Matched(index, sums.gram.among(index), sums.with_m.gather(1, index))


def _pursued(sums: Masses, r: int) -> Int[Tensor, "cell r"]:
    cells, n_keys = sums.with_m.shape
    every = torch.arange(cells, device=sums.with_m.device)
    index = torch.zeros(cells, r, dtype=torch.long, device=every.device)
    taken = torch.zeros(cells, n_keys, dtype=torch.bool, device=every.device)
    columns = sums.with_m.new_zeros(cells, r, n_keys)
    left = sums.with_m
    for step in range(r):
        index[:, step] = j = left.masked_fill(taken, -torch.inf).argmax(dim=-1)
        taken[every, j] = True
        columns[:, step] = sums.gram.column(j)
        rows, chosen = columns[:, : step + 1], index[:, : step + 1]
        gram = rows.gather(2, chosen[:, None].expand(-1, step + 1, -1))
        target = sums.with_m.gather(1, chosen)[..., None]
        w = solve(gram, target, torch.ones_like(chosen, dtype=torch.bool), RIDGE).clamp(min=LEAST)
        left = sums.with_m - (w.mT @ rows).squeeze(1)
    return index


def match_mass(matched: Matched, active: Bool[Tensor, "cell r"]) -> Float[Tensor, "cell r"]:
    """The weights w of the active keys, by non-negative least squares."""
    return nonnegative_weights(matched.gram, matched.with_m, active)


def match_output(
    queries: Queries, prompt: PromptKeys, index: Int[Tensor, "cell r"], w: Float[Tensor, "cell r"]
) -> Float[Tensor, "cell r d_head"]:
    """The values C, not multiplied by their weights; 0 where the weight is 0."""
    cells, r = index.shape
    double = dict(dtype=torch.float64, device=w.device)
    gram = torch.zeros(cells, r, r, **double)  # type: ignore[call-overload]
    right = torch.zeros(cells, r, prompt.values.shape[-1], **double)  # type: ignore[call-overload]
    for cell, e, values in _by_cell(queries, prompt):
        x = e[:, index[cell]] * w[cell]
        x = x / x.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
        y = e @ values / e.sum(dim=-1, keepdim=True)
        gram[cell] += x.mT @ x
        right[cell] += x.mT @ y
    return solve(gram, right, w > 0, RIDGE)


def _by_cell(queries: Queries, prompt: PromptKeys) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(cell, E, values), a block of queries at a time; queries that see none of the prompt's keys are left out."""
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        for block in blocks_of(own, keys.keys.shape[2]):
            psi = key_shares(block, keys)[0].double()
            largest = psi.amax(dim=-1, keepdim=True)
            seen = largest[:, 0] > 0
            yield cell, psi[seen] / largest[seen], keys.values[0, 0].double()


doors(__name__)
