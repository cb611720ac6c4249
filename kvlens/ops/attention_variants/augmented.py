"""Augmented keys and values: one MLP per head between the projection and the attention (DUAL eq. 14, app. D.2)."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError


def augment(
    x: Float[Tensor, "batch pos head d"],
    weights: Sequence[Float[Tensor, "head _ _"]],
    activation: Callable[[Tensor], Tensor],
    parallel: float | None = None,
) -> Float[Tensor, "batch pos head d"]:
    """g(x) = W_n act(... act(W_1 x)), or act(W_1 x) for a single layer; x + c g(x) where ``parallel`` is c.

    Args:
        x: keys or values.
        weights: for each layer, one matrix per head; the first layer reads d, the last writes d.
        activation: applied between layers, or after the layer if there is only one.
        parallel: c, the weight of the MLP as a branch added to x; None for the MLP alone.

    Raises:
        KVLensError: the matrices cannot be chained from d back to d.
    """
    widths = [x.shape[-1], *(width for weight in weights for width in weight.shape[1:]), x.shape[-1]]
    if widths[::2] != widths[1::2]:
        came = ", ".join(str(list(weight.shape[1:])) for weight in weights)
        raise KVLensError(f"augment: expected matrices [d, n], ..., [m, d] that can be chained, d={x.shape[-1]}, got {came}")
    out = x
    for layer, weight in enumerate(weights):
        out = (out.transpose(1, 2) @ weight.to(x.dtype)).transpose(1, 2)
        if layer < len(weights) - 1 or len(weights) == 1:
            out = activation(out)
    return out if parallel is None else x + parallel * out
