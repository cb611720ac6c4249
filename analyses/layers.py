"""Numbers of heads in layers that may have different numbers of them, as in hybrid models.

They are held in one tensor with as many heads as the largest layer has, with NaN (or zeros) where a layer has no such head.
Tables have rows for the heads that exist.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel


def stack_layers(of_layers: Sequence[Tensor], dim: int = 0, fill: float = 0.0) -> Float[Tensor, "layer *rest"]:
    """Stack one tensor per layer, with ``fill`` for heads that a layer does not have.

    Args:
        of_layers: equal in shape except along the axis of heads.
        dim: the axis of heads, counted in a layer's tensor.
        fill: value for the heads that are missing.
    """
    most = max(x.shape[dim] for x in of_layers)
    padded = []
    for x in of_layers:
        missing = list(x.shape)
        missing[dim] = most - x.shape[dim]
        padded.append(x if not missing[dim] else torch.cat([x, x.new_full(missing, fill)], dim=dim))
    return torch.stack(padded)


def zeros_by_head(model: KVModel, *shape: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "layer head *shape"]:
    """Zeros for every head of a model, on the CPU, and NaN for heads that a layer does not have."""
    counts = model.heads_per_layer
    zeros = torch.full((len(counts), max(counts), *shape), torch.nan, dtype=dtype)
    for layer, count in enumerate(counts):
        zeros[layer, :count] = 0
    return zeros


def heads_of_model(model: KVModel) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
    """Layer and head of every head, in order: an index into tensors [layer, head, ...]."""
    counts = torch.tensor(model.heads_per_layer)
    exists = torch.arange(int(counts.max())) < counts[:, None]
    layer, head = exists.nonzero(as_tuple=True)
    return layer, head
