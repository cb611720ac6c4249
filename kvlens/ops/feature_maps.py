"""phi: the map that turns a softmax score exp(q.k) into a product phi(q).phi(k), so that a sum of keys can be stored.

In this order: elu + 1 (Katharopoulos et al. 2020), relu, positive random features (Performer, Choromanski et al. 2021), the
Taylor polynomial (Based, Arora et al. 2024), Hedgehog (Zhang et al. 2024), and the projections of the random features.
:mod:`kvlens.components.feature_maps` adds each map's parameters and settings.

With x' = x / sqrt(scale), phi(q).phi(k) approximates exp(q.k / scale) for random and taylor. Random features keep one fixed
log-scale: subtracting a maximum at every call, as other implementations do, would put the features of a prompt and those of its
continuation on different scales, so that their sum would be meaningless.
"""

import math
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import Count, doors


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
    x: Float[Tensor, "*lead head d"], projection: Float[Tensor, "head m d"], scale: float
) -> Float[Tensor, "*lead head m"]:
    """Positive random features: E[phi(q).phi(k)] = exp(q.k / scale) for rows of ``projection`` ~ N(0, I).

    Unbiased, with a variance that grows like exp(|q + k|^2 / scale) / m.
    """
    scaled = x / math.sqrt(scale)
    exponent = torch.einsum("...hd,hmd->...hm", scaled, projection.to(x.dtype))
    return (exponent - scaled.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(projection.shape[1])


def taylor(x: Float[Tensor, "*lead d"], scale: float) -> Float[Tensor, "*lead d_phi"]:
    """phi(q).phi(k) = 1 + s + s^2 / 2 with s = q.k / scale: the exponential to second order, never negative."""
    scaled = x / math.sqrt(scale)
    pairs = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(-2) / math.sqrt(2.0)
    return torch.cat([torch.ones_like(scaled[..., :1]), scaled, pairs], dim=-1)


def hedgehog(x: Float[Tensor, "*lead head d"], weight: Float[Tensor, "head d d"]) -> Float[Tensor, "*lead head d_phi"]:
    """phi(x) = softmax([2Wx, -2Wx]), W learned per head."""
    projected = 2.0 * torch.einsum("...hd,hed->...he", x, weight.to(x.dtype))
    return torch.cat([projected, -projected], dim=-1).softmax(dim=-1)


def draw_projections(
    n_heads: Count,
    n_features: Count,
    d_head: Count,
    kind: Literal["iid", "orthogonal"],
    generator: torch.Generator | None = None,
) -> Float[Tensor, "head m d"]:
    """Rows ~ N(0, I_d), in float32: independent, or orthogonal within blocks of ``d_head`` rows (FAVOR+, less variance).

    An orthogonal block is a Haar-random rotation whose rows are rescaled to the lengths of independent normal vectors, so
    that each row is still exactly normal and the estimate stays unbiased.
    """
    normal = torch.randn(n_heads, n_features, d_head, generator=generator, dtype=torch.float64)
    if kind == "iid":
        return normal.float()
    n_blocks = -(-n_features // d_head)
    square = torch.randn(n_heads, n_blocks, d_head, d_head, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(square)
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # makes the rotation Haar-distributed
    directions = q.flatten(1, 2)[:, :n_features]
    return (directions * normal.norm(dim=-1, keepdim=True)).float()


doors(__name__)
