"""The references: one query, one key at a time, in plain exponentials of float64. They overflow where scores are large."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.ops.softmax_features.types import ScoreRule


def naive_score(q: Float[Tensor, " d"], key: Float[Tensor, " d"], rule: ScoreRule, head: int, apart: int) -> float:
    """The log-score of one query of head ``head`` and one key that lies ``apart`` tokens before it."""
    score = float(q @ key) / rule.scale
    if rule.soft_cap:
        score = rule.soft_cap * math.tanh(score / rule.soft_cap)
    if rule.slopes is not None:
        score -= float(rule.slopes[head]) * apart
    return -math.inf if rule.window is not None and apart >= rule.window else score


def naive_virtual_key_features(
    q: Float[Tensor, "batch pos head d_head"],
    keys: Float[Tensor, "#batch kv_head r d_head"],
    rule: ScoreRule,
    distance: Int[Tensor, "#batch kv_head r"],
    positions: Int[Tensor, "#batch pos"],
) -> Float[Tensor, "batch pos head r"]:
    """phi_r(q) = exp(score of q and c_r)."""
    batch, pos, heads, _ = q.shape
    n_kv, r = keys.shape[1:3]
    phi = q.new_zeros(batch, pos, heads, r)
    for b in range(batch):
        for i in range(pos):
            for h in range(heads):
                g, kb = h // (heads // n_kv), b % keys.shape[0]
                for j in range(r):
                    apart = int(positions[b % positions.shape[0], i]) + int(distance[b % distance.shape[0], g, j])
                    phi[b, i, h, j] = math.exp(naive_score(q[b, i, h], keys[kb, g, j], rule, h, apart))
    return phi


def naive_random_features(x: Float[Tensor, " d"], projection: Float[Tensor, "m d"], scale: float) -> Float[Tensor, " m"]:
    """exp(w.x' - |x'|^2 / 2) / sqrt(m) of one vector."""
    scaled = x / math.sqrt(scale)
    return torch.stack([torch.exp(w @ scaled - scaled @ scaled / 2) for w in projection]) / math.sqrt(len(projection))
