"""RoPE, the fast form."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError


def rotate(
    x: Float[Tensor, "*lead d"],
    cos: Float[Tensor, "*#lead rotary_dim"],
    sin: Float[Tensor, "*#lead rotary_dim"],
    adjacent_pairs: bool = False,
) -> Float[Tensor, "*lead d"]:
    """Rotate the first ``rotary_dim`` features of ``x``; the others pass through. ``-sin`` rotates back.

    Args:
        x: row vectors in the last axis.
        cos, sin: rows of a :class:`RotaryTable`, broadcast over the leading axes. They get no gradient.
        adjacent_pairs: pairs (0, 1), (2, 3), ... as GPT-J does, instead of (i, i + rotary_dim / 2) as GPT-NeoX does.

    Raises:
        KVLensError: ``cos`` and ``sin`` are wider than ``x``, or of odd width.
    """
    if cos.shape[-1] > x.shape[-1] or cos.shape[-1] % 2:
        raise KVLensError(
            f"rotate: expected an even rotary_dim of at most d={x.shape[-1]}, got cos and sin of {cos.shape[-1]} features"
        )
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotation.apply(x, cos, sin, adjacent_pairs)  # type: ignore[no-untyped-call]
    return _turned(x, cos, sin, adjacent_pairs)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, adjacent_pairs: bool) -> Tensor:
    """(x_1 cos - x_2 sin, x_2 cos + x_1 sin) for each pair of features, allocating a single new tensor."""
    n = cos.shape[-1]
    given = x if n == x.shape[-1] else x[..., :n]
    turned = given * cos
    (x_1, x_2), (turned_1, turned_2) = _pairs(given, adjacent_pairs), _pairs(turned, adjacent_pairs)
    sin = sin[..., ::2] if adjacent_pairs else sin.narrow(-1, 0, n // 2)  # both features of a pair have the same angle
    turned_1.addcmul_(x_2, sin, value=-1)
    turned_2.addcmul_(x_1, sin)
    return turned if n == x.shape[-1] else torch.cat([turned, x[..., n:]], dim=-1)


def _pairs(x: Tensor, adjacent: bool) -> tuple[Tensor, Tensor]:
    """The first and the second feature of each pair, as views."""
    if adjacent:
        return x[..., ::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x.narrow(-1, 0, half), x.narrow(-1, half, half)  # half the time of slices with an ellipsis


class _Rotation(torch.autograd.Function):
    """A rotation is linear and orthogonal, so its gradient is the inverse rotation; only cos and sin need to be saved."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, cos: Tensor, sin: Tensor, adjacent_pairs: bool) -> Tensor:
        return _turned(x, cos, sin, adjacent_pairs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, bool], output: Tensor) -> None:
        _, cos, sin, ctx.adjacent_pairs = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate(gradient, cos, -sin, ctx.adjacent_pairs), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        cos, sin = ctx.saved_tensors
        return rotate(tangent, cos, sin, ctx.adjacent_pairs)
