"""The points that :mod:`kvlens.analyses.bias.patching` patches, and many patches as rows of one batch.

A patch names a point, a layer and a head, -1 for all. What a point replaces is a part of the converted prompt, by that of the
point's donor (:mod:`kvlens.analyses.bias.interventions`), or an activation of the text's pass, by a hook.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, KVLensError

from ..heads.repeated_text import shifted_projections
from .interventions import ALL, Interventions
from .one_space import stacked
from .parts import of_kv_head


class Point(NamedTuple):
    """The kind of heads that are patched one by one (None: all of a layer at once), and what is replaced of the prompt."""

    heads: str | None
    bias: bool = False
    shift_state: bool = False


POINTS = {
    "b_kv": Point("query", bias=True),
    "b_d": Point("query", bias=True),
    "bias": Point("query", bias=True),
    "keys": Point("query", bias=True),
    "values": Point("query", bias=True),
    "shift_state": Point("key-value", shift_state=True),
    "prompt": Point(None, bias=True, shift_state=True),
    "z_bias": Point("query"),
    "k_shift_coef": Point("key-value"),
    "v_shift_coef": Point("key-value"),
    "q_shift_coef": Point("query"),
}
"""The points by name. ``bias`` is b_KV and b_D, and with softmax attention their keys; ``prompt`` is the whole converted
prompt. ``keys`` and ``values`` are the two halves of a softmax bias, ``b_kv`` and ``b_d`` those of a linear one (exp(q.c) over
another prompt's normalizer would be unbounded).
"""


class Patch(NamedTuple):
    """One intervention."""

    point: str
    layer: int
    head: int


Sources = Mapping[tuple[str, int], Tensor]
"""(point, layer) -> the activation that a hook puts in: z_bias with a batch of 1, or shift coefficients, without one."""


def _has(model: HookedKVTransformer, point: str) -> bool:
    linear = model.cfg.attention == "linear"
    halves = {"b_kv": linear, "b_d": linear and model.cfg.normalizer != "none", "keys": not linear, "values": not linear}
    others = {"bias": True, "prompt": True, "z_bias": True, "shift_state": bool(shifted_projections(model))}
    return (halves | others).get(point, point[0] in shifted_projections(model))


def available_points(model: HookedKVTransformer) -> list[str]:
    """The points that the model has, without duplicates: ``bias`` requires a b_D, and ``prompt`` a shift state."""
    twins = {"bias": "b_d" if model.cfg.attention == "linear" else "bias", "prompt": "shift_state"}
    return [name for name in POINTS if _has(model, name) and _has(model, twins.get(name, name))]


def patches_of(model: HookedKVTransformer, points: Sequence[str]) -> list[Patch]:
    """All patches of ``points``: every head, every layer (head -1), everything (layer -1, head -1), in this order."""
    layers = [model.cfg.of_layer(layer) for layer in range(model.cfg.n_layers)]
    n_heads = {"query": [of.n_heads for of in layers], "key-value": [of.n_kv_heads for of in layers], None: [0] * len(layers)}
    patches = []
    for name in points:
        if not _has(model, name):
            linear = model.cfg.attention == "linear"
            raise KVLensError(
                f"activation_patching: this model has no {name!r}: it has {', '.join(available_points(model))} "
                f"({f'normalizer {model.cfg.normalizer!r}' if linear else 'softmax attention'}, kv_shift {model.cfg.kv_shift})"
            )
        patches += [Patch(name, layer, head) for layer, n in enumerate(n_heads[POINTS[name].heads]) for head in range(n)]
        patches += [Patch(name, layer, ALL) for layer in range(len(layers))] + [Patch(name, ALL, ALL)]
    return patches


def has_batch_axis(patch: Patch) -> bool:
    """Whether this patch can share a pass with others."""
    return not patch.point.endswith("_shift_coef")


def as_interventions(bias: KVBias, patches: Sequence[Patch], donors: Mapping[str, KVBias]) -> Interventions:
    """What ``patches`` replace of the prompt: row i is ``patches[i]``; ``donors`` are those of the points."""
    of_bias = [[(patch.layer, patch.head)] if POINTS[patch.point].bias else [] for patch in patches]
    of_shift_state = [
        [(layer, head if head == ALL else of_kv_head(bias, layer, head))] if POINTS[point].shift_state else []
        for point, layer, head in patches
    ]
    order = list(donors)
    donor = [order.index(patch.point) if patch.point in order else 0 for patch in patches]
    return Interventions.of(bias, of_bias, of_shift_state, donor, stacked(list(donors.values())))


def patch_hooks(patches: Sequence[Patch], sources: Sources, rows: slice) -> list[tuple[str, Callable[..., Tensor]]]:
    """TransformerLens hooks that put the activations of ``patches[rows][i]`` into row i of the input."""
    hooks, patches = [], patches[rows]
    for (point, layer), tensor in sources.items():
        axis = 2 if has_batch_axis(Patch(point, ALL, ALL)) else 0
        here = torch.tensor([patch.point == point and patch.layer in (layer, ALL) for patch in patches])
        named = torch.tensor([patch.head for patch in patches])[:, None]
        mask = here[:, None] & ((named == ALL) | (named == torch.arange(tensor.shape[axis])))
        if bool(mask.any()):
            hooks.append((f"blocks.{layer}.attn.hook_{point}", _setter(mask, tensor, axis)))
    return hooks


def _setter(mask: Bool[Tensor, "row head"], source: Tensor, axis: int) -> Callable[..., Tensor]:
    """A hook that replaces the entries in ``mask`` by those of ``source``."""
    shape = [1] * source.dim()
    shape[axis] = mask.shape[1]
    if axis:
        shape[0] = mask.shape[0]
    mask = mask.reshape(shape)

    def patch(x: Tensor, hook: Any) -> Tensor:
        return torch.where(mask.to(x.device), source.to(x), x)

    return patch
