"""The exponential's Taylor polynomial to second order as features: phi(q).phi(k) = 1 + s + s^2 / 2, s = q.k / scale."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.feature_maps.maps import taylor
from kvlens.ops.softmax_attention import ScaledFeatures


def taylor_features(x: Float[Tensor, "batch pos head d_head"], scale: float) -> ScaledFeatures:
    """phi(x) = [1, x', vec(x' x'^T) / sqrt 2], x' = x / sqrt(scale), as features of norm 1 and a log-scale."""
    features = taylor(x, scale)
    size = x.detach().square().sum(dim=-1) / scale  # |phi|^2 = 1 + |x'|^2 + |x'|^4 / 2
    log_norm = torch.log(torch.hypot(torch.sqrt(1 + size), size / math.sqrt(2.0)))
    return ScaledFeatures(features * torch.exp(-log_norm)[..., None], log_norm)
