"""The rows of RoPE: cos and sin of any position, in memory that does not grow with the text.

The angles are computed in float64 and rounded once. TransformerLens computes them in float32, where the angle of position
4,096 is wrong by up to 2e-4, so that R_a R_b = R_{a+b} fails by as much; converting a prompt relies on this identity.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

ROWS_KEPT = 8192
"""Number of rows from position 0 that are kept once computed; later rows are computed on request."""
Rows = tuple[Tensor, Tensor]


class RotaryTable:
    """(cos, sin) rows by position, without an ``n_ctx``.

    Rows beyond :data:`ROWS_KEPT` are computed on request. The last request is cached, because all layers of a model ask for the
    same rows in turn.

    Args:
        compute: ``compute(n_ctx=n)`` returns (sin, cos) of positions 0 .. n - 1, each [n, rotary_dim], in float64. Angles must
            be proportional to the position; the row of position 1 gives the frequencies.
    """

    def __init__(self, compute: Callable[..., tuple[Tensor, Tensor]]):
        self._compute = compute
        self._frequencies: tuple[Tensor, Tensor] | None = None
        self._kept: dict[tuple[torch.device, torch.dtype], Rows] = {}
        self._last: tuple[tuple[int, int, torch.device, torch.dtype], Rows] | None = None

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

    def _kept_rows(self, n: int, device: torch.device, dtype: torch.dtype) -> Rows:
        held = self._kept.get((device, dtype))
        if held is None or held[0].shape[0] < n:
            size = min(ROWS_KEPT, max(n, 256 if held is None else 2 * held[0].shape[0]))
            with torch.inference_mode(False), torch.no_grad():  # rows made during generation must be usable in training
                sin, cos = self._compute(n_ctx=size)
                held = self._kept[device, dtype] = cos.to(device, dtype), sin.to(device, dtype)
        return held

    def _rows_at(self, positions: Tensor, device: torch.device, dtype: torch.dtype) -> Rows:
        with torch.inference_mode(False), torch.no_grad():
            if self._frequencies is None:
                sin, cos = self._compute(n_ctx=2)
                # some scaled forms of RoPE multiply cos and sin by a common factor, which is their length
                self._frequencies = torch.atan2(sin[1], cos[1]), torch.hypot(sin[1], cos[1])
            frequencies, length = (x.to(device) for x in self._frequencies)
            angles = positions.to(device, frequencies.dtype)[..., None] * frequencies
            return (angles.cos() * length).to(dtype), (angles.sin() * length).to(dtype)
