"""RoPE: R_m, the rotation of a vector by its position m (Su et al. 2021); since R_a R_b = R_{a+b}, a rebased bias is exact.

First :func:`naive_rotate`, the matrix of 2 x 2 rotations, then :func:`rotate`, the fast form, then :class:`RotaryTable`: cos
and sin of any position, in memory that does not grow with the text.

The angles are computed in float64 and rounded once. TransformerLens computes them in float32, where the angle of position
4,096 is wrong by up to 2e-4, so that R_a R_b = R_{a+b} fails by as much; converting a prompt relies on this identity.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError


def naive_rotate(
    x: Float[Tensor, "*lead d"], position: int, frequencies: Float[Tensor, " pairs"], adjacent_pairs: bool
) -> Float[Tensor, "*lead d"]:
    """R_position x (row vectors), with the matrix built pair by pair; features after the last pair pass through."""
    n = len(frequencies)
    matrix = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    for p in range(n):
        i, j = (2 * p, 2 * p + 1) if adjacent_pairs else (p, p + n)
        angle = torch.as_tensor(position, dtype=x.dtype) * frequencies[p]
        matrix[i, i] = matrix[j, j] = angle.cos()
        matrix[i, j], matrix[j, i] = -angle.sin(), angle.sin()
    return x @ matrix.T


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
    def jvp(ctx: Any, tangent: Tensor, *_: object) -> Tensor:
        cos, sin = ctx.saved_tensors
        return rotate(tangent, cos, sin, ctx.adjacent_pairs)


ROWS_KEPT = 8192
"""Number of rows from position 0 that are kept once computed; later rows are computed on request."""
CosSinRows = tuple[Tensor, Tensor]


class RotaryTable:
    """(cos, sin) rows by position, without an ``n_ctx``.

    Rows beyond :data:`ROWS_KEPT` are computed on request. The last request is cached, because all layers of a model that share
    a table, those of equal :attr:`angles`, ask for the same rows in turn.

    Args:
        compute: ``compute(n_ctx=n)`` returns (sin, cos) of positions 0 .. n - 1, each [n, rotary_dim], in float64. Angles must
            be proportional to the position; the row of position 1 gives the frequencies.
    """

    def __init__(self, compute: Callable[..., tuple[Tensor, Tensor]]):
        self._compute = compute
        self._kept: dict[tuple[torch.device, torch.dtype], CosSinRows] = {}
        self._last: tuple[tuple[int, int, torch.device, torch.dtype], CosSinRows] | None = None

    @cached_property
    def angles(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The angles of position 1, which are the frequencies, and the length of (cos, sin): all rows follow from them.

        Some scaled forms of RoPE multiply cos and sin by a common factor, which is their length.
        """
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            sin, cos = self._compute(n_ctx=2)
            return tuple(torch.atan2(sin[1], cos[1]).tolist()), tuple(torch.hypot(sin[1], cos[1]).tolist())

    def rows(
        self, first: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "pos rotary_dim"], Float[Tensor, "pos rotary_dim"]]:
        """(cos, sin) of positions ``first .. first + n - 1``."""
        asked, last = (first, n, device, dtype), self._last  # read once: another thread may ask for other rows meanwhile
        if last is None or last[0] != asked:
            if first + n <= ROWS_KEPT:
                cos, sin = (rows[first : first + n] for rows in self._kept_rows(first + n, device, dtype))
            else:
                cos, sin = self._rows_at(torch.arange(first, first + n), device, dtype)
            last = self._last = asked, (cos, sin)
        return last[1]

    def at(
        self, positions: Int[Tensor, "*shape"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "*shape rotary_dim"], Float[Tensor, "*shape rotary_dim"]]:
        """(cos, sin) of each of ``positions``."""
        first, last = (int(positions.min()), int(positions.max())) if positions.numel() else (0, 0)
        if last >= ROWS_KEPT and last - first >= ROWS_KEPT:  # far apart: no table between them
            return self._rows_at(positions, positions.device, dtype)
        first = first if last >= ROWS_KEPT else 0
        cos, sin = self.rows(first, last - first + 1, positions.device, dtype)
        return cos[positions - first], sin[positions - first]

    def _kept_rows(self, n: int, device: torch.device, dtype: torch.dtype) -> CosSinRows:
        held = self._kept.get((device, dtype))
        if held is None or held[0].shape[0] < n:
            size = min(ROWS_KEPT, max(n, 256 if held is None else 2 * held[0].shape[0]))
            with torch.inference_mode(False), torch.no_grad():  # rows made during generation must be usable in training
                sin, cos = self._compute(n_ctx=size)
                held = self._kept[device, dtype] = cos.to(device, dtype), sin.to(device, dtype)
        return held

    def _rows_at(self, positions: Tensor, device: torch.device, dtype: torch.dtype) -> CosSinRows:
        with torch.inference_mode(False), torch.no_grad():
            frequencies, length = (torch.tensor(x, dtype=torch.float64, device=device) for x in self.angles)
            angles = positions.to(device, torch.float64)[..., None] * frequencies
            return (angles.cos() * length).to(dtype), (angles.sin() * length).to(dtype)


doors(__name__)
