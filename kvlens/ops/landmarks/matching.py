"""Attention Matching (Zweiger, Fu, Guo, Kim 2026, arXiv 2602.16284): match the mass and output of attention over the prompt.

For query i, key j of the prompt has the mass E_ij = exp(s_ij - max_j s_ij); the whole prompt has the mass m_i = sum_j E_ij and
the output y_i = sum_j E_ij v_j / m_i. The kept keys S get weights w >= 0 (their logarithms are the paper's beta) and values C:

    w:  sum_i (E_iS w - m_i)^2 -> min                        C:  sum_i |x_i C - y_i|^2 -> min,  x_i = E_iS * w / (E_iS w)

The text after the prompt, and how much attention it leaves for the prompt, play no role here; in kvlens' own fit
(:mod:`kvlens.ops.landmarks.weights`) they do.
"""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import checked
from kvlens.ops.landmarks.shares import PromptKeys, Queries, blocks_of, cells_of, key_shares
from kvlens.ops.landmarks.weights import nonnegative_weights, solve

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

    gram: Float[Tensor, "cell key key"]
    with_m: Float[Tensor, "cell key"]
    attention: Float[Tensor, "cell key"]


@checked(head="kv_head")
def masses(queries: Queries, prompt: PromptKeys) -> Masses:
    """The sums of one layer from which its keys are chosen and their weights fitted."""
    batch, kv_heads, n_keys, _ = prompt.keys.shape
    double = dict(dtype=torch.float64, device=prompt.keys.device)
    gram = torch.zeros(batch * kv_heads, n_keys, n_keys, **double)  # type: ignore[call-overload]
    attention = torch.zeros(batch * kv_heads, n_keys, **double)  # type: ignore[call-overload]
    for cell, e, _ in _by_cell(queries, prompt):
        gram[cell] += e.mT @ e
        attention[cell] += (e / e.sum(dim=-1, keepdim=True)).square().sum(dim=0)
    return Masses(gram, gram.sum(dim=-1), attention)


@checked
def match_keys(sums: Masses, r: int, by: MatchedBy) -> Int[Tensor, "cell r"]:
    """Choose ``r`` keys, by the highest root mean square attention or by matching pursuit on the mass.

    Each step of the pursuit takes the key that correlates most with the residual mass, then refits all weights.
    """
    if by == "attention":
        return sums.attention.topk(r, dim=-1).indices
    cells, n_keys = sums.with_m.shape
    every = torch.arange(cells, device=sums.gram.device)
    index = torch.zeros(cells, r, dtype=torch.long, device=sums.gram.device)
    taken = torch.zeros(cells, n_keys, dtype=torch.bool, device=sums.gram.device)
    left = sums.with_m
    for step in range(r):
        index[:, step] = j = left.masked_fill(taken, -torch.inf).argmax(dim=-1)
        taken[every, j] = True
        chosen = index[:, : step + 1]
        rows = sums.gram[every[:, None], chosen]
        gram = rows.gather(2, chosen[:, None].expand(-1, step + 1, -1))
        target = sums.with_m.gather(1, chosen)[..., None]
        w = solve(gram, target, torch.ones_like(chosen, dtype=torch.bool), RIDGE).clamp(min=LEAST)
        left = sums.with_m - (w.mT @ rows).squeeze(1)
    return index


@checked
def match_mass(sums: Masses, index: Int[Tensor, "cell r"], active: Bool[Tensor, "cell r"]) -> Float[Tensor, "cell r"]:
    """The weights w of the active keys, by non-negative least squares."""
    return nonnegative_weights(sums.gram, sums.with_m, index, active)


@checked(head="kv_head")
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
