"""The dual model in kernel form: W is never formed explicitly, so the exact softmax kernel works as well as features.

W = sum_t c_t phi~(k_t)^T over the tokens up to the query, so every quantity is a sum over pairs of tokens: of H_D
(demonstrations, the first N) and of H_T (the rest). After n steps c_t is (1 - alpha)^n v_t / D on H_T and
sum_{s<n} (1 - alpha)^s v_t / D on H_D; without alpha the loss falls by the same amount at every step, without bound.

``log_kernel`` is kappa between the tokens as the query sees them (with decay: times gamma^{i-s} gamma^{i-t}), H_D first.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.dual.kernel import LogKernel, kernel_values


class PairSums(NamedTuple):
    """sum (v_s.v_t) kappa(s, t) / D^2 over pairs of tokens, which is all that the losses depend on; at eta = 1.

    Attributes:
        step: over H_D x H_D: |dL/dW|^2, by which one step reduces the loss.
        start: over H_T x H_D: -L(W_0).
        start_norm: over H_T x H_T: |W_0|^2.
    """

    step: Float[Tensor, "*lead"]
    start: Float[Tensor, "*lead"]
    start_norm: Float[Tensor, "*lead"]

    def square_norm(self, n_steps: int, alpha: float = 0.0) -> Float[Tensor, "*lead"]:
        """|W_n|^2."""
        kept, series = (1.0 - alpha) ** n_steps, _series(n_steps, alpha)
        return kept**2 * self.start_norm + 2 * kept * series * self.start + series**2 * self.step


def pair_sums(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    log_normalizer: Float[Tensor, "*lead"],
    n_demonstrations: int,
) -> PairSums:
    """The three sums of one query."""
    pairs = kernel_values(log_kernel, -2 * log_normalizer[..., None, None]) * (values @ values.transpose(-1, -2))
    N = n_demonstrations
    step, start, norm = pairs[..., :N, :N], pairs[..., N:, :N], pairs[..., N:, N:]
    return PairSums(step.sum(dim=(-2, -1)), start.sum(dim=(-2, -1)), norm.sum(dim=(-2, -1)))


def losses(sums: PairSums, n_steps: int, eta: float, alpha: float = 0.0) -> Float[Tensor, " step *lead"]:
    """L(W_0), ..., L(W_n) for learning rate ``eta``; without ``alpha`` they decrease linearly."""
    course = []
    for n in range(n_steps + 1):
        fit = (1.0 - alpha) ** n * sums.start + _series(n, alpha) * sums.step
        course.append((alpha / 2 * sums.square_norm(n, alpha) - fit) / eta if alpha else -fit / eta)
    return torch.stack(course)


def predictions_at_demonstrations(
    log_kernel: LogKernel, values: Float[Tensor, "*lead token d_out"], n_demonstrations: int
) -> tuple[Float[Tensor, "*lead demo d_out"], Float[Tensor, "*lead demo d_out"]]:
    """W_0 phi(k_j) and W_1 phi(k_j), each row up to a positive factor that is the same in both."""
    N = n_demonstrations
    columns = LogKernel(log_kernel.log_size[..., :N], None if log_kernel.sign is None else log_kernel.sign[..., :N])
    peak = columns.log_size.amax(dim=-2, keepdim=True)
    kappa = kernel_values(columns, -torch.where(peak.isfinite(), peak, 0.0))
    before = kappa[..., N:, :].transpose(-1, -2) @ values[..., N:, :]
    return before, before + kappa[..., :N, :].transpose(-1, -2) @ values[..., :N, :]


def _series(n: int, alpha: float) -> float:
    """1 + (1 - alpha) + ... + (1 - alpha)^{n-1}."""
    return float(n) if alpha == 0 else (1.0 - (1.0 - alpha) ** n) / alpha


def cosine(a: Float[Tensor, "*lead d"], b: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """The cosine of the angle between rows; 0 where one of them is 0."""
    sizes = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(sizes > 0, (a * b).sum(dim=-1) / torch.where(sizes > 0, sizes, 1.0), 0.0)
