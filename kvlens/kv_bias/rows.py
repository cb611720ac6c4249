"""Batches of exact biases: the fields of some rows of one, of several joined, and of mixtures of two prompts layer by layer.

Exact biases have no fit, so that a batch is its tensors and counts alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.validation import COUNTS, TENSORS

OF_KEYS = {"b_KV": -2, "b_D": -1, "features.keys": -2, "features.distance": -1}
"""Tensors with an axis of virtual keys, and which it is."""


def fields_of_rows(bias: Any, rows: Int[Tensor, " row"]) -> dict[str, Any]:
    """The fields of some prompts of a batch."""
    counts = {name: value[rows] for name in COUNTS if isinstance(value := getattr(bias, name), Tensor)}
    return counts | _fields(bias, {name: x[:, rows.to(x.device)] for name, x in bias.tensors().items()})


def fields_of_batch(biases: Sequence[Any]) -> dict[str, Any]:
    """The fields of several batches joined; those with fewer keys get keys of weight 0."""
    most = max(bias.d_phi for bias in biases)
    tensors = [_with_keys(bias, most) for bias in biases]
    counts = {
        name: torch.cat([torch.as_tensor(getattr(b, name), device=b.b_KV.device).expand(b.batch_size) for b in biases])
        for name in COUNTS
    }
    return counts | _fields(biases[0], {name: torch.cat([x[name] for x in tensors], dim=1) for name in tensors[0]})


def fields_of_exchange(own: Any, other: Any, layers: Bool[Tensor, "row layer"]) -> dict[str, Any]:
    """The fields of a batch whose row i has the layers from ``other`` for which ``layers[i]`` is True."""
    theirs, mixed = other.tensors(), {}
    for name, x in own.tensors().items():
        which = own.recurrent.layers if name.startswith("recurrent.") else own.attention_layers
        chosen = layers[:, list(which)].T.reshape(len(which), len(layers), *[1] * (x.dim() - 1))
        mixed[name] = torch.where(chosen.to(x.device), theirs[name][:, None], x[:, None])
    return _fields(own, mixed)


def _fields(bias: Any, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Tensors by their names in a file, as fields like those of a bias."""
    fields: dict[str, Any] = {name: tensors[name] for name in (*TENSORS, "log_scale") if name in tensors}
    for part in ("features", "recurrent"):
        own = {name.removeprefix(f"{part}."): x for name, x in tensors.items() if name.startswith(f"{part}.")}
        if own:
            fields[part] = replace(getattr(bias, part), **own)
    return fields


def _with_keys(bias: Any, n: int) -> dict[str, Tensor]:
    """The tensors of a batch with ``n`` keys per head: those that are added have weight 0."""
    tensors: dict[str, Tensor] = bias.tensors()
    more = n - bias.d_phi
    if not isinstance(bias.features, VirtualKeys) or not more:
        return tensors
    for name, axis in OF_KEYS.items():
        x = tensors[name]
        shape = list(x.shape)
        shape[axis] = more
        tensors[name] = torch.cat([x, x.new_ones(shape) if name == "features.distance" else x.new_zeros(shape)], dim=axis)
    return tensors
