"""RoPE: R_m, the rotation of a vector by its position m; since R_a R_b = R_{a+b}, a rebased bias is exact."""

from kvlens.checks import doors
from kvlens.ops.rotary.naive import naive_rotate
from kvlens.ops.rotary.rotate import rotate
from kvlens.ops.rotary.table import ROWS_KEPT, RotaryTable

__all__ = ["ROWS_KEPT", "RotaryTable", "naive_rotate", "rotate"]

doors(__name__)
