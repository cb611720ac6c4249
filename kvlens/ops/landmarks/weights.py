"""Weights and values of the kept keys, in closed form: first the normalizer, then the output.

    w >= 0:  sum_i (psi_iS w - p_i)^2 -> min                                          (non-negative least squares)
    B:       sum_i |psi_iS B - a_i - z_i (psi_iS w - p_i)|^2 / (1 - p_i + psi_iS w)^2 -> min, ridge towards w v

Weights stay non-negative so that the normalizer stays positive for queries outside the fit. The second objective is the
head's output error itself, which is linear in B once w is known.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.ops.landmarks.shares import PromptKeys, Queries, blocks_of, cells_of, key_shares, shares
from kvlens.ops.softmax_attention import ScaledFeatures

RIDGE_WEIGHTS, RIDGE_VALUES = 1e-9, 1e-6
"""Relative to the mean diagonal of the Gram matrix; 1e-8 to 1e-5 change the error of the logits by less than 1 %."""

RESOLVED = 1e-6
"""The smallest part of a normalizer that is larger than the rounding of shares in float32."""


class Errors(NamedTuple):
    """Relative errors over queries, per query head, of the head's output and of the prompt's share of the normalizer."""

    output: Float[Tensor, "batch head"]
    mass: Float[Tensor, "batch head"]


def fit_weights(
    queries: Queries, prompt: PromptKeys, index: Int[Tensor, "cell r"], active: Bool[Tensor, "cell r"]
) -> Float[Tensor, "cell r"]:
    """The weights w of the active keys, by non-negative least squares."""
    r = index.shape[1]
    gram = torch.zeros(len(index), r, r, dtype=torch.float64, device=index.device)
    target = torch.zeros(len(index), r, dtype=torch.float64, device=index.device)
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        for block in blocks_of(own, keys.keys.shape[2]):
            psi = key_shares(block, keys)[0]
            p, psi = psi.sum(dim=-1), psi[:, index[cell]]
            gram[cell] += psi.mT @ psi
            target[cell] += psi.mT @ p
    return nonnegative_weights(gram, target, active)


def nonnegative_weights(
    gram: Float[Tensor, "cell r r"], target: Float[Tensor, "cell r"], active: Bool[Tensor, "cell r"]
) -> Float[Tensor, "cell r"]:
    """Least squares on the active keys, repeated without those whose weight is negative until none is.

    Args:
        gram, target: sums over rows of the products of all pairs of keys, and of each key with the target of the weighted sum.
    """
    for _ in range(active.shape[1] + 1):
        w = solve(gram, target[..., None], active, RIDGE_WEIGHTS).squeeze(-1)
        negative = active & (w < 0)
        if not bool(negative.any()):
            break
        active = active & ~negative
    return w


def fit_values(
    queries: Queries,
    prompt: PromptKeys,
    index: Int[Tensor, "cell r"],
    w: Float[Tensor, "cell r"],
) -> Float[Tensor, "cell r d_head"]:
    """The products B of weight and value, given the weights; 0 where the weight is 0."""
    kept = _gather(prompt.values, index)
    start = w[..., None].to(kept) * kept
    r = index.shape[1]
    gram = torch.zeros(len(w), r, r, dtype=torch.float64, device=w.device)
    right = torch.zeros(len(w), r, kept.shape[-1], dtype=torch.float64, device=w.device)
    for cell, (own, keys) in enumerate(cells_of(queries, prompt)):
        for block in blocks_of(own, keys.keys.shape[2]):
            psi, p, a, z = (x[0] for x in shares(block, keys))
            psi = psi[:, index[cell]]
            off = psi @ w[cell].to(psi) - p
            whole = (1 + off).clamp(min=RESOLVED)[:, None]
            target = (a + z * off[:, None] - psi @ start[cell]) / whole
            psi = psi / whole
            gram[cell] += psi.mT @ psi
            right[cell] += psi.mT @ target
    return (start + solve(gram, right, w > 0, RIDGE_VALUES)) * (w > 0)[..., None]


def output_errors(
    queries: Queries,
    prompt: PromptKeys,
    phi: Callable[[Queries], ScaledFeatures],
    b_kv: Float[Tensor, "batch kv_head r d_head"],
    b_d: Float[Tensor, "batch kv_head r"],
) -> Errors:
    """Root mean square errors over the queries if features ``phi``, b_KV and b_D replace the prompt, in float64.

    The output's error is relative to the outputs, the mass's relative to the prompt's part of the normalizer. Where the whole
    normalizer is lost (below :data:`RESOLVED` of what it was: the prompt had all of the attention, and the features have none),
    what is left of the text is below the rounding of the shares, and the output counts as lost, an error of 100 %.
    """
    group, sums = queries.q.shape[2] // prompt.keys.shape[1], None
    stored = torch.cat([b_kv, b_d[..., None]], dim=-1).double().flatten(0, 1)
    for block in blocks_of(queries, prompt.keys.shape[2]):
        _, p, a, z = (t.double() for t in shares(block, prompt))
        features, log_scale = phi(block)
        size = (log_scale - block.log_n).double().clamp(max=300.0).exp()  # keeps very poor features finite
        rows = rearrange(features * size[..., None], "b i (g s) r -> (b g) (i s) r", s=group)
        read = rows @ stored
        off = read[..., -1] - p
        whole = (1 + off)[..., None]
        is_lost = whole.abs() < RESOLVED
        e = torch.where(is_lost, -z, (read[..., :-1] - a - z * off[..., None]) / torch.where(is_lost, 1.0, whole))
        squares = torch.stack([e.square().sum(-1), z.square().sum(-1), off.square(), p.square()]).unflatten(2, (-1, group))
        sums = squares.sum(dim=2) if sums is None else sums + squares.sum(dim=2)
    assert sums is not None
    e, z, off, p = sums.unflatten(1, (queries.q.shape[0], -1)).flatten(2)
    tiny = torch.finfo(e.dtype).tiny
    return Errors((e / z.clamp(min=tiny)).sqrt(), (off / p.clamp(min=tiny)).sqrt())


def solve(gram: Tensor, right: Tensor, active: Tensor, ridge: float) -> Tensor:
    """Ridge least squares over the active unknowns; 0 for the others."""
    on = active.to(gram)
    size = (gram.diagonal(dim1=-2, dim2=-1) * on).sum(dim=-1) / on.sum(dim=-1).clamp(min=1)
    size = torch.where(size > 0, size, 1.0)[:, None]
    scaled = gram / size[..., None] * on[:, :, None] * on[:, None] + torch.diag_embed(ridge * on + (1 - on))
    return torch.linalg.solve(scaled, right / size[..., None] * on[..., None])


def _gather(x: Float[Tensor, "batch kv_head key d"], index: Int[Tensor, "cell r"]) -> Float[Tensor, "cell r d"]:
    x = x.flatten(0, 1)
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
