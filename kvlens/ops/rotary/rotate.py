"""RoPE, the fast form, and the table it reads.

The table's angles are computed in float64 and rounded once. TransformerLens computes them in float32, where the angle of
position 4,096 is wrong by up to 2e-4, and R_a R_b = R_{a+b} with it; converting a prompt moves keys along exactly this law.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor


def rotate(
    x: Float[Tensor, "*lead d"],
    cos: Float[Tensor, "*#lead rotary_dim"],
    sin: Float[Tensor, "*#lead rotary_dim"],
    adjacent_pairs: bool = False,
) -> Float[Tensor, "*lead d"]:
    """Rotate the first ``rotary_dim`` features of ``x``; the others pass through. ``-sin`` rotates back.

    Args:
        x: row vectors in the last axis.
        cos, sin: rows of a :class:`RotaryTable`, broadcast over the axes before.
        adjacent_pairs: pairs (0, 1), (2, 3), ... as GPT-J does, instead of (i, i + rotary_dim / 2) as GPT-NeoX does.
    """
    rotary_dim = cos.shape[-1]
    turned = x[..., :rotary_dim]
    if adjacent_pairs:
        flipped = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
    else:
        half = rotary_dim // 2
        flipped = torch.cat([-turned[..., half:], turned[..., :half]], dim=-1)
    turned = torch.addcmul(turned * cos, flipped, sin)
    return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], dim=-1)


class RotaryTable:
    """cos and sin rows by position, grown by doubling when a longer text comes: there is no ``n_ctx`` here.

    Args:
        compute: ``compute(n_ctx=n)`` gives (sin, cos), each [n, rotary_dim], in float64.
    """

    def __init__(self, compute: Callable[..., tuple[Tensor, Tensor]]):
        self._compute = compute
        self._rows: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def rows(
        self, first: int, n: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "pos rotary_dim"], Float[Tensor, "pos rotary_dim"]]:
        """(cos, sin) of positions ``first .. first + n - 1``."""
        cos, sin = self._at_least(first + n, device, dtype)
        return cos[first : first + n], sin[first : first + n]

    def at(
        self, positions: Int[Tensor, "*shape"], dtype: torch.dtype
    ) -> tuple[Float[Tensor, "*shape rotary_dim"], Float[Tensor, "*shape rotary_dim"]]:
        """(cos, sin) of each of ``positions``."""
        needed = int(positions.max()) + 1 if positions.numel() else 1
        cos, sin = self._at_least(needed, positions.device, dtype)
        return cos[positions], sin[positions]

    def _at_least(self, n: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        held = self._rows.get((device, dtype))
        if held is None or held[0].shape[0] < n:
            size = max(n, 256 if held is None else 2 * held[0].shape[0])
            with torch.inference_mode(False), torch.no_grad():  # a table made while generating serves training afterwards
                sin, cos = self._compute(n_ctx=size)
                held = cos.to(device, dtype), sin.to(device, dtype)
            self._rows[device, dtype] = held
        return held
