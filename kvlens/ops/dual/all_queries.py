"""The dual models of every query of a text at once: O(pos^2) memory, no loops.

Query i has N_i demonstrations: all tokens before it (N_i = i), or the first N of the text. A running sum over tokens serves
all queries, because query i's W_1 is query i-1's (up to the factor D_{i-1} / D_i) plus one more token:

    drop_i = (1 / D_i^2) sum_{s,t < N_i} (v_s.v_t) kappa(s, t)
    cosine after: S_ij = sum_{t <= i} kappa(t, j) v_t,   v_j.S_ij = sum_{t <= i} kappa(t, j) (v_t.v_j),
                  |S_ij|^2 = |S_{i-1,j}|^2 + 2 kappa(i, j) sum_{t < i} (v_i.v_t) kappa(t, j) + kappa(i, j)^2 |v_i|^2

The cosines take O(pos^3) time, or O(N pos (pos - N)) if the first N tokens are the demonstrations of every query.

For a head with decay, ``log_kernel`` is kappa times gamma^{-s} gamma^{-t} here; :func:`log_loss_drops` restores gamma^{2i}.
Checked against :func:`kvlens.ops.dual.naive_dual`, query by query.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.dual.kernel import LogKernel, kernel_values, middle_of_course

PerScoredQuery = Float[Tensor, "*lead scored_query"]


def log_loss_drops(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    log_normalizer: Float[Tensor, "*lead token"],
    n_demonstrations: int | None = None,
    log_decay: Float[Tensor, "*lead"] | None = None,
) -> PerScoredQuery:
    """log(L(W_0) - L(W_1)) at eta = 1, for every query that has demonstrations.

    Args:
        log_kernel: between all tokens.
        values: v.
        log_normalizer: log D of every token as a query.
        n_demonstrations: N, the same for all queries, or None for all tokens before each.
        log_decay: log gamma.

    Returns:
        For queries 1 .. pos - 1, or N .. pos - 1. A drop of 0 (where the values are 0) gives -inf.
    """
    above = torch.ones_like(log_kernel.log_size, dtype=torch.bool).triu(1)
    running_peak = log_kernel.log_size.masked_fill(above, float("-inf")).amax(dim=-1).cummax(dim=-1).values
    middle = middle_of_course(running_peak)
    pairs = kernel_values(log_kernel, -middle[..., None]) * (values @ values.transpose(-1, -2))
    new = pairs.diagonal(dim1=-2, dim2=-1) + 2 * pairs.tril(-1).sum(dim=-1)  # what token t adds to the sum over pairs
    sums = new.cumsum(dim=-1)  # [.., t]: over pairs of tokens up to and including t
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
) -> Float[Tensor, "*lead scored_query d_out"]:
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
) -> tuple[PerScoredQuery, PerScoredQuery]:
    """Mean over the demonstrations j of the cosines of (W_0 phi(k_j), v_j) and of (W_1 phi(k_j), v_j), for every query.

    Args:
        log_kernel: between all tokens.
        values: v.
        n_demonstrations: as in :func:`log_loss_drops`.
        start: what a KV bias adds to W_0 phi(k_j), at every token j, in the units of kappa (so not divided by D).

    Returns:
        Before and after the step, for queries 1 .. pos - 1, or N .. pos - 1. A cosine with a zero vector counts as 0.
    """
    pos = values.shape[-2]
    running_peak = log_kernel.log_size.cummax(dim=-2).values  # [.., i, j], over t <= i
    first = running_peak.diagonal(dim1=-2, dim2=-1)  # demonstration j is seen by the queries after it
    middle = middle_of_course(torch.stack([first, running_peak[..., -1, :]], dim=-1)).transpose(-1, -2)  # [.., 1, j]
    kappa = kernel_values(log_kernel, -middle)
    offset = None if start is None else start * (-middle.transpose(-1, -2)).exp()
    if n_demonstrations is not None:
        return _cosines_of_the_first(kappa, values, offset, n_demonstrations)
    after = _running_cosine(kappa, values, values, offset)
    before = _single_cosine(kappa, log_kernel.sign, values, offset)
    tokens = torch.arange(pos, device=values.device)
    demonstration = tokens[None] < tokens[:, None]
    means = [(torch.where(demonstration, c, 0.0).sum(dim=-1)[..., 1:] / tokens[1:]) for c in (before, after)]
    return means[0], means[1]


def _cosines_of_the_first(
    kappa: Tensor, values: Tensor, offset: Tensor | None, n: int
) -> tuple[PerScoredQuery, PerScoredQuery]:
    """The first n tokens as demonstrations of every query: their sum is constant, and only later tokens need a running sum."""
    kappa, labels, rest = kappa[..., :n], values[..., :n, :], values[..., n:, :]
    start = None if offset is None else offset[..., :n, :]
    learned = kappa[..., :n, :].transpose(-1, -2) @ labels
    before = _running_cosine(kappa[..., n:, :], rest, labels, start)
    after = _running_cosine(kappa[..., n:, :], rest, labels, learned if start is None else start + learned)
    return before.mean(dim=-1), after.mean(dim=-1)


def _running_cosine(
    kappa: Float[Tensor, "*lead query demo"],
    values: Float[Tensor, "*lead query d_out"],
    labels: Float[Tensor, "*lead demo d_out"],
    offset: Float[Tensor, "*lead demo d_out"] | None,
) -> Float[Tensor, "*lead query demo"]:
    """The cosine of sum_{t <= i} kappa(t, j) values_t + offset_j and labels_j, at (i, j)."""
    among = values @ values.transpose(-1, -2)
    dot = (kappa * (values @ labels.transpose(-1, -2))).cumsum(dim=-2)
    mixed = 2 * (among.tril(-1) @ kappa)
    if offset is not None:
        mixed = mixed + 2 * (values @ offset.transpose(-1, -2))
        dot = dot + (labels * offset).sum(dim=-1)[..., None, :]
    square = (kappa * (mixed + kappa * among.diagonal(dim1=-2, dim2=-1)[..., None])).cumsum(dim=-2)
    if offset is not None:
        square = square + offset.square().sum(dim=-1)[..., None, :]
    return _cosine(dot, square, labels.square().sum(dim=-1))


def _single_cosine(
    kappa: Tensor, sign: Tensor | None, values: Tensor, offset: Tensor | None
) -> Float[Tensor, "*lead query token"]:
    """The cosine of kappa(i, j) v_i + offset_j and v_j, at (i, j)."""
    products = values @ values.transpose(-1, -2)
    sizes = products.diagonal(dim1=-2, dim2=-1)
    if offset is None:  # only the sign of kappa matters, and it is known even where kappa underflows
        signed = products if sign is None else sign * products
        return _cosine(signed, sizes[..., None].expand_as(products), sizes)
    with_offset = values @ offset.transpose(-1, -2)
    dot = kappa * products + with_offset.diagonal(dim1=-2, dim2=-1)[..., None, :]
    square = kappa.square() * sizes[..., None] + 2 * kappa * with_offset + offset.square().sum(dim=-1)[..., None, :]
    return _cosine(dot, square, sizes)


def _cosine(dot: Tensor, square: Tensor, sizes: Tensor) -> Tensor:
    product = square.clamp(min=0) * sizes[..., None, :]
    return torch.where(product > 0, dot / torch.where(product > 0, product, 1.0).sqrt(), 0.0).clamp(-1.0, 1.0)
