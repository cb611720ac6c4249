"""phi of the feature maps as pure functions; :mod:`kvlens.components.feature_maps` adds each map's parameters and settings.

With x' = x / sqrt(attn_scale), phi(q).phi(k) approximates exp(q.k / attn_scale) for random and taylor. Random features keep
one fixed log-scale: subtracting a maximum at every call, as other implementations do, would put the features of a prompt and
those of its continuation on different scales, so that their sum would be meaningless.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def elu_plus_one(x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
    """phi(x) = elu(x) + 1 = exp(min(x, 0)) + max(x, 0), positive everywhere.

    This form avoids subtracting 1 and adding it back: ``elu(x) + 1`` is exactly 0 in float32 below x = -17.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        return _EluPlusOne.apply(x)  # type: ignore[no-untyped-call]
    return x.clamp_max(0.0).exp_().add_(x.clamp_min(0.0))


class _EluPlusOne(torch.autograd.Function):
    """The derivative is exp(x) below 0 and 1 above, min(phi, 1), so only phi is saved for the backward pass."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clamp_max(0.0).exp_().add_(x.clamp_min(0.0))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return gradient * phi.clamp(max=1.0)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (phi,) = ctx.saved_tensors
        return tangent * phi.clamp(max=1.0)


def relu(x: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead d"]:
    """phi(x) = relu(x) + 1e-3."""
    return torch.relu(x) + 1e-3


def random_features(
    x: Float[Tensor, "*lead head d"], projection: Float[Tensor, "head m d"], attn_scale: float
) -> Float[Tensor, "*lead head m"]:
    """Positive random features: E[phi(q).phi(k)] = exp(q.k / attn_scale) for rows of ``projection`` ~ N(0, I).

    Unbiased, with a variance that grows like exp(|q + k|^2 / attn_scale) / m.
    """
    scaled = x / math.sqrt(attn_scale)
    exponent = torch.einsum("...hd,hmd->...hm", scaled, projection.to(x.dtype))
    return (exponent - scaled.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(projection.shape[1])


def taylor(x: Float[Tensor, "*lead d"], attn_scale: float) -> Float[Tensor, "*lead d_phi"]:
    """phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / attn_scale: the exponential to second order, never negative."""
    scaled = x / math.sqrt(attn_scale)
    pairs = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(-2) / math.sqrt(2.0)
    return torch.cat([torch.ones_like(scaled[..., :1]), scaled, pairs], dim=-1)


def hedgehog(x: Float[Tensor, "*lead head d"], weight: Float[Tensor, "head d d"]) -> Float[Tensor, "*lead head d_phi"]:
    """phi(x) = softmax([2Wx, -2Wx]), W learned per head."""
    projected = 2.0 * torch.einsum("...hd,hed->...he", x, weight.to(x.dtype))
    return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)
