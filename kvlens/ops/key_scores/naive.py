"""The references: one query, one head, one key at a time."""

import math

import torch
from jaxtyping import Float
from torch import Tensor


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
    """From the mean and covariance of one head's queries."""
    mean = q.mean(dim=0)
    covariance = sum(torch.outer(row - mean, row - mean) for row in q) / len(q)
    return float(mean @ key) / scale + float(key @ covariance @ key) / (2 * scale**2)
