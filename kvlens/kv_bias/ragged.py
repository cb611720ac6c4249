"""Padding: layers with fewer heads than others, and heads with fewer virtual keys, which a file leaves out.

In ``b_KV`` all heads have as many virtual keys as the head with the most, padded with keys of weight 0. With unequal budgets
this is many times the size (in memory see :mod:`kvlens.kv_bias.groups`), so a file leaves the padding out:

    used [layer, (batch,) kv_head, r]          b_KV, b_D, keys, distance: the rows where ``used``, in its order

``b_KV`` and ``b_D`` of single query heads (after a selection) have the rows of their key-value head.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

USED, DISTANCE = "used", "features.distance"
RAGGED = {"b_KV": 1, "b_D": 0, "features.keys": 1, DISTANCE: 0}
"""The tensors that are packed, and how many axes follow the axis of the keys."""


def padded(of_layers: Sequence[Tensor]) -> Tensor:
    """The tensors of all layers, stacked; those of layers with fewer or smaller heads are filled up with zeros."""
    shapes = [x.shape for x in of_layers]
    if len(set(shapes)) == 1:
        return torch.stack(list(of_layers))
    largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
    whole = of_layers[0].new_zeros(len(of_layers), *largest)
    for layer, x in enumerate(of_layers):
        whole[layer][tuple(slice(n) for n in x.shape)] = x
    return whole


def used_keys(b_kv: Tensor, b_d: Tensor, n_kv_heads: int) -> Bool[Tensor, "layer *batch kv_head r"]:
    """True where a key has a weight or a value for any of the query heads that read it."""
    used = (b_d != 0) | (b_kv != 0).any(dim=-1)
    return used.unflatten(-2, (n_kv_heads, -1)).any(dim=-2)


def packed(tensors: Mapping[str, Tensor], n_kv_heads: int) -> dict[str, Tensor]:
    """The tensors of a bias without unused virtual keys; unchanged if every key is used."""
    used = used_keys(tensors["b_KV"], tensors["b_D"], n_kv_heads)
    if bool(used.all()):
        return dict(tensors)
    rows = {name: tensors[name][_of_heads(used, tensors[name], after)] for name, after in RAGGED.items()}
    return {**tensors, **rows, USED: used}


def unpacked(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of :func:`packed`, except that unused keys are 0, at distance 1.

    Raises:
        ValueError: the numbers of rows do not fit.
    """
    rest = {name: tensor for name, tensor in tensors.items() if name != USED}
    if USED not in tensors:
        return rest
    used = tensors[USED]
    if used.dtype != torch.bool or used.dim() < 3 or not RAGGED.keys() <= rest.keys():
        raise ValueError(f"used must be truth values [layer, (batch,) kv_head, r], got {used.dtype} {list(used.shape)}")
    for name, after in RAGGED.items():
        rows, n = rest[name], int(used.sum())
        group = max(1, len(rows) // max(n, 1)) if name.startswith("b_") else 1  # query heads of a key-value head
        if rows.dim() != 1 + after or len(rows) != n * group:
            raise ValueError(f"{name} holds {len(rows)} rows for {n} virtual keys")
        where = used.repeat_interleave(group, dim=-2)
        whole = rows.new_full((*where.shape, *rows.shape[1:]), 1 if name == DISTANCE else 0)
        whole[where] = rows
        rest[name] = whole
    return rest


def _of_heads(used: Tensor, like: Tensor, after: int) -> Tensor:
    """``used`` repeated for as many heads as ``like`` has."""
    heads = like.shape[-2 - after]
    return used.repeat_interleave(heads // used.shape[-2], dim=-2)
