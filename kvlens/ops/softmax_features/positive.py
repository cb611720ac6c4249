"""Positive features that do not depend on the prompt: phi_r(x) = exp(w_r.x + a_r), and random features with exp(-|x|^2 / 2).

- **random** (FAVOR+, Choromanski et al. 2021; ICLCA sec. 6.4): E[phi(q).phi(k)] = exp(q.k / scale) for w_r ~ N(0, I), with a
  variance that grows like exp(|q + k|^2 / scale) / m.
- **learned** (:mod:`kvlens.conversion.softmax.learned`): w and a are trained.
- **elu + 1** (Katharopoulos et al. 2020): phi(x) = elu(x') + 1, not an exponential, with x' = x / sqrt(scale).

Both are returned as logarithms: the features of a real model's queries span hundreds of orders of magnitude.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor


def random_log_features(
    x: Float[Tensor, "batch pos head d_head"], projection: Float[Tensor, "kv_head m d_head"], scale: float
) -> Float[Tensor, "batch pos head m"]:
    """log phi(x) = w.x' - |x'|^2 / 2 - log(m) / 2 with x' = x / sqrt(scale), for queries and keys alike."""
    scaled = x / math.sqrt(scale)
    exponent = _project(scaled, projection) - scaled.square().sum(dim=-1, keepdim=True) / 2
    return exponent - math.log(projection.shape[1]) / 2


def learned_log_features(
    x: Float[Tensor, "batch pos head d_head"],
    weight: Float[Tensor, "kv_head m d_head"],
    offset: Float[Tensor, "kv_head m"],
) -> Float[Tensor, "batch pos head m"]:
    """log phi(x) = w.x + a."""
    return _project(x, weight) + offset.repeat_interleave(x.shape[2] // offset.shape[0], dim=0)


def elu_log_features(x: Float[Tensor, "batch pos head d_head"], scale: float) -> Float[Tensor, "batch pos head d_head"]:
    """log(elu(x') + 1): x' below 0 and log(1 + x') above."""
    scaled = x / math.sqrt(scale)
    return torch.where(scaled < 0, scaled, scaled.clamp(min=0).log1p())


def _project(x: Tensor, weight: Tensor) -> Tensor:
    per_head = weight.to(x.dtype).repeat_interleave(x.shape[2] // weight.shape[0], dim=0)
    return torch.einsum("bphd,hmd->bphm", x, per_head)
