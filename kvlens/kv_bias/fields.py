"""Which model a bias belongs to, and what every field of a bias must be.

**The fingerprint** says which model a bias belongs to: the structure, field by field, and a hash of the weights. A bias is a
sum of one model's keys and values; read by another model it gives plausible but wrong text. Fields are compared one by one so
that the error can name what differs. Dtype and device are not part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvlens.errors import KVLensError, brief
from kvlens.kv_bias.layers import Layer


@dataclass(frozen=True)
class Fingerprint:
    """Everything that a bias depends on.

    ``rest`` holds every other field of the configuration that shapes an activation; ``weights`` is a hash of the parameters
    in float32, weight processing included. ``heads`` is (n_heads, n_kv_heads, d_head, d_phi) of each layer, zeros where it has
    no attention; the fields of these names are the largest, or those of the states of a model without attention. ``d_key`` is
    the size of a key where it is not ``d_head``, as in latent attention.
    """

    attention: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_phi: int
    d_vocab: int
    feature_map: str
    normalizer: str
    attn_scale: float
    positional_embedding_type: str
    rotary_placement: str | None
    decay: str
    kv_shift: str
    heads: tuple[tuple[int, int, int, int], ...]
    rest: str
    weights: str
    d_key: int | None = None

    @cached_property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers with attention."""
        return tuple(layer for layer, (n_heads, *_) in enumerate(self.heads) if n_heads)

    @cached_property
    def layers_differ(self) -> bool:
        """Whether layers with attention differ in their heads."""
        return len({of for of in self.heads if of[0]}) > 1

    def check(self, other: "Fingerprint", what: str, whose: str = "the model") -> None:
        """Raise KVLensError naming the first field in which ``other``, which belongs to ``whose``, differs."""
        for f in fields(self):
            mine, theirs = getattr(self, f.name), getattr(other, f.name)
            if mine != theirs:
                if f.name == "rest":
                    a, b = set(mine.split("; ")), set(theirs.split("; "))
                    mine, theirs = "; ".join(sorted(a - b)), "; ".join(sorted(b - a))
                same_shape = " (same structure, other weights)" if f.name == "weights" else ""
                raise KVLensError(
                    f"{what}: {f.name} differs{same_shape}: {mine!r} for the bias, {theirs!r} for {whose}. A bias fits "
                    "only the model that it was converted with; convert the prompt again with this one."
                )

    @classmethod
    def from_json(cls, written: Mapping[str, object]) -> "Fingerprint":
        """From the fields that :meth:`to_json` wrote, with the lists that JSON has instead of tuples."""
        return cls(**{name: _as_tuples(value) for name, value in written.items()})

    def to_json(self) -> dict[str, object]:
        """The fields as JSON's types."""
        return {**asdict(self), "heads": [list(of) for of in self.heads]}


def _as_tuples(value: object) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


COUNTS = ("n_prompt_tokens", "position_offset")
LAST_POSITION = 2**24
"""Angles are computed in float32, which represents whole numbers exactly up to here."""


def n_rows_of(layers: Sequence[Layer]) -> int:
    """The number of prompts."""
    return len(next(x for layer in layers for x in layer.tensors().values()))


def check_fields(f: Fingerprint, layers: Sequence[Layer], counts: Mapping[str, object], single: bool) -> None:
    """Check every field of a :class:`~kvlens.kv_bias.KVBias`.

    Raises:
        KVLensError: a field has the wrong type or shape; what was expected, and what came.
    """
    if not isinstance(f.heads, tuple) or [len(of) if isinstance(of, tuple) else 0 for of in f.heads] != [4] * f.n_layers:
        raise KVLensError(
            f"KVBias: fingerprint.heads must be four numbers for each layer, [layer={f.n_layers}, 4], got {brief(f.heads)}"
        )
    if len(layers) != f.n_layers or not any(layer.tensors() for layer in layers):
        empty = "" if any(layer.tensors() for layer in layers) else ", all of them empty"
        raise KVLensError(f"KVBias: layers must be those of a model of {f.n_layers} layers, got {len(layers)}{empty}")
    n_rows = n_rows_of(layers)
    for number, layer in enumerate(layers):
        _check_layer(number, layer, f, n_rows)
    if single and n_rows != 1:
        raise KVLensError(f"KVBias: a single prompt has one row, got {n_rows}")
    for name, value in counts.items():
        _check_count(name, value, () if single else (n_rows,))


def _check_layer(number: int, layer: Layer, f: Fingerprint, n_rows: int) -> None:
    part, (n_heads, *_) = layer.attention, f.heads[number]
    features = getattr(part, "features", None)
    if (part is None) != (n_heads == 0) or (part is not None and (features is None) != (f.attention == "linear")):
        kind = f"{f.attention} attention" if n_heads else "no attention"
        raise KVLensError(f"KVBias: layer {number} must have a part of {kind}, got {type(part).__name__}")
    expected = _sizes(layer, f, number)
    for name, tensor in layer.tensors().items():
        shape = (n_rows, *expected.get(name, (None,) * (tensor.dim() - 1)))
        fits = tensor.dim() == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        if not fits or (name != "distance" and not tensor.is_floating_point()):
            sizes = ["_" if n is None else n for n in shape]
            came = f"{list(tensor.shape)} of {tensor.dtype}"
            raise KVLensError(f"KVBias: {name} of layer {number} must be {sizes} of floating-point numbers, got {came}")
    if features is not None and not features.per_prompt:
        features.check(f.heads[number][1], f.d_key or f.d_head)


def _sizes(layer: Layer, f: Fingerprint, number: int) -> dict[str, tuple[int | None, ...]]:
    """What the axes of a layer's tensors, behind that of the prompts, must be; None where any number will do.

    A tensor that is not listed may have any axes: what recurrent layers of another kind leave.
    """
    n_heads, n_kv_heads, d_head, d_phi = f.heads[number]
    part, heads = layer.attention, n_heads
    if part is not None and f.attention != "linear":
        d_phi, heads = part.features.n_features, n_heads if part.n_heads == n_heads else n_kv_heads
    return {
        "b_kv": (heads, d_phi, d_head),
        "b_d": (heads, d_phi),
        "log_scale": (n_kv_heads,),
        "keys": (n_kv_heads, d_phi, f.d_key or d_head),
        "distance": (n_kv_heads, d_phi),
        "last_k": (None, n_kv_heads, d_head),
        "last_v": (None, n_kv_heads, d_head),
        "last_q": (None, n_heads, d_head),
        "state": (None, None, None),
        "conv": (None, None),
    }


def _check_count(name: str, value: object, batch: tuple[int, ...]) -> None:
    """Raise unless ``value`` is a whole number from 0 to LAST_POSITION, or a tensor of one per prompt."""
    wanted = f"a whole number from 0 to {LAST_POSITION}" + (f", or {batch[0]} of them in a tensor" if batch else "")
    if isinstance(value, Tensor):
        fits = tuple(value.shape) == batch and not value.is_floating_point() and value.dtype != torch.bool
        low, high = (int(value.min()), int(value.max())) if fits and value.numel() else (0, 0)
    else:
        low = high = value if isinstance(value, int) and not isinstance(value, bool) else -1
        fits = low >= 0
    if not fits or low < 0 or high > LAST_POSITION:
        raise KVLensError(f"KVBias: {name} must be {wanted}, got {value!r}")
