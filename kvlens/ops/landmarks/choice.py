"""Which of the prompt's keys to keep.

- ``output`` (the default): orthogonal matching pursuit on normaliser and output together. Each step takes the key that, with
  all earlier ones refitted, explains most of [a R, kappa |z| p]; the steps are those of a pivoted Cholesky decomposition of
  the Gram matrix of the shares, so that r steps cost M r^2 per key-value head.
- ``normalizer``: the same on p alone.
- ``mass``: the keys with the largest sums of shares (top-k of the attention).

Measured on stories260K (128 tokens, 8 keys per head, equal budgets): 1.6, 2.1 and 2.7 % error of the logits after the same fit.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.ops.landmarks.shares import Statistics

Criterion = Literal["output", "normalizer", "mass"]
CRITERIA = ("output", "normalizer", "mass")
KAPPA = 0.5
"""Weight of the normaliser beside the output. 0.25 to 1 differ by a few percent of the error, 2 is a tenth worse."""


class Chosen(NamedTuple):
    """Keys in the order in which they were taken, and the mean squared error that each one removed."""

    keys: Int[Tensor, "cell r"]
    gain: Float[Tensor, "cell r"]


def choose_keys(sums: Statistics, r: int, criterion: Criterion = "output") -> Chosen:
    """The first ``r`` keys by a criterion (see the module)."""
    if criterion == "mass":
        gain, index = sums.with_p.topk(r, dim=-1)
        return Chosen(index, gain / sums.n_rows)
    target = sums.with_p[..., None]
    if criterion == "output":
        target = torch.cat([sums.with_a, KAPPA * sums.z_size[:, None, None] * target], dim=-1)
    return _matching_pursuit(sums.gram, target, r, sums.n_rows)


def _matching_pursuit(gram: Tensor, target: Tensor, r: int, n_rows: int) -> Chosen:
    """Keys whose residual columns explain most of the residual target, one after the other."""
    cells, n_keys, _ = gram.shape
    every = torch.arange(cells, device=gram.device)
    left, target = gram.diagonal(dim1=-2, dim2=-1).clone(), target.clone()  # squared length of what is left of each key
    floor = 1e-9 * left.amax(dim=-1, keepdim=True) + torch.finfo(gram.dtype).tiny
    columns = gram.new_zeros(cells, n_keys, r)
    index, gain = torch.zeros(cells, r, dtype=torch.long, device=gram.device), gram.new_zeros(cells, r)
    taken = torch.zeros(cells, n_keys, dtype=torch.bool, device=gram.device)
    for step in range(r):
        explained = target.square().sum(dim=-1) / left.clamp(min=floor)
        explained = torch.where(left > floor, explained, 0.0).masked_fill(taken, -1.0)
        gain[:, step], j = explained.max(dim=-1)
        root = left[every, j].clamp(min=floor[:, 0]).sqrt()
        column = gram[every, :, j] - (columns[:, :, :step] @ columns[every, j, :step, None]).squeeze(-1)
        columns[:, :, step] = column = column / root[:, None]
        target -= column[:, :, None] * (target[every, j] / root[:, None])[:, None]
        left -= column.square()
        taken[every, j] = True
        index[:, step] = j
    return Chosen(index, gain / n_rows)
