"""Which of the prompt's keys to keep.

- ``output`` (the default): orthogonal matching pursuit on normalizer and output together. Each step takes the key that, with
  all earlier ones refitted, explains most of [a R, kappa |z| p]. The steps are those of a pivoted Cholesky decomposition of
  the Gram matrix of the shares, so r steps cost M r^2 per key-value head.
- ``normalizer``: the same on p alone.
- ``mass``: the keys with the largest sums of shares (top-k of the attention).

On stories260K (128 tokens, 8 keys per head, equal budgets) the error of the logits after the same fit is 1.6, 2.1 and 2.7 %.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.ops.landmarks.gram import Gram, by_cell, concatenated
from kvlens.ops.landmarks.shares import PromptKeys, Queries, Statistics, cells_of, statistics

Criterion = Literal["output", "normalizer", "mass"]
CRITERIA = ("output", "normalizer", "mass")
KAPPA = 0.5
"""Weight of the normalizer's error relative to the output's. 0.25 to 1 differ by a few percent; 2 is 10 % worse."""


class Chosen(NamedTuple):
    """Keys in the order in which they were chosen, and what the fit of their weights needs.

    Attributes:
        keys: indices into the prompt's keys.
        gain: the mean squared error that each one removed.
        gram, with_p: the sums of :class:`~kvlens.ops.landmarks.Statistics` over these keys alone.
    """

    keys: Int[Tensor, "cell r"]
    gain: Float[Tensor, "cell r"]
    gram: Float[Tensor, "cell r r"]
    with_p: Float[Tensor, "cell r"]

    def first(self, r: int) -> "Chosen":
        """The first ``r`` keys."""
        return Chosen(self.keys[:, :r], self.gain[:, :r], self.gram[:, :r, :r], self.with_p[:, :r])


def choose_among(
    queries: Queries,
    prompt: PromptKeys,
    root_metric: Float[Tensor, "batch kv_head d_head d_head"],
    r: int,
    criterion: Criterion = "output",
) -> Chosen:
    """The first ``r`` keys of every head of one layer; of long prompts, one head at a time, so that memory stays bounded.

    Arguments as in :func:`~kvlens.ops.landmarks.statistics` and :func:`choose_keys`.
    """
    batch, kv_heads, n_keys, _ = prompt.keys.shape
    if not by_cell(batch * kv_heads, queries.log_n[0].numel() // kv_heads, n_keys):
        return choose_keys(statistics(queries, prompt, root_metric), r, criterion)
    roots = root_metric.flatten(0, 1)[:, None, None]
    each = zip(cells_of(queries, prompt), roots, strict=True)
    return concatenated((choose_keys(statistics(*own, root), r, criterion) for own, root in each), Chosen)


def choose_keys(sums: Statistics, r: int, criterion: Criterion = "output") -> Chosen:
    """The first ``r`` keys by a criterion (see the module docstring)."""
    if criterion == "mass":
        gain, index = sums.with_p.topk(r, dim=-1)
        return _of_keys(sums, index, gain / sums.n_rows)
    target = sums.with_p[..., None]
    if criterion == "output":
        target = torch.cat([sums.with_a, KAPPA * sums.z_size[:, None, None] * target], dim=-1)
    index, gain = _matching_pursuit(sums.gram, target, r)
    return _of_keys(sums, index, gain / sums.n_rows)


def _of_keys(sums: Statistics, index: Int[Tensor, "cell r"], gain: Float[Tensor, "cell r"]) -> Chosen:
    return Chosen(index, gain, sums.gram.among(index), sums.with_p.gather(1, index))


def _matching_pursuit(
    gram: Gram, target: Float[Tensor, "cell key d"], r: int
) -> tuple[Int[Tensor, "cell r"], Float[Tensor, "cell r"]]:
    """Choose, one at a time, the key whose residual column explains most of the residual target.

    ``columns`` are those of the Cholesky factor, and ``rows`` is what each removes from the target: the residual Gram matrix is
    gram - columns^T columns, and the residual target is target - columns^T rows. Neither is formed; only the squared lengths
    of their rows are updated.
    """
    cells, n_keys, d = target.shape
    device = target.device
    every = torch.arange(cells, device=device)
    left, size = gram.diagonal(), target.square().sum(dim=-1)
    floor = 1e-9 * left.amax(dim=-1, keepdim=True) + torch.finfo(target.dtype).tiny
    columns, rows = target.new_zeros(cells, r, n_keys), target.new_zeros(cells, r, d)
    index, gain = torch.zeros(cells, r, dtype=torch.long, device=device), target.new_zeros(cells, r)
    taken = torch.zeros(cells, n_keys, dtype=torch.bool, device=device)
    for step in range(r):
        explained = torch.where(left > floor, size / left.clamp(min=floor), 0.0).masked_fill_(taken, -1.0)
        gain[:, step], j = explained.max(dim=-1)
        root = left[every, j].clamp(min=floor[:, 0]).sqrt()[:, None]
        earlier, before = columns[:, :step], columns[every, :step, j][:, None]
        row = (target[every, j] - (before @ rows[:, :step]).squeeze(1)) / root
        along = (rows[:, :step] @ row[..., None]).mT
        taken_out, met = (torch.cat([before, along], dim=1) @ earlier).unbind(dim=1)
        column = (gram.column(j) - taken_out) / root
        along_row = (target @ row[..., None]).squeeze(-1) - met
        size = (size + column * (column * row.square().sum(dim=-1, keepdim=True) - 2 * along_row)).clamp_(min=0)
        left -= column.square()
        columns[:, step], rows[:, step], index[:, step] = column, row, j
        taken[every, j] = True
    return index, gain
