"""The variants of one head, in loops over queries and tokens, one line per equation: the reference for the fast forms."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor


def naive_regularised(
    pattern: Float[Tensor, "pos pos"],
    v: Float[Tensor, "pos d_head"],
    alpha: float,
    form: Literal["self_attention", "normalised", "one_step"],
) -> Float[Tensor, "pos d_head"]:
    """z_i - alpha v_i (app. D.1), the same over 1 - alpha, or W_0 scaled by 1 - alpha where H_T is the query (eq. 13)."""
    rows = []
    for i in range(len(v)):
        z = sum((pattern[i, j] * v[j] for j in range(i + 1)), torch.zeros_like(v[0]))
        if form == "one_step":
            rows.append(z - alpha * pattern[i, i] * v[i])
        else:
            rows.append((z - alpha * v[i]) / (1 - alpha if form == "normalised" else 1))
    return torch.stack(rows)


def naive_negative(
    pattern: Float[Tensor, "pos pos"],
    scores: Float[Tensor, "pos pos"],
    v: Float[Tensor, "pos d_head"],
    k: int | float,
    beta: float,
    per: Literal["query", "label"],
) -> Float[Tensor, "pos d_head"]:
    """p~_ij = p_ij - (beta / k_i) [j in N_i], or v~_j = v_j - (beta / k_j) sum_{n in N_j} v_n (DUAL eq. 15, 34 and sec. 5)."""
    negatives = []
    for i in range(len(v)):
        count = min(k, i + 1) if isinstance(k, int) else math.ceil(k * (i + 1))
        negatives.append(sorted(range(i + 1), key=lambda j: float(scores[i, j]))[:count])
    means = [sum((v[n] for n in chosen), torch.zeros_like(v[0])) / len(chosen) for chosen in negatives]
    rows = []
    for i in range(len(v)):
        if per == "query":
            z = sum((pattern[i, j] * v[j] for j in range(i + 1)), torch.zeros_like(v[0])) - beta * means[i]
        else:
            z = sum((pattern[i, j] * (v[j] - beta * means[j]) for j in range(i + 1)), torch.zeros_like(v[0]))
        rows.append(z)
    return torch.stack(rows)


def naive_ridge(
    kernel: Float[Tensor, "pos pos"],
    at_queries: Float[Tensor, "pos pos"],
    v: Float[Tensor, "pos d_head"],
    strength: float,
) -> Float[Tensor, "pos d_head"]:
    """z_i = sum_j v_j [(K_i + lambda I)^{-1} kappa(K, q_i)]_j over the tokens j <= i, solved for each query (eq. 33)."""
    rows = []
    for i in range(len(v)):
        n = i + 1
        weights = torch.linalg.solve(kernel[:n, :n] + strength * torch.eye(n, dtype=v.dtype), at_queries[i, :n])
        rows.append(weights @ v[:n])
    return torch.stack(rows)
