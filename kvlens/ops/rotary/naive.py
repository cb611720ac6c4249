"""R_m written out as a matrix of 2 x 2 rotations."""

import torch
from jaxtyping import Float
from torch import Tensor


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
