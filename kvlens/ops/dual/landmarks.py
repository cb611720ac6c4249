"""Finite features for the softmax kernel that are exact on chosen keys: a Nystroem map by pivoted Cholesky decomposition.

With landmarks c_1 .. c_r and L L^T = kappa(c, c), phi(x) = L^{-1} kappa(c, x) gives phi(a).phi(b) = kappa(a, b) whenever a or
b is a landmark. Each new landmark is the key with the largest remaining error (Harbrecht et al. 2012). Keys are first scaled
to kappa(k, k) = 1 and queries to a largest kappa(q, k) of 1, so that nothing overflows; the scales are returned as
logarithms. The loop runs over landmarks, for all heads at once.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.errors import KVLensError


class LandmarkFeatures(NamedTuple):
    """Features of keys and queries, the logarithm of each row's scale, and the indices of the landmark keys."""

    keys: Float[Tensor, "head token r"]
    queries: Float[Tensor, "head query r"]
    log_keys: Float[Tensor, "head token"]
    log_queries: Float[Tensor, "head query"]
    landmarks: Int[Tensor, "head r"]


def landmark_features(
    keys: Float[Tensor, "head token d"], queries: Float[Tensor, "head query d"], scale: float, n_landmarks: int
) -> LandmarkFeatures:
    """Features with phi(a).phi(b) ~ exp(a.b / scale), with equality where a or b is a landmark.

    Raises:
        KVLensError: no landmark, or more of them than keys.
    """
    n_keys = keys.shape[1]
    if not 1 <= n_landmarks <= n_keys:
        raise KVLensError(f"landmarks: expected 1 to {n_keys} (one per key), got {n_landmarks}")
    log_keys = keys.square().sum(dim=-1) / (2 * scale)
    at_queries = queries @ keys.transpose(-1, -2) / scale - log_keys[:, None]
    log_queries = at_queries.amax(dim=-1)
    at_keys = keys @ keys.transpose(-1, -2) / scale - log_keys[:, None] - log_keys[..., None]
    kappa = torch.cat([at_keys, at_queries - log_queries[..., None]], dim=1).exp()  # rows: keys, then queries
    heads = torch.arange(keys.shape[0], device=keys.device)
    residual = torch.ones_like(log_keys)
    columns: list[Tensor] = []
    landmarks: list[Tensor] = []
    for _ in range(n_landmarks):
        pivot = residual.argmax(dim=-1)
        size, column = residual[heads, pivot], kappa[heads, :, pivot]
        if columns:
            before = torch.stack(columns, dim=-1)
            column = column - (before * before[heads, pivot][:, None]).sum(dim=-1)
        # a pivot at rounding level is a key that repeats others: it adds nothing
        new = size > n_keys * torch.finfo(keys.dtype).eps
        columns.append(torch.where(new[:, None], column / torch.where(new, size, 1.0).sqrt()[:, None], 0.0))
        landmarks.append(pivot)
        residual = (residual - columns[-1][:, :n_keys].square()).clamp(min=0)
        residual[heads, pivot] = -1.0  # never again
    features = torch.stack(columns, dim=-1)
    chosen = torch.stack(landmarks, dim=-1)
    return LandmarkFeatures(features[:, :n_keys], features[:, n_keys:], log_keys, log_queries, chosen)


def random_log_features(
    x: Float[Tensor, "head token d"], projection: Float[Tensor, "head m d"], scale: float
) -> tuple[Float[Tensor, "head token m"], Float[Tensor, "head token"]]:
    """Positive random features, scaled to a largest entry of 1 per row, and the logarithm of that scale.

    The same map as :func:`kvlens.ops.feature_maps.random_features`, for vectors whose features would overflow.
    """
    scaled = x / scale**0.5
    exponent = scaled @ projection.to(x).transpose(-1, -2) - scaled.square().sum(dim=-1, keepdim=True) / 2
    peak = exponent.amax(dim=-1)
    m = torch.tensor(float(projection.shape[1]), dtype=x.dtype, device=x.device)
    return (exponent - peak[..., None]).exp(), peak - m.log() / 2
