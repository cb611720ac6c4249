"""The references: one head, one query, one key at a time, every fit solved from scratch from its rows. For small problems."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.ops.landmarks.choice import KAPPA
from kvlens.ops.softmax_features.naive import naive_score
from kvlens.ops.softmax_features.types import ScoreRule


def naive_share(
    q: Float[Tensor, " d"], key: Float[Tensor, " d"], log_n: float, rule: ScoreRule, head: int, apart: int
) -> float:
    """psi: the key's share of the whole normalizer."""
    return math.exp(naive_score(q, key, rule, head, apart) - log_n)


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


def naive_greedy_budgets(gain: Float[Tensor, "head r"], total: int) -> Int[Tensor, " head"]:
    """Keys per head: of all ways to distribute ``total`` keys, the one that removes most error."""
    counts = torch.cartesian_prod(*[torch.arange(gain.shape[1] + 1)] * len(gain))
    counts = counts[counts.sum(dim=1) == total]
    removed = [sum(float(gain[head, :n].sum()) for head, n in enumerate(c.tolist())) for c in counts]
    return counts[max(range(len(counts)), key=removed.__getitem__)]


def _left_of(target: Tensor, columns: Tensor) -> float:
    """Squared error of the best linear combination of columns."""
    return float((target - columns @ torch.linalg.lstsq(columns, target).solution).square().sum())
