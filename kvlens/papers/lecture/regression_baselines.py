"""Predictions of untrained methods at every point of a prompt, from the examples before that point.

With the n examples X_n (rows x_1 ... x_n), y_n before a point x:

    least squares        x . X_n^+ y_n                                  of the w that fit best the shortest (exactly, if n < d)
    ridge                x . (X_n^T X_n + penalty I)^-1 X_n^T y_n       with w ~ N(0, I/d) and noise of variance s^2 on y, the
                                                                        best possible prediction at penalty = d s^2
    nearest neighbors   mean of y over the k examples nearest to x     over all of them where n < k

and 0 without examples. All numbers of examples are computed at once: later examples are replaced by rows of zeros, which change
neither a pseudo-inverse nor a sum. Computed in the dtype of ``x``, which should be float64.

Source: Garg, Tsipras, Liang, Valiant 2022, What Can Transformers Learn In-Context?, sec. 3-4.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

PromptPoints = Float[Tensor, "prompt point dim"]
GivenLabels = Float[Tensor, "prompt point_minus_1"]
Predictions = Float[Tensor, "prompt point"]


def least_squares(x: PromptPoints, y: GivenLabels) -> Predictions:
    """Minimum-norm least squares.

    Args:
        x: the points of each prompt.
        y: the answers to all but the last of them.

    Returns:
        One prediction per point; n points precede the n-th (from 0).
    """
    earlier = _earlier(x)
    examples = x[:, None, :-1] * earlier[:, :, None]
    w = torch.linalg.pinv(examples) @ (y[:, None] * earlier)[..., None]
    return (x[:, :, None] @ w).flatten(1)


def ridge(x: PromptPoints, y: GivenLabels, penalty: float | int) -> Predictions:
    """Least squares with ``penalty`` |w|^2, which is positive, added to the squared error.

    Arguments and result as of `least_squares`, which is the limit for a penalty of 0.
    """
    examples = x[:, :-1]
    gram = _sums_before(examples[..., None] * examples[:, :, None])
    moment = _sums_before(examples * y[..., None])
    w = torch.linalg.solve(gram + penalty * torch.eye(x.shape[2]).to(x), moment)
    return (x * w).sum(-1)


def nearest_neighbors(x: PromptPoints, y: GivenLabels, k: int) -> Predictions:
    """The mean answer of the ``k`` nearest examples; arguments and result as of `least_squares`."""
    # Differences are computed directly; by products, the distance of a point to itself would be about the root of eps.
    distance = torch.cdist(x, x[:, :-1], compute_mode="donot_use_mm_for_euclid_dist")
    distance = distance.masked_fill(_earlier(x) == 0, math.inf)
    nearest = distance.topk(min(k, y.shape[1]), largest=False)
    counts = nearest.values.isfinite().to(y)
    answers = y[:, None].expand(distance.shape).gather(2, nearest.indices)
    return (answers * counts).sum(-1) / counts.sum(-1).clamp(min=1)


def _earlier(x: PromptPoints) -> Float[Tensor, "point point_minus_1"]:
    """1 if an example precedes a point, else 0."""
    return torch.ones(x.shape[1], x.shape[1] - 1).to(x).tril(-1)


def _sums_before(terms: Float[Tensor, "prompt point_minus_1 *rest"]) -> Float[Tensor, "prompt point *rest"]:
    """Return for each point the sum of the terms of the examples before it."""
    return torch.cat([torch.zeros_like(terms[:, :1]), terms], dim=1).cumsum(1)
