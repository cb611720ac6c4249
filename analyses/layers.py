"""Numbers of heads in layers that may have different numbers of them, as in hybrid models.

They are held in one tensor with as many heads as the largest layer has, with NaN (or zeros) where a layer has no such head.
Tables have rows for the heads that exist.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.model import heads_per_layer


def stack_layers(of_layers: Sequence[Tensor], fill: float = 0.0) -> Float[Tensor, " layer *rest"]:
    """Stack one tensor per layer, with ``fill`` for heads, and dimensions of heads, that a layer does not have."""
    largest = [max(sizes) for sizes in zip(*(x.shape for x in of_layers), strict=True)]
    whole = of_layers[0].new_full((len(of_layers), *largest), fill)
    for layer, x in enumerate(of_layers):
        whole[layer][tuple(slice(n) for n in x.shape)] = x
    return whole


def zeros_by_head(model: KVModel, *shape: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "layer head *shape"]:
    """Zeros for every head of a model, on the CPU, and NaN for heads that a layer does not have."""
    counts = heads_per_layer(model)
    zeros = torch.full((len(counts), max(counts), *shape), torch.nan, dtype=dtype)
    for layer, count in enumerate(counts):
        zeros[layer, :count] = 0
    return zeros


def heads_of_model(model: KVModel) -> tuple[Int[Tensor, " row"], Int[Tensor, " row"]]:
    """Layer and head of every head, in order: an index into tensors [layer, head, ...]."""
    counts = torch.tensor(heads_per_layer(model))
    exists = torch.arange(int(counts.max())) < counts[:, None]
    layer, head = exists.nonzero(as_tuple=True)
    return layer, head
