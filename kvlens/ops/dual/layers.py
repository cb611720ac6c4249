"""Beyond one head: the MLP after it (DUAL th. B.1), and stacked attention layers (th. B.2).

**One Transformer layer.** For a single query the MLP's ReLU mask is fixed, so the MLP after the attention is a linear map:

    x_out = W_FFN x_mid + b        W_FFN = W_2 diag(mask) W_1        b = W_2 diag(mask) b_1 + b_2

and the dual model has labels W_FFN v_j, the initial weight W_FFN W_0 (keeping W_0 unchanged is wrong by a third), and b as an
offset. For activations that are not piecewise linear, the tangent at the query's own pre-activations replaces the mask; the
constant that it misses at the query is the remainder.

**Several layers.** Under PrefixLM attention (demonstrations see each other, the query sees all) layer l's dual model gives the
query's output after one step, and, by eq. 25, those of the demonstrations themselves, which are layer l + 1's inputs:

    h_j = (D / D_j) (W_1 - W_0) phi(q_j)         D_j = sum over demonstrations of kappa(k_t, q_j)

Weights multiply row vectors from the right, as in TransformerLens.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.dual.kernel import kernel_values, softmax_kernel


class FoldedMLP(NamedTuple):
    """An MLP as one linear map at one query.

    Attributes:
        weight: W_FFN.
        bias: b.
        remainder: act(h) - act'(h) h, mapped to the output; 0 for ReLU. Included in neither ``weight`` nor ``bias``.
    """

    weight: Float[Tensor, "d_model d_model"]
    bias: Float[Tensor, " d_model"]
    remainder: Float[Tensor, " d_model"]


def fold_mlp(
    W_in: Float[Tensor, "d_model d_mlp"],
    b_in: Float[Tensor, " d_mlp"],
    W_out: Float[Tensor, "d_mlp d_model"],
    b_out: Float[Tensor, " d_model"],
    activation: Callable[[Tensor], Tensor],
    pre: Float[Tensor, " d_mlp"],
) -> FoldedMLP:
    """act(x W_in + b_in) W_out + b_out as x W_FFN + b + remainder, where x W_in + b_in = ``pre``."""
    slope = torch.func.vmap(torch.func.grad(activation))(pre)
    return FoldedMLP((W_in * slope) @ W_out, (b_in * slope) @ W_out + b_out, (activation(pre) - slope * pre) @ W_out)


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
