"""The fixed random projections of the ``random`` feature map."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import Count


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
