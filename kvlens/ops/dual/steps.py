"""The dual model with an explicit weight W: loss, gradient, step, prediction (DUAL th. 3.1).

    f(z) = W phi~(z)
    W_0 = (1 / D) sum_{H_T} v_t phi~(k_t)^T
    L(W) = -(1 / (eta D)) sum_{j in H_D} v_j^T W phi~(k_j)  [+ alpha / (2 eta) |W|^2]
    W_{n+1} = W_n - eta dL/dW = (1 - alpha) W_n + (1 / D) sum_{H_D} v_j phi~(k_j)^T

H_D are the demonstrations, H_T the tokens after them up to the query; D is the head's normalizer at the query. After one
step f(q) is the head's output, for every eta. Without alpha the loss is linear in W and has no minimizer. With decay, the
``inputs`` are phi~(k_j) gamma^{i-j}, the features as query i sees them.

Rows: ``inputs`` [demo, d_phi] and ``labels`` [demo, d_out]; a weight is [d_out, d_phi].
Source: DUAL th. 3.1, eq. 9 and 12; our ``alpha`` is theirs, ``eta`` their learning rate.
"""

from jaxtyping import Float
from torch import Tensor

Inputs = Float[Tensor, "*lead demo d_phi"]
Labels = Float[Tensor, "*lead demo d_out"]
Weight = Float[Tensor, "*lead d_out d_phi"]
Normalizer = Float[Tensor, "*#lead"]
"""D, one per query."""


def mean_outer(inputs: Inputs, labels: Labels, normalizer: Normalizer) -> Weight:
    """(1 / D) sum_j v_j phi~(k_j)^T: W_0 for the tokens of H_T, and what a step adds for those of H_D."""
    return labels.transpose(-1, -2) @ inputs / normalizer[..., None, None]


def predict(weight: Weight, inputs: Inputs) -> Labels:
    """f(z) = W phi~(z), row by row."""
    return inputs @ weight.transpose(-1, -2)


def loss_of_predictions(predictions: Labels, labels: Labels, normalizer: Normalizer, eta: float) -> Float[Tensor, "*lead"]:
    """-(1 / (eta D)) sum_j v_j.f(k_j) (DUAL eq. 9); autograd can act on it even if phi is infinite-dimensional."""
    return -(labels * predictions).sum(dim=(-2, -1)) / (eta * normalizer)


def dual_loss(
    weight: Weight, inputs: Inputs, labels: Labels, normalizer: Normalizer, eta: float, alpha: float = 0.0
) -> Float[Tensor, "*lead"]:
    """L(W), plus alpha / (2 eta) |W|^2 if ``alpha`` is not 0 (DUAL eq. 9 and 12)."""
    loss = loss_of_predictions(predict(weight, inputs), labels, normalizer, eta)
    return loss if alpha == 0 else loss + alpha / (2 * eta) * weight.square().sum(dim=(-2, -1))


def loss_gradient(
    weight: Weight, inputs: Inputs, labels: Labels, normalizer: Normalizer, eta: float, alpha: float = 0.0
) -> Weight:
    """dL/dW in closed form: -(1 / (eta D)) sum_j v_j phi~(k_j)^T + (alpha / eta) W."""
    return (alpha * weight - mean_outer(inputs, labels, normalizer)) / eta


def weight_after(weight: Weight, added: Weight, n_steps: int, alpha: float = 0.0) -> Weight:
    """W_n in closed form, (1 - alpha)^n W_0 + sum_{s<n} (1 - alpha)^s G, where G = ``added`` is `mean_outer` of H_D."""
    kept = 1.0 - alpha
    series = float(n_steps) if alpha == 0 else (1.0 - kept**n_steps) / alpha
    return kept**n_steps * weight + series * added
