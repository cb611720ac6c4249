"""The dual models of every query of a text at once: O(pos^2) memory, O(pos^3) time for the cosines, no loop over anything.

Query i has N_i demonstrations: all tokens before it (N_i = i), or the first N of the text. A running sum over tokens serves
all queries, because query i's W_1 is query i-1's (up to the factor D_{i-1} / D_i) with one token more:

    drop_i = (1 / D_i^2) sum_{s,t < N_i} (v_s.v_t) kappa(s, t)
    cosine after: S_ij = sum_{t <= i} kappa(t, j) v_t,   v_j.S_ij = sum_{t <= i} kappa(t, j) (v_t.v_j),
                  |S_ij|^2 = |S_{i-1,j}|^2 + 2 kappa(i, j) sum_{t < i} (v_i.v_t) kappa(t, j) + kappa(i, j)^2 |v_i|^2

Here ``log_kernel`` is kappa times gamma^{-s} gamma^{-t} for a head with decay; :func:`log_loss_drops` puts gamma^{2i} back.
Checked against :func:`kvlens.ops.dual.naive_dual`, query by query.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.ops.dual.kernel import LogKernel, kernel_values, middle_of_course

PerJudgedQuery = Float[Tensor, "*lead judged_query"]


def log_loss_drops(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    log_normalizer: Float[Tensor, "*lead query"],
    n_demonstrations: int | None = None,
    log_decay: Float[Tensor, "*lead"] | None = None,
) -> PerJudgedQuery:
    """log(L(W_0) - L(W_1)) at eta = 1, for every query that has demonstrations.

    Args:
        log_kernel: between all tokens.
        values: v.
        log_normalizer: log D of every token as a query.
        n_demonstrations: N, the same for all queries, or None for all tokens before each.
        log_decay: log gamma.

    Returns:
        For queries 1 .. pos - 1, or N .. pos - 1. A drop that is 0 (values that are 0) gives -inf.
    """
    above = torch.ones_like(log_kernel.log_size, dtype=torch.bool).triu(1)
    running_peak = log_kernel.log_size.masked_fill(above, float("-inf")).amax(dim=-1).cummax(dim=-1).values
    middle = middle_of_course(running_peak)
    pairs = kernel_values(log_kernel, -middle[..., None]) * (values @ values.transpose(-1, -2))
    new = pairs.diagonal(dim1=-2, dim2=-1) + 2 * pairs.tril(-1).sum(dim=-1)  # what token t adds to the square sum
    sums = new.cumsum(dim=-1)  # [.., t]: over pairs up to and with t
    if n_demonstrations is None:
        first, sums = 1, sums[..., :-1]
    else:
        first, sums = n_demonstrations, sums[..., n_demonstrations - 1 : n_demonstrations]
    drops = sums.clamp(min=0).log() + middle - 2 * log_normalizer[..., first:]
    if log_decay is None:
        return drops
    queries = torch.arange(first, values.shape[-2], device=values.device, dtype=values.dtype)
    return drops + 2 * queries * log_decay[..., None]


def step_outputs(
    pattern: Float[Tensor, "*lead query token"],
    values: Float[Tensor, "*lead token d_out"],
    n_demonstrations: int | None = None,
) -> Float[Tensor, "*lead judged_query d_out"]:
    """(W_1 - W_0) phi(q): what the demonstrations add, for queries 1 .. pos - 1, or N .. pos - 1.

    Args:
        pattern: kappa(k_t, q_i) / D_i, 0 where t > i.
        values: v.
        n_demonstrations: as in :func:`log_loss_drops`.
    """
    if n_demonstrations is None:
        return (pattern.tril(-1) @ values)[..., 1:, :]
    N = n_demonstrations
    return pattern[..., N:, :N] @ values[..., :N, :]


def mean_cosines(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    n_demonstrations: int | None = None,
    start: Float[Tensor, "*lead token d_out"] | None = None,
) -> tuple[PerJudgedQuery, PerJudgedQuery]:
    """Mean over the demonstrations j of the cosines of (W_0 phi(k_j), v_j) and of (W_1 phi(k_j), v_j), for every query.

    Args:
        log_kernel: between all tokens.
        values: v.
        n_demonstrations: as in :func:`log_loss_drops`.
        start: what a KV bias adds to W_0 phi(k_j), at every token j, in the units of kappa (so not divided by D).

    Returns:
        Before and after the step, for queries 1 .. pos - 1, or N .. pos - 1. A cosine with a vector that is 0 counts as 0.
    """
    pos = values.shape[-2]
    running_peak = log_kernel.log_size.cummax(dim=-2).values  # [.., i, j], over t <= i
    first = running_peak.diagonal(dim1=-2, dim2=-1)  # demonstration j is seen by the queries behind it
    middle = middle_of_course(torch.stack([first, running_peak[..., -1, :]], dim=-1)).transpose(-1, -2)  # [.., 1, j]
    kappa = kernel_values(log_kernel, -middle)
    offset = None if start is None else start * (-middle.transpose(-1, -2)).exp()
    demonstration = _demonstrations(pos, n_demonstrations, values.device)
    after = _running_cosine(kappa, values, offset)
    if n_demonstrations is None:
        before = _single_cosine(kappa, log_kernel.sign, values, offset)
    else:
        before = _running_cosine(_without_first(kappa, n_demonstrations), values, offset)
    first_query = 1 if n_demonstrations is None else n_demonstrations
    counts = demonstration.sum(dim=-1)[first_query:]
    means = [(torch.where(demonstration, c, 0.0).sum(dim=-1)[..., first_query:] / counts) for c in (before, after)]
    return means[0], means[1]


def _demonstrations(pos: int, n_demonstrations: int | None, device: torch.device) -> Bool[Tensor, "query token"]:
    """Whether token j is a demonstration of query i."""
    tokens = torch.arange(pos, device=device)
    if n_demonstrations is None:
        return tokens[None] < tokens[:, None]
    return (tokens[None] < n_demonstrations).expand(pos, -1)


def _without_first(kappa: Tensor, n: int) -> Tensor:
    return torch.cat([torch.zeros_like(kappa[..., :n, :]), kappa[..., n:, :]], dim=-2)


def _running_cosine(kappa: Tensor, values: Tensor, offset: Tensor | None) -> Float[Tensor, "*lead query token"]:
    """Of (sum_{t <= i} kappa(t, j) v_t + offset_j, v_j), at (i, j)."""
    products = values @ values.transpose(-1, -2)
    dot = (kappa * products).cumsum(dim=-2)
    mixed = 2 * (products.tril(-1) @ kappa)
    sizes = products.diagonal(dim1=-2, dim2=-1)
    if offset is not None:
        with_offset = values @ offset.transpose(-1, -2)  # [.., t, j]: v_t.offset_j
        mixed = mixed + 2 * with_offset
        dot = dot + with_offset.diagonal(dim1=-2, dim2=-1)[..., None, :]
    square = (kappa * (mixed + kappa * sizes[..., None])).cumsum(dim=-2)
    if offset is not None:
        square = square + offset.square().sum(dim=-1)[..., None, :]
    return _cosine(dot, square, sizes)


def _single_cosine(
    kappa: Tensor, sign: Tensor | None, values: Tensor, offset: Tensor | None
) -> Float[Tensor, "*lead query token"]:
    """Of (kappa(i, j) v_i + offset_j, v_j), at (i, j)."""
    products = values @ values.transpose(-1, -2)
    sizes = products.diagonal(dim1=-2, dim2=-1)
    if offset is None:  # only the sign of kappa counts, and a kappa too small for a number keeps its sign
        signed = products if sign is None else sign * products
        return _cosine(signed, sizes[..., None].expand_as(products), sizes)
    with_offset = values @ offset.transpose(-1, -2)
    dot = kappa * products + with_offset.diagonal(dim1=-2, dim2=-1)[..., None, :]
    square = kappa.square() * sizes[..., None] + 2 * kappa * with_offset + offset.square().sum(dim=-1)[..., None, :]
    return _cosine(dot, square, sizes)


def _cosine(dot: Tensor, square: Tensor, sizes: Tensor) -> Tensor:
    product = square.clamp(min=0) * sizes[..., None, :]
    return torch.where(product > 0, dot / torch.where(product > 0, product, 1.0).sqrt(), 0.0).clamp(-1.0, 1.0)
