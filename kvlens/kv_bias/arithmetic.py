"""Sums of biases, layer by layer.

b_kv and b_d are sums over tokens, so they add; a shift state is not a sum, so one must be chosen.

These functions do not import :class:`kvlens.KVBias`, which depends on this module.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.kv_bias.features import same_features
from kvlens.kv_bias.layers import Features, Keys, Layer, all_finite


def summed(
    biases: Sequence[Any], weights: Sequence[float | int], shift_state: str, equal_offsets: bool = False
) -> tuple[Layer, ...]:
    """The layers of the weighted sum of ``biases`` (KVBias objects, at least one).

    Args:
        biases: on one device.
        weights: one per bias.
        shift_state: "equal", "first", "last" or "zero", as in :meth:`kvlens.KVBias.combine`.
        equal_offsets: raise an error if position offsets differ, even if ``shift_state`` chooses a bias.

    Raises:
        KVLensError: different models, dtypes or batch shapes; shift states or offsets differ and none was chosen.
    """
    for other in biases[1:]:
        _check_same_kind(biases[0], other)
        if shift_state == "equal":
            _check_equal_boundaries(biases[0], other)
        if equal_offsets or shift_state in ("equal", "zero"):
            _check_equal_offsets(biases[0], other, weights)
    sums = [_sum_of_layers(layers, weights, shift_state) for layers in zip(*(bias.layers for bias in biases), strict=True)]
    check_held("combine: the sum", sums, biases)
    return tuple(sums)


def _sum_of_layers(layers: Sequence[Layer], weights: Sequence[float | int], shift_state: str) -> Layer:
    terms = [(layer if w == 1 else layer.times(float(w))).parts for w, layer in zip(weights, layers, strict=True)]
    last: Mapping[str, Tensor] = layers[-1 if shift_state == "last" else 0].last
    if shift_state == "zero":
        last = {name: torch.zeros_like(x) for name, x in last.items()}
    return Layer(tuple(type(parts[0]).total(parts) for parts in zip(*terms, strict=True)), last)


def tokens_left(biases: Sequence[Any], weights: Sequence[float | int]) -> Any:
    """Tokens added minus tokens subtracted, so that exchanging a head of one prompt for that of another keeps their number.

    A factor does not change how many tokens a bias stands for, whatever its sign.
    """
    if len(biases) == 1:
        return biases[0].n_prompt_tokens
    left = sum(((w > 0) - (w < 0)) * b.n_prompt_tokens for w, b in zip(weights, biases, strict=True))
    return left.clamp(min=0) if isinstance(left, torch.Tensor) else max(left, 0)


def sum_in_words(biases: Sequence[Any], weights: Sequence[float | int]) -> str:
    """The step of a record of a sum."""
    kinds = (f"{w:.3g} times {'an exact bias' if b.fit is None else 'one'}" for w, b in zip(weights, biases, strict=True))
    return f"summed: {', '.join(kinds)}" if len(biases) < 5 else f"sum of {len(biases)}"


def check_held(what: str, new: Sequence[Layer], biases: Sequence[Any]) -> None:
    """Raise KVLensError for numbers of sums that became infinite."""
    if all_finite(x for layer in new for part in layer.parts for x in (part.b_kv, part.b_d) if x is not None):
        return
    for i, layer in enumerate(new):
        for name, x in layer.tensors().items():
            if not _finite(x) and all(_finite(bias.layers[i].tensors()[name]) for bias in biases):
                dtype = str(x.dtype).removeprefix("torch.")
                raise KVLensError(f"{what} has numbers in {name} of layer {i} that overflow {dtype}: use smaller factors")


def _finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())


def _check_same_kind(first: Any, other: Any) -> None:
    other.fingerprint.check(first.fingerprint, "combine", whose="the first bias")
    for name, what_to_do in (
        ("dtype", "bias.to(dtype) converts"),
        ("kind", "convert both prompts with the same method"),
        ("batch_size", "select_prompt and repeat make them equal"),
    ):
        a, b = getattr(first, name), getattr(other, name)
        if a != b:
            raise KVLensError(f"combine: {name} differs: {a} and {b}; {what_to_do}")
    if not all(map(_same_features, first.attention, other.attention)):
        raise KVLensError(f"combine: the {first.kind} features differ (another seed or number): use the same for both")


def _same_features(a: Any, b: Any) -> bool:
    return isinstance(a, Keys) or not isinstance(a, Features) or same_features(a.features, b.features)


def _check_equal_boundaries(first: Any, other: Any) -> None:
    for a, b in zip(first.layers, other.layers, strict=True):
        for name, rows in a.last.items():
            if not torch.equal(rows, b.last[name]):
                what = "conv, the convolution's inputs, differs" if name == "conv" else f"the shift states differ (last_{name})"
                raise KVLensError(f"combine: {what}; shift_state='last' takes the last bias's, as a + b does")


def _check_equal_offsets(first: Any, other: Any, weights: Sequence[float | int]) -> None:
    if first.starts_where(other):
        return
    differ = (
        f"the position offsets differ ({first.position_offset} and {other.position_offset}), so the text would start at "
        "different positions"
    )
    do = (
        f"adding KV biases: {differ}; kvlens.combine(a, b, shift_state='last') uses the last one's offset. To read one prompt "
        "after another, use convert_prompt(model, b, initial=bias_of_a)"
    )
    if list(weights) == [1.0, -1.0]:
        do = (
            f"subtracting KV biases: {differ}; kvlens.combine(a, b, weights=[1, -1], shift_state='first') subtracts b and uses "
            "a's offset. Convert prompts of equal length where a - b is to be read"
        )
    raise KVLensError(do)
