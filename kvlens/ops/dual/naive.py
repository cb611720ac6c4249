"""The dual model of one head at one query, the obvious form: loops over tokens, one line per equation, in float64.

Everything is expressed through the kernel, so that it serves finite features and the exact softmax kernel alike:
W = sum_t c_t phi(k_t)^T is represented by its coefficients c_t, and W phi(z) = sum_t c_t kappa(k_t, z).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

Kernel = Callable[[Tensor, Tensor], Tensor]
"""kappa of two vectors, a number."""


class NaiveDual(NamedTuple):
    """Everything that the fast forms compute, for one head and one query.

    Attributes:
        output: the head's output at the query, by attention.
        before: f(q) with W_0.
        after: f(q) with W_1.
        loss_before: L(W_0).
        loss_after: L(W_1).
        contributions: what each demonstration's step adds to f(q).
        cosine_before: of (W_0 phi(k_j), v_j).
        cosine_after: of (W_1 phi(k_j), v_j).
    """

    output: Float[Tensor, " d_out"]
    before: Float[Tensor, " d_out"]
    after: Float[Tensor, " d_out"]
    loss_before: Float[Tensor, ""]
    loss_after: Float[Tensor, ""]
    contributions: Float[Tensor, "demo d_out"]
    cosine_before: Float[Tensor, " demo"]
    cosine_after: Float[Tensor, " demo"]


def naive_dual(
    query: Float[Tensor, " d"],
    keys: Float[Tensor, "token d"],
    values: Float[Tensor, "token d_out"],
    n_demonstrations: int,
    kernel: Kernel,
    normalizer: Float[Tensor, ""] | None = None,
    log_decay: float = 0.0,
    eta: float = 1.0,
    alpha: float = 0.0,
) -> NaiveDual:
    """Th. 3.1 step by step.

    Args:
        query: q, or its features where ``kernel`` is their product.
        keys, values: of the tokens up to the query, which is the last of them.
        n_demonstrations: N; H_D = tokens 0 .. N - 1, H_T = the rest.
        kernel: kappa.
        normalizer: D; None takes sum_t kappa(k_t, q), as softmax does.
        log_decay: log gamma; token t counts gamma^{i - t} times.
        eta: the learning rate.
        alpha: strength of the regularization, 0 for none.
    """
    n_tokens = len(keys)
    seen = [torch.tensor(log_decay * (n_tokens - 1 - t), dtype=keys.dtype).exp() for t in range(n_tokens)]
    at_query = [seen[t] * kernel(keys[t], query) for t in range(n_tokens)]
    D = sum(at_query, keys.new_zeros(())) if normalizer is None else normalizer
    zero = values.new_zeros(values.shape[1])
    W_0 = [values[t] / D if t >= n_demonstrations else zero for t in range(n_tokens)]
    W_1 = [(1 - alpha) * W_0[t] + (values[t] / D if t < n_demonstrations else zero) for t in range(n_tokens)]

    def f(W: list[Tensor], z: Tensor, factor: Tensor) -> Tensor:
        return sum((W[t] * seen[t] * kernel(keys[t], z) * factor for t in range(n_tokens)), zero)

    def square(W: list[Tensor]) -> Tensor:
        return sum(
            (W[s] @ W[t] * seen[s] * seen[t] * kernel(keys[s], keys[t]) for s in range(n_tokens) for t in range(n_tokens)),
            zero.sum(),
        )

    def loss(W: list[Tensor]) -> Tensor:
        fit = sum((values[j] @ f(W, keys[j], seen[j]) for j in range(n_demonstrations)), zero.sum())
        return -fit / (eta * D) + alpha / (2 * eta) * square(W)

    def cosine(W: list[Tensor]) -> Tensor:
        predictions = [f(W, keys[j], seen[j]) for j in range(n_demonstrations)]
        return torch.stack([p @ v / (p.norm() * v.norm()) for p, v in zip(predictions, values, strict=False)])

    one = keys.new_ones(())
    return NaiveDual(
        output=sum((values[t] * at_query[t] / D for t in range(n_tokens)), zero),
        before=f(W_0, query, one),
        after=f(W_1, query, one),
        loss_before=loss(W_0),
        loss_after=loss(W_1),
        contributions=torch.stack([values[j] * at_query[j] / D for j in range(n_demonstrations)]),
        cosine_before=cosine(W_0),
        cosine_after=cosine(W_1),
    )
