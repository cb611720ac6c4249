"""RoPE: R_m, the rotation of a vector by its position m; R_a R_b = R_{a+b}, which is what makes a rebased bias exact."""

from kvlens.ops.rotary.naive import naive_rotate
from kvlens.ops.rotary.rotate import RotaryTable, rotate

__all__ = ["RotaryTable", "naive_rotate", "rotate"]
