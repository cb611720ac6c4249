"""Sums, parts and batches of biases, as the fields in which the result differs.

b_KV and b_D are sums over tokens, so they add; a shift state is not a sum, so one must be chosen. Batches are of exact biases:
these have no fit, so that a batch is its tensors and counts alone.

These functions do not import :class:`kvlens.KVBias`, which depends on this module.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.kv_bias.features import VirtualKeys, same_features
from kvlens.kv_bias.fields import COUNTS, NO_STATES, TENSORS, combined
from kvlens.kv_bias.fit import of_sum, since
from kvlens.kv_bias.storage import padded

SHIFT_STATE = ("last_k", "last_v", "last_q")


def fields_of_sum(
    biases: Sequence[Any], weights: Sequence[float | int] | None, shift_state: str, *, equal_offsets: bool = False
) -> dict[str, Any]:
    """The fields in which the weighted sum of ``biases`` (KVBias objects) differs from the first of them.

    Args:
        biases: at least one.
        weights: one per bias; 1 if None.
        shift_state: "equal", "first", "last" or "zero", as in :meth:`kvlens.KVBias.combine`.
        equal_offsets: raise an error if position offsets differ, even if ``shift_state`` chooses a bias.

    Raises:
        KVLensError: different models, dtypes or batch shapes; shift states or offsets differ and none was chosen.
    """
    weights = [1.0] * len(biases) if weights is None else list(weights)
    biases = [bias.padded() for bias in biases]
    first = biases[0]
    here = first.b_KV.device
    biases = [bias if bias.b_KV.device == here else bias.to(here) for bias in biases]  # a loaded one is on the CPU
    for other in biases[1:]:
        _check_same_kind(first, other)
        if shift_state == "equal":
            _check_equal_boundaries(first, other)
        if equal_offsets or shift_state in ("equal", "zero"):
            _check_equal_offsets(first, other, weights)
    chosen = biases[-1] if shift_state == "last" else first
    changed = {name: getattr(chosen, name) for name in (*SHIFT_STATE, "position_offset")}
    if shift_state == "zero":
        changed |= {name: torch.zeros_like(getattr(first, name)) for name in SHIFT_STATE}
    sums = {**_stored_sums(biases, weights), "recurrent": combined([b.recurrent for b in biases], weights, shift_state)}
    _check_held("combine: the sum", sums, biases)
    changed |= sums
    unchanged = weights == [1.0] and shift_state != "zero"
    fit = first.fit if unchanged else of_sum((b.fit for b in biases), _sum_in_words(biases, weights))
    return {**changed, "fit": fit, "n_prompt_tokens": _tokens_left(biases, weights)}


def _tokens_left(biases: Sequence[Any], weights: Sequence[float | int]) -> Any:
    """Tokens added minus tokens subtracted, so that exchanging a head of one prompt for that of another keeps their number.

    A factor does not change how many tokens a bias stands for, whatever its sign.
    """
    if len(biases) == 1:
        return biases[0].n_prompt_tokens
    left = sum(((w > 0) - (w < 0)) * b.n_prompt_tokens for w, b in zip(weights, biases, strict=True))
    return left.clamp(min=0) if isinstance(left, torch.Tensor) else max(left, 0)


def _sum_in_words(biases: Sequence[Any], weights: Sequence[float | int]) -> str:
    kinds = (f"{w:.3g} times {'an exact bias' if b.fit is None else 'one'}" for w, b in zip(weights, biases, strict=True))
    return f"summed: {', '.join(kinds)}" if len(biases) < 5 else f"sum of {len(biases)}"


def scaled_fields(bias: Any, factor: float) -> dict[str, Any]:
    """b_KV, b_D and the fit record of ``factor`` times a bias.

    Raises:
        KVLensError: the numbers overflow the dtype.
    """
    bias = bias.padded()
    scaled: dict[str, Any] = {name: factor * getattr(bias, name) for name in ("b_KV", "b_D")}
    scaled["recurrent"] = combined([bias.recurrent], [factor], "first")
    _check_held(f"KVBias: {factor:.3g} times this bias", scaled, [bias])
    return {**scaled, "fit": bias.fit if factor == 1 else since(bias.fit, f"multiplied by {factor:.3g}")}


def _check_held(what: str, new: dict[str, Any], biases: Sequence[Any]) -> None:
    """Raise KVLensError for numbers that became infinite."""
    made = SimpleNamespace(**new)
    for name in ("b_KV", "b_D", "recurrent.b_KV"):
        read = attrgetter(name)
        if not bool(read(made).isfinite().all()) and all(bool(read(bias).isfinite().all()) for bias in biases):
            dtype = str(read(made).dtype).removeprefix("torch.")
            raise KVLensError(f"{what} has numbers in {name} that overflow {dtype}: use smaller factors")


def _stored_sums(biases: Sequence[Any], weights: Sequence[float | int]) -> dict[str, Any]:
    """b_KV and b_D of the sum; for softmax on a common log-scale, with virtual keys concatenated."""
    names, first = ("b_KV", "b_D"), biases[0]
    if first.features is None:
        terms = {name: [w * getattr(b, name) for w, b in zip(weights, biases, strict=True)] for name in names}
        return {name: torch.stack(terms[name]).sum(dim=0) for name in names}
    if len({b.b_KV.shape[-3] for b in biases}) > 1:  # one of them had single query heads selected
        biases = [b.per_query_head() for b in biases]
    log_scale = torch.stack([b.log_scale for b in biases]).amax(dim=0)
    terms = {name: [] for name in names}
    for w, b in zip(weights, biases, strict=True):
        factor = w * _per_row((b.log_scale - log_scale).exp(), b)
        terms["b_KV"].append(factor[..., None, None] * b.b_KV)
        terms["b_D"].append(factor[..., None] * b.b_D)
    if first.features.per_prompt:
        features = functools.reduce(lambda a, b: a.followed_by(b), [b.features for b in biases])
        side_by_side = {"b_KV": torch.cat(terms["b_KV"], dim=-2), "b_D": torch.cat(terms["b_D"], dim=-1)}
        return {**side_by_side, "log_scale": log_scale, "features": features}
    return {**{name: torch.stack(terms[name]).sum(dim=0) for name in names}, "log_scale": log_scale}


def _per_row(factor: Any, bias: Any) -> Any:
    """A number per key-value head [layer, (batch,) kv_head], for each row of b_D."""
    rows = bias.b_D.shape[-2]
    if not bias.fingerprint.layers_differ or rows != bias.n_heads:
        return factor.repeat_interleave(rows // factor.shape[-1], dim=-1)
    sizes = zip(factor, bias.fingerprint.heads, strict=True)
    return padded([x[..., :n_kv].repeat_interleave(n // n_kv, dim=-1) for x, (n, n_kv, *_) in sizes])


def _check_same_kind(first: Any, other: Any) -> None:
    other.fingerprint.check(first.fingerprint, "combine", whose="the first bias")
    if other.b_KV.dtype != first.b_KV.dtype:
        raise KVLensError(f"combine: dtypes differ: {first.b_KV.dtype} and {other.b_KV.dtype}; bias.to(dtype) converts")
    if first.features is not None:
        _check_same_features(first, other)
    elif other.b_KV.shape != first.b_KV.shape:
        raise KVLensError(f"combine: batch shapes differ: {list(first.b_KV.shape)} and {list(other.b_KV.shape)}")


def _check_same_features(first: Any, other: Any) -> None:
    a, b = first.features, other.features
    if a.kind != b.kind:
        raise KVLensError(
            f"combine: one bias has {a.kind} features, the other {b.kind}, so they cannot be added; convert both prompts "
            "with the same method"
        )
    if not a.per_prompt and not same_features(a, b):
        raise KVLensError(f"combine: the {a.kind} features differ (another seed or number of features): use the same for both")
    if first.batch_size != other.batch_size:
        raise KVLensError(f"combine: batch shapes differ: {first.batch_size} prompts and {other.batch_size}")


def _check_equal_boundaries(first: Any, other: Any) -> None:
    for name in SHIFT_STATE:
        if not torch.equal(getattr(first, name), getattr(other, name)):
            raise KVLensError(
                f"combine: the shift states differ ({name}); shift_state='last' takes the last bias's, as a + b does"
            )


def _check_equal_offsets(first: Any, other: Any, weights: Sequence[float | int]) -> None:
    if first.starts_where(other):
        return
    differ = (
        f"the position offsets differ ({first.position_offset} and {other.position_offset}), so the text would start at "
        "different positions"
    )
    if list(weights) == [1.0, -1.0]:
        raise KVLensError(
            f"subtracting KV biases: {differ}; kvlens.combine(a, b, weights=[1, -1], shift_state='first') subtracts b and uses "
            "a's offset. Convert prompts of equal length where a - b is to be read"
        )
    raise KVLensError(
        f"adding KV biases: {differ}; kvlens.combine(a, b, shift_state='last') uses the last one's offset. To read one prompt "
        "after another, use convert_prompt(model, b, initial=bias_of_a)"
    )


def fields_of_layer(bias: Any, layer: int) -> dict[str, Any]:
    """The fields of one layer, without what fills it up to the size of larger ones."""
    f, tensors = bias.fingerprint.of_layer(layer), dict[str, Any]()
    by_query_head = bias.b_KV.shape[-3] == bias.n_heads
    heads, d_phi = f.n_heads if by_query_head else f.n_kv_heads, f.d_phi or bias.d_phi
    tensors["b_KV"], tensors["b_D"] = bias.b_KV[..., :heads, :d_phi, : f.d_head], bias.b_D[..., :heads, :d_phi]
    tensors["last_q"] = bias.last_q[..., : f.n_heads, : f.d_head]
    tensors |= {name: getattr(bias, name)[..., : f.n_kv_heads, : f.d_head] for name in ("last_k", "last_v")}
    if bias.features is not None:
        tensors["log_scale"] = bias.log_scale[..., : f.n_kv_heads]
    fields = {name: tensor[layer : layer + 1] for name, tensor in tensors.items()}
    if isinstance(bias.features, VirtualKeys):
        keys = bias.features.keys[layer : layer + 1, ..., : f.n_kv_heads, :, : f.d_key or f.d_head]
        fields["features"] = VirtualKeys(keys, bias.features.distance[layer : layer + 1, ..., : f.n_kv_heads, :])
    elif bias.features is not None:
        fields["features"] = bias.features.map(lambda x: x[layer : layer + 1])
    return {**fields, "fingerprint": f, "recurrent": NO_STATES}


def fields_of_selection(bias: Any, layers: Sequence[int], heads: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """The fields with b_KV and b_D of the union of layers and (layer, head) pairs, by query head; zeros elsewhere.

    Raises:
        KVLensError: a layer or head that does not exist.
    """
    n_heads = [bias.n_heads_of(layer) for layer in range(bias.n_layers)]
    whole = bias.padded().per_query_head()
    kept = whole.b_KV.new_zeros(bias.n_layers, max(n_heads))
    for layer in layers:
        layer = _index("layer", layer, bias.n_layers)
        kept[layer, : n_heads[layer]] = 1
    for layer, head in heads:
        layer = _index("layer", layer, bias.n_layers)
        kept[layer, _index("head", head, n_heads[layer])] = 1
    n_kept, n_all, n_states = int(kept.count_nonzero()), sum(n_heads), bias.recurrent.n_heads
    of_states = [kept[layer, (first := bias.first_state_head(layer)) : first + n_states] for layer in bias.recurrent.layers]
    keep = kept[list(bias.attention_layers), : bias.n_heads]
    keep = keep if bias.batch_size is None else keep[:, None]
    return {
        "fit": bias.fit if n_kept == n_all else since(bias.fit, f"{n_kept} of {n_all} heads selected"),
        "features": whole.features,
        "b_KV": whole.b_KV * keep[..., None, None],
        "b_D": whole.b_D * keep[..., None],
        "recurrent": bias.recurrent.select(of_states),
    }


def _index(what: str, index: int, n: int) -> int:
    if not -n <= index < n:
        raise KVLensError(f"select: {what} {index} does not exist; there are {n}")
    return index


KEY_AXES = {"b_KV": -2, "b_D": -1, "features.keys": -2, "features.distance": -1}
"""Tensors with an axis of virtual keys, and which it is."""


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
    for name, axis in KEY_AXES.items():
        x = tensors[name]
        shape = list(x.shape)
        shape[axis] = more
        tensors[name] = torch.cat([x, x.new_ones(shape) if name == "features.distance" else x.new_zeros(shape)], dim=axis)
    return tensors
