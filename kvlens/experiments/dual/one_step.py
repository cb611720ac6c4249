"""One step of the dual model of a softmax layer at its last token, by autograd on the predictions."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops import dual


def after_one_step(
    q: Float[Tensor, " d"],
    k: Float[Tensor, "token d"],
    labels: Float[Tensor, "token d_out"],
    scale: float,
    demonstration_labels: Float[Tensor, "demo d_out"] | None = None,
) -> Float[Tensor, " d_out"]:
    """f(q) after one step with the exact softmax kernel; the last token is H_T, all others are demonstrations.

    Args:
        q, k: the query and all keys, the query's own last.
        labels: labels of all tokens: v_j, or W_FFN v_j.
        scale: scale of the softmax.
        demonstration_labels: wrong labels for the demonstrations, for a control.
    """
    n = len(k) - 1
    wanted = labels[:n] if demonstration_labels is None else demonstration_labels
    log_D = (k @ q / scale).logsumexp(dim=0)
    start = torch.cat([torch.zeros_like(wanted), labels[n:] * (-log_D).exp()])  # the coefficients of W_0
    predictions = (dual.kernel_values(dual.softmax_kernel(k, k[:n], scale)).T @ start).requires_grad_()
    (gradient,) = torch.autograd.grad(dual.loss_of_predictions(predictions, wanted, log_D.exp(), eta=1.0), predictions)
    after = start + torch.cat([-gradient, torch.zeros_like(labels[n:])])
    return dual.kernel_values(dual.softmax_kernel(q[None], k, scale))[0] @ after
