"""The points that :mod:`kvlens.analyses.bias.patching` patches, and the hooks of many patches as rows of one batch.

A patch names a point, a layer and a head, -1 for all. Its row of the batch reads the given tensor there, and the model's own
everywhere else: for each source and layer, a mask [row, head] selects the rows. A source has the name of its hook, prefixed
with the point if two points have different tensors for one hook.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens import HookedKVTransformer, KVLensError

ALL = -1
"""Every layer, or every head."""

HEAD_AXIS = {
    "b_kv": 1,
    "b_d": 1,
    "last_k": 2,
    "last_v": 2,
    "last_q": 2,
    "z_bias": 2,
    "k_shift_coef": 0,
    "v_shift_coef": 0,
    "q_shift_coef": 0,
}
"""hook (without ``hook_``) -> axis of its heads; 0 means that it has no batch axis, so that a pass can hold one patch only."""


class Point(NamedTuple):
    """The sources that are patched together, and the kind of their heads (None: all heads of a layer at once)."""

    sources: tuple[str, ...]
    heads: str | None


POINTS = {
    "b_kv": Point(("b_kv",), "query"),
    "b_d": Point(("b_d",), "query"),
    "bias": Point(("b_kv", "b_d"), "query"),
    "keys": Point(("keys.b_kv", "keys.b_d"), "query"),
    "values": Point(("values.b_kv",), "query"),
    "shift_state": Point(("last_k", "last_v", "last_q"), "key-value"),
    "prompt": Point(("b_kv", "b_d", "last_k", "last_v", "last_q"), None),
    "z_bias": Point(("z_bias",), "query"),
    "k_shift_coef": Point(("k_shift_coef",), "key-value"),
    "v_shift_coef": Point(("v_shift_coef",), "key-value"),
    "q_shift_coef": Point(("q_shift_coef",), "query"),
}
"""The points by name. ``bias`` is b_KV and b_D, and with softmax attention their keys; ``prompt`` is the whole converted
prompt. ``keys`` and ``values`` are the two halves of a softmax bias, ``b_kv`` and ``b_d`` those of a linear one.
"""
LINEAR_ONLY = ("b_kv", "b_d")
"""Points that softmax attention does not have: exp(q.c) over another prompt's normalizer is unbounded."""


class Patch(NamedTuple):
    """One intervention."""

    point: str
    layer: int
    head: int


Sources = Mapping[tuple[str, int], Tensor]
"""(source, layer) -> the tensor that is patched in, shaped as the hook's tensor, with a batch of 1 if it has a batch axis."""


def hook_of(source: str) -> str:
    """The hook, without ``hook_``, that a source is for."""
    return source.rpartition(".")[2]


def available_sources(model: HookedKVTransformer) -> list[str]:
    """The sources that can be patched in this model with a bias."""
    shift = model.cfg.kv_shift
    shifted = [] if shift is None else [x for x, on in zip("kvq", (shift.keys, shift.values, shift.queries), strict=True) if on]
    bias = ["b_kv"] if model.cfg.attention == "linear" and model.cfg.normalizer == "none" else ["b_kv", "b_d"]
    halves = [*POINTS["keys"].sources, *POINTS["values"].sources] if model.cfg.attention == "softmax" else []
    return [*bias, *halves, "z_bias", *(f"last_{x}" for x in shifted), *(f"{x}_shift_coef" for x in shifted)]


def available_points(model: HookedKVTransformer) -> list[str]:
    """The points that the model has, without duplicates: ``bias`` requires a b_D, and ``prompt`` a shift state."""
    sources = set(available_sources(model))
    found = [name for name, point in POINTS.items() if sources & set(point.sources)]
    twins = {"bias": "b_d", "prompt": "shift_state"}
    found = [name for name in found if twins.get(name, name) in found]
    return [name for name in found if not _is_refused(model, name)]


def _is_refused(model: HookedKVTransformer, point: str) -> bool:
    return model.cfg.attention == "softmax" and point in LINEAR_ONLY


def patches_of(model: HookedKVTransformer, points: Sequence[str]) -> list[Patch]:
    """All patches of ``points``: every head, every layer (head -1), everything (layer -1, head -1), in this order."""
    layers = [model.cfg.of_layer(layer) for layer in range(model.cfg.n_layers)]
    n_heads = {"query": [of.n_heads for of in layers], "key-value": [of.n_kv_heads for of in layers], None: [0] * len(layers)}
    sources, patches = set(available_sources(model)), []
    for name in points:
        if not sources & set(POINTS[name].sources) or _is_refused(model, name):
            raise KVLensError(
                f"activation_patching: this model has no {name!r}: it has {', '.join(available_points(model))} "
                f"({_kind_of(model)}, kv_shift {model.cfg.kv_shift})"
            )
        patches += [Patch(name, layer, head) for layer, n in enumerate(n_heads[POINTS[name].heads]) for head in range(n)]
        patches += [Patch(name, layer, ALL) for layer in range(len(layers))] + [Patch(name, ALL, ALL)]
    return patches


def _kind_of(model: HookedKVTransformer) -> str:
    return f"normalizer {model.cfg.normalizer!r}" if model.cfg.attention == "linear" else "softmax attention"


def has_batch_axis(patch: Patch) -> bool:
    """Whether this patch can share a pass with others."""
    return all(HEAD_AXIS[hook_of(source)] for source in POINTS[patch.point].sources)


def patch_hooks(
    model: HookedKVTransformer, patches: Sequence[Patch], sources: Sources
) -> list[tuple[str, Callable[..., Tensor]]]:
    """TransformerLens hooks under which row i of the input runs with ``patches[i]``."""
    hooks = []
    for (source, layer), tensor in sources.items():
        hook = hook_of(source)
        mask = _reads(model, patches, source, layer, tensor.shape[HEAD_AXIS[hook]])
        if bool(mask.any()):
            hooks.append((f"blocks.{layer}.attn.hook_{hook}", _setter(mask, tensor, HEAD_AXIS[hook])))
    return hooks


def _reads(
    model: HookedKVTransformer, patches: Sequence[Patch], source: str, layer: int, n_heads: int
) -> Bool[Tensor, "row head"]:
    """The heads of this source that each patch names, as a mask."""
    here = torch.tensor([source in POINTS[patch.point].sources and patch.layer in (layer, ALL) for patch in patches])
    named = torch.tensor([patch.head for patch in patches])[:, None]
    heads = torch.arange(n_heads)
    if source == "last_q":  # it belongs to the shift state, whose heads are counted as key-value heads
        heads = heads // (n_heads // model.cfg.of_layer(layer).n_kv_heads)
    return here[:, None] & ((named == ALL) | (named == heads))


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
