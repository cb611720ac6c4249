"""The generalization bound of DUAL th. 3.2, term by term, in logarithms.

For f(x) = W phi(k(x)) with |W|_F <= w, the loss -v(x).f(x) and N demonstrations drawn independently, with probability 1 - delta
the loss of the best f on the demonstrations exceeds the best possible one by at most

    O( w rho sqrt(d_o Tr K_S) / N  +  rho^2 sqrt(log(1 / delta) / N) )

K_S is the demonstrations' kernel matrix, rho bounds |v| and |f|, d_o is the width of v. Like the paper, this module gives O(.)
without constants: the terms can be compared but guarantee nothing, and tokens of a text are not drawn independently.

With negative samples, v_j.(f(k_j) - beta mean over N(j) of f(k_n)) is still linear in W: Tr K_S becomes the trace over
the *effective* features phi(k_j) - beta mean phi(k_n), and |v.f| is at most (1 + beta) rho^2. That is kvlens' own, and it says
something else than the paper, whose bound (app. C.2) falls as the share of negatives grows. Ours rises with the first negative,
at least in its second term, by 1 + beta; more of them lower it, as their mean is shorter. The log of a head of ``facts-linear``
goes from 6.28 without to 6.50 with one and 6.43 with 16 (beta 1/2; ``tests/dual/test_bound_with_negatives.py``).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.ops.dual.kernel import LogKernel, kernel_values


class BoundTerms(NamedTuple):
    """Natural logarithms of the bound's parts.

    Attributes:
        log_trace: log Tr K_S.
        log_complexity: log(w rho sqrt(d_o Tr K_S) / N).
        log_confidence: log(rho^2 sqrt(log(1 / delta) / N)).
        log_bound: log of the sum of both.
        log_norm: log w, as given.
        log_rho: log rho, as given.
    """

    log_trace: Float[Tensor, "*lead"]
    log_complexity: Float[Tensor, "*lead"]
    log_confidence: Float[Tensor, "*lead"]
    log_bound: Float[Tensor, "*lead"]
    log_norm: Float[Tensor, "*lead"]
    log_rho: Float[Tensor, "*lead"]


def log_trace(kernel: LogKernel) -> Float[Tensor, "*lead"]:
    """log Tr K_S of the demonstrations' own kernel matrix.

    Raises:
        KVLensError: an entry of the diagonal is negative, so the kernel is not a product of features.
    """
    if kernel.sign is not None and bool((kernel.sign.diagonal(dim1=-2, dim2=-1) < 0).any()):
        raise KVLensError(
            "bound: kappa(k, k) is negative for some key, so the kernel is not a product phi(k).phi(k) and th. 3.2 does not "
            "apply: use the exact kernel, or features with positive weights"
        )
    return kernel.log_size.diagonal(dim1=-2, dim2=-1).logsumexp(dim=-1)


def log_effective_trace(kernel: LogKernel, negatives: Bool[Tensor, "*lead demo demo"], beta: float) -> Float[Tensor, "*lead"]:
    """log sum_j |phi(k_j) - beta mean_{n in N(j)} phi(k_n)|^2; ``negatives[j, n]`` says whether n belongs to N(j)."""
    log_trace(kernel)  # raises if this is not a kernel
    peak = kernel.log_size.amax(dim=(-2, -1), keepdim=True)
    kappa = kernel_values(kernel, -peak)
    share = negatives.to(kappa) / negatives.sum(dim=-1, keepdim=True).clamp(min=1)
    coefficients = torch.eye(kappa.shape[-1], dtype=kappa.dtype, device=kappa.device) - beta * share
    squares = torch.einsum("...js,...st,...jt->...", coefficients, kappa, coefficients)
    return squares.clamp(min=0).log() + peak.squeeze((-2, -1))


def bound_terms(
    log_norm: Float[Tensor, "*lead"],
    log_rho: Float[Tensor, "*lead"],
    log_trace: Float[Tensor, "*lead"],
    n_demonstrations: int,
    d_out: int,
    delta: float,
    beta: float = 0.0,
) -> BoundTerms:
    """The terms of the bound.

    Args:
        log_norm: log w.
        log_rho: log rho.
        log_trace: from :func:`log_trace`, or :func:`log_effective_trace` with negative samples.
        n_demonstrations: N.
        d_out: d_o.
        delta: the probability with which the bound may fail.
        beta: weight of the negative samples, 0 if there are none.

    Raises:
        KVLensError: ``delta`` outside (0, 1), a negative ``beta``, or no demonstrations.
    """
    if not 0 < delta < 1:
        raise KVLensError(f"bound: delta must be a probability in (0, 1), got {delta}")
    if beta < 0:
        raise KVLensError(f"bound: beta must be at least 0, got {beta}")
    if n_demonstrations < 1:
        raise KVLensError(f"bound: expected at least one demonstration, got {n_demonstrations}")
    complexity = log_norm + log_rho + (log_trace + math.log(d_out)) / 2 - math.log(n_demonstrations)
    confidence = 2 * log_rho + math.log(math.log(1 / delta) / n_demonstrations) / 2 + math.log1p(beta)
    return BoundTerms(log_trace, complexity, confidence, torch.logaddexp(complexity, confidence), log_norm, log_rho)
