"""Beyond one head of the dual model: the MLP after it (DUAL th. B.1), layers of heads (B.2), the generalization bound (3.2).

**One Transformer layer.** For a single query the MLP's ReLU mask is fixed, so the MLP after the attention is a linear map:

    x_out = W_FFN x_mid + b        W_FFN = W_2 diag(mask) W_1        b = W_2 diag(mask) b_1 + b_2

and the dual model has labels W_FFN v_j, the initial weight W_FFN W_0 (keeping W_0 unchanged is wrong by a third), and b as an
offset. For activations that are not piecewise linear, the tangent at the query's own pre-activations replaces the mask; the
constant that it misses at the query is the remainder.

**Several layers.** Under PrefixLM attention (demonstrations see each other, the query sees all) layer l's dual model gives the
query's output after one step, and, by eq. 25, those of the demonstrations themselves, which are layer l + 1's inputs:

    h_j = (D / D_j) (W_1 - W_0) phi(q_j)         D_j = sum over demonstrations of kappa(k_t, q_j)

Weights multiply row vectors from the right, as in TransformerLens. The bound's terms stand at the end, for
:mod:`kvlens.dual` to fill.
"""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.checks import Count, Within, doors
from kvlens.errors import KVLensError
from kvlens.ops.dual import LogKernel, kernel_values, softmax_kernel


def fold_mlp(
    W_in: Float[Tensor, "d_model d_mlp"],
    b_in: Float[Tensor, " d_mlp"],
    W_out: Float[Tensor, "d_mlp d_model"],
    b_out: Float[Tensor, " d_model"],
    activation: Callable[[Tensor], Tensor],
    pre: Float[Tensor, " d_mlp"],
) -> tuple[Float[Tensor, "d_model d_model"], Float[Tensor, " d_model"], Float[Tensor, " d_model"]]:
    """act(x W_in + b_in) W_out + b_out as x W_FFN + b + remainder, where x W_in + b_in = ``pre``.

    Returns:
        W_FFN; b; and the remainder act(h) - act'(h) h, mapped to the output, which is 0 for ReLU.
    """
    slope = torch.func.vmap(torch.func.grad(activation))(pre)
    return ((W_in * slope) @ W_out, (b_in * slope) @ W_out + b_out, (activation(pre) - slope * pre) @ W_out)


def rank_bound(mask: Float[Tensor, "*lead d_mlp"], d_model: int) -> Float[Tensor, "*lead"]:
    """The largest possible rank of W_FFN W_V (app. B.1): the number of active units, or d_model if that is less."""
    return (mask != 0).sum(dim=-1).clamp(max=d_model).to(mask.dtype)


class AttentionWeights(NamedTuple):
    """One head's projections."""

    W_Q: Float[Tensor, "d_model d_head"]
    W_K: Float[Tensor, "d_model d_head"]
    W_V: Float[Tensor, "d_model d_out"]


def prefix_lm_attention(
    x: Float[Tensor, "token d_model"], weights: AttentionWeights, scale: float
) -> Float[Tensor, "token d_out"]:
    """One plain softmax layer: the last token sees all tokens, the others see each other but not the last."""
    scores = (x @ weights.W_Q) @ (x @ weights.W_K).T / scale
    hidden = torch.zeros_like(scores, dtype=torch.bool)
    hidden[:-1, -1] = True
    return scores.masked_fill(hidden, float("-inf")).softmax(dim=-1) @ (x @ weights.W_V)


def dual_of_prefix_lm(
    x: Float[Tensor, "token d_model"], weights: AttentionWeights, scale: float, eta: float = 1.0
) -> Float[Tensor, "token d_out"]:
    """The same by the dual model: W_1 phi(q) for the last token, eq. 25 for the demonstrations; the gradient by autograd."""
    q, k, v = x @ weights.W_Q, x @ weights.W_K, x @ weights.W_V
    log_kernel = softmax_kernel(k, q, scale)  # [token, query]
    log_D = log_kernel.log_size[:, -1].logsumexp(dim=0)
    inverse = (-log_D).exp()
    start = torch.zeros_like(v)
    start[-1] = v[-1] * inverse  # the coefficients of W_0: H_T is the query itself
    between = kernel_values(softmax_kernel(k, k[:-1], scale))
    predictions = (between.T @ start).requires_grad_()
    loss = -(v[:-1] * predictions).sum() * inverse / eta
    (gradient,) = torch.autograd.grad(loss, predictions)
    step = torch.cat([-eta * gradient, torch.zeros_like(v[-1:])])  # W_1 - W_0
    at_query = kernel_values(softmax_kernel(k, q[-1:], scale))[:, 0]
    log_D_j = log_kernel.log_size[:-1, :-1].logsumexp(dim=0)
    at_demonstrations = kernel_values(softmax_kernel(k, q[:-1], scale), (log_D - log_D_j)[None])
    return torch.cat([at_demonstrations.T @ step, (at_query @ (start + step))[None]])


def through_layers(
    x: Float[Tensor, "token d_model"],
    layers: Sequence[AttentionWeights],
    scale: float,
    layer: Callable[[Tensor, AttentionWeights, float], Tensor],
) -> list[Float[Tensor, "token d_model"]]:
    """Every layer's output, each layer reading the one before."""
    outputs = []
    for weights in layers:
        x = layer(x, weights, scale)
        outputs.append(x)
    return outputs


# The generalization bound of th. 3.2, term by term, in logarithms.
#
# For f(x) = W phi(k(x)) with |W|_F <= w, the loss -v(x).f(x) and N demonstrations drawn independently, with probability 1 -
# delta the loss of the best f on the demonstrations exceeds the best possible one by at most
#
#     O( w rho sqrt(d_o Tr K_S) / N  +  rho^2 sqrt(log(1 / delta) / N) )
#
# K_S is the demonstrations' kernel matrix, rho bounds |v| and |f|, d_o is the width of v. Like the paper, this gives O(.)
# without constants: the terms can be compared but guarantee nothing, and tokens of a text are not drawn independently.


class BoundTerms(NamedTuple):
    """Natural logarithms of the bound's terms.

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
    """log sum_j |phi(k_j) - beta mean_{n in N(j)} phi(k_n)|^2; ``negatives[j, n]`` says whether n belongs to N(j).

    With negative samples, v_j.(f(k_j) - beta mean over N(j) of f(k_n)) is still linear in W: Tr K_S becomes the trace over
    these *effective* features, and |v.f| is at most (1 + beta) rho^2. That is kvlens' own, and it says something else than the
    paper, whose bound (app. C.2) falls as the share of negatives grows. Ours rises with the first negative, at least in its
    second term, by 1 + beta; more of them lower it, as their mean is shorter. The log of a head of ``facts-linear`` goes from
    6.28 without to 6.50 with one and 6.43 with 16 (beta 1/2; ``tests/dual/test_bound.py``).
    """
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
    n_demonstrations: Count,
    d_out: int,
    delta: Annotated[float, Within(above=0, below=1)],
    beta: Annotated[float, Within(0)] = 0.0,
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
    """
    complexity = log_norm + log_rho + (log_trace + math.log(d_out)) / 2 - math.log(n_demonstrations)
    confidence = 2 * log_rho + math.log(math.log(1 / delta) / n_demonstrations) / 2 + math.log1p(beta)
    return BoundTerms(log_trace, complexity, confidence, torch.logaddexp(complexity, confidence), log_norm, log_rho)


doors(__name__)
