"""The kernel kappa, which stands for phi~(k)^T phi~(q), kept as sign and logarithm so that nothing overflows.

    softmax            kappa(a, b) = exp(a.b / scale)         exact, without features
    finite features    kappa(a, b) = phi(a).phi(b)            linear attention, random features, landmarks

Query-key scores of real models reach +-100, and key-key scores more: exp(2 * 400) overflows float64. A kernel matrix is
therefore held as its logarithm and turned into numbers by :func:`kernel_values`, which adds the logarithm of a factor first,
so that it overflows only where the product itself does.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


class LogKernel(NamedTuple):
    """A matrix of kernel values between tokens (rows) and the points where W is evaluated (columns), sign * exp(log_size).

    Attributes:
        log_size: log |kappa|, -inf where kappa is 0.
        sign: -1, 0 or 1; None if all are positive.
    """

    log_size: Float[Tensor, "*lead token at"]
    sign: Float[Tensor, "*lead token at"] | None


def softmax_kernel(a: Float[Tensor, "*lead a d"], b: Float[Tensor, "*lead b d"], scale: float) -> LogKernel:
    """kappa(a, b) = exp(a.b / scale), the kernel of softmax attention (DUAL eq. 7)."""
    return LogKernel(a @ b.transpose(-1, -2) / scale, None)


def feature_kernel(
    a: Float[Tensor, "*lead a d_phi"],
    b: Float[Tensor, "*lead b d_phi"],
    log_a: Float[Tensor, "*lead a"] | None = None,
    log_b: Float[Tensor, "*lead b"] | None = None,
) -> LogKernel:
    """kappa(a, b) = a.b exp(log_a + log_b), for rows that are features; None for ``log_a`` or ``log_b`` means 0."""
    products = a @ b.transpose(-1, -2)
    log_size = products.abs().log()
    for log_scale in (None if log_a is None else log_a[..., :, None], None if log_b is None else log_b[..., None, :]):
        log_size = log_size if log_scale is None else log_size + log_scale
    return LogKernel(log_size, products.sign())


def kernel_values(kernel: LogKernel, log_factor: Float[Tensor, "..."] | float = 0.0) -> Float[Tensor, "*lead token at"]:
    """kappa * exp(log_factor), broadcast; it overflows only where the product itself is too large."""
    values = (kernel.log_size + log_factor).exp()
    return values if kernel.sign is None else kernel.sign * values


def middle_of_course(log_peak: Float[Tensor, "*lead step"]) -> Float[Tensor, "*lead one"]:
    """The mean of the first and last entries of a running maximum, to subtract from logarithms before a running sum.

    The running sum then neither overflows at the end nor vanishes at the beginning, as long as the maximum rises by less
    than 700 in total (for sums of squares). -inf and inf count as 0.
    """
    first, last = log_peak[..., :1], log_peak[..., -1:]
    middle = torch.where(first.isfinite(), (first + last) / 2, last)
    return torch.where(middle.isfinite(), middle, 0.0)
