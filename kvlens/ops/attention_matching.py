"""Attention Matching: a few of a prompt's keys that match the mass and output of attention over all of them.

After Zweiger, Fu, Guo, Kim 2026 (arXiv 2602.16284) and its authors' code; :mod:`kvlens.ops.landmarks` is kvlens' own choice, by
the error of the whole output.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
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
