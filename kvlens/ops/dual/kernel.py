"""kappa: what replaces phi~(k)^T phi~(q), kept as sign and logarithm so that nothing overflows.

    softmax            kappa(a, b) = exp(a.b / scale)         no features are needed: the kernel is exact
    finite features    kappa(a, b) = phi(a).phi(b)            linear attention, random features, landmarks

Scores of real models reach +-100, and those of keys with keys more: exp(2 * 400) is no float64. A kernel matrix is therefore
held as its logarithm, and turned into numbers by :func:`kernel_values`, which adds the logarithm of a factor first; it
overflows only where the product itself does.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import checked


class LogKernel(NamedTuple):
    """A matrix of kernel values between tokens and what they are looked at, kappa = sign * exp(log_size).

    Attributes:
        log_size: log |kappa|, -inf where kappa is 0.
        sign: -1, 0 or 1; None where all are positive.
    """

    log_size: Float[Tensor, "*lead token at"]
    sign: Float[Tensor, "*lead token at"] | None


@checked
def softmax_kernel(a: Float[Tensor, "*lead a d"], b: Float[Tensor, "*lead b d"], scale: float) -> LogKernel:
    """kappa(a, b) = exp(a.b / scale), the kernel of softmax attention (DUAL eq. 7)."""
    return LogKernel(a @ b.transpose(-1, -2) / scale, None)


@checked
def feature_kernel(
    a: Float[Tensor, "*lead a d_phi"],
    b: Float[Tensor, "*lead b d_phi"],
    log_a: Float[Tensor, "*lead a"] | None = None,
    log_b: Float[Tensor, "*lead b"] | None = None,
) -> LogKernel:
    """kappa(a, b) = a.b exp(log_a + log_b), for rows that are features; ``log_a`` and ``log_b`` are None for 0."""
    products = a @ b.transpose(-1, -2)
    log_size = products.abs().log()
    for log_scale in (None if log_a is None else log_a[..., :, None], None if log_b is None else log_b[..., None, :]):
        log_size = log_size if log_scale is None else log_size + log_scale
    return LogKernel(log_size, products.sign())


@checked
def kernel_values(kernel: LogKernel, log_factor: Float[Tensor, "..."] | float = 0.0) -> Float[Tensor, "*lead token at"]:
    """kappa * exp(log_factor), broadcast; only a product that itself is too large overflows."""
    values = (kernel.log_size + log_factor).exp()
    return values if kernel.sign is None else kernel.sign * values


def middle_of_course(log_peak: Float[Tensor, "*lead step"]) -> Float[Tensor, "*lead one"]:
    """Half way between the first and the last entry of a running maximum, to be taken off logarithms before a running sum.

    What is summed up step by step then neither overflows at the end nor vanishes at the beginning, as long as the peak
    rises by less than 700 (for sums of squares) on the way. -inf and inf count as 0.
    """
    first, last = log_peak[..., :1], log_peak[..., -1:]
    middle = torch.where(first.isfinite(), (first + last) / 2, last)
    return torch.where(middle.isfinite(), middle, 0.0)
