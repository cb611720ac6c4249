"""What a bias holds beside its tensors, and what every field must be.

**The fingerprint** says which model a bias belongs to: the structure, field by field, and a hash of the weights. A bias is a
sum of one model's keys and values; read by another model it gives plausible but wrong text. Fields are compared one by one so
that the error can name what differs. Dtype and device are not part of it.

**The recurrent layers** of a hybrid model keep the prompt in one matrix per value head (:mod:`kvlens.mixers`), which is that
head's b_KV, and in the inputs of their short convolutions. Shapes differ from those of an attention layer's keys and values, so
a :class:`~kvlens.KVBias` stores the two kinds separately.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError, brief


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

    def of_layer(self, layer: int) -> "Fingerprint":
        """That of a model of this layer with attention alone, counted among these."""
        own = n_heads, n_kv_heads, d_head, d_phi = self.heads[self.attention_layers[layer]]
        return replace(self, n_layers=1, heads=(own,), n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_head, d_phi=d_phi)

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
    def from_json(cls, written: Mapping[str, Any]) -> "Fingerprint":
        """From the fields that :meth:`to_json` wrote, with the lists that JSON has instead of tuples."""
        return cls(**{name: _as_tuples(value) for name, value in written.items()})

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON's types."""
        return {**asdict(self), "heads": [list(of) for of in self.heads]}


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


STATES = ("b_KV", "conv")


@dataclass(frozen=True, eq=False)
class RecurrentStates:
    """The states that a prompt leaves in the recurrent layers of a model; :data:`NO_STATES` where it has none.

    Attributes:
        layers: indices of the recurrent layers, ascending.
        b_KV: S after the prompt, [recurrent_layer, (batch,) head, d_k, d_v], per value head; a sum over the prompt's tokens.
        conv: raw inputs of the short convolution at the prompt's last tokens, oldest first, [recurrent_layer, (batch,) rows,
            channel]; no rows if a layer has no convolution. Not a sum: like the shift state, it comes from a single prompt. In
            LFM2, whose layers are short convolutions alone, there are no heads, and this is everything.
    """

    layers: tuple[int, ...]
    b_KV: Float[Tensor, "recurrent_layer *batch head d_k d_v"]
    conv: Float[Tensor, "recurrent_layer *batch rows channel"]

    def __post_init__(self) -> None:
        if list(self.layers) != sorted(set(self.layers)) or min(self.layers, default=0) < 0:
            raise KVLensError(f"RecurrentStates: layers must be numbers of layers, ascending, got {brief(self.layers)}")

    @property
    def n_heads(self) -> int:
        """The number of value heads."""
        return self.b_KV.shape[-3]

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name; none where there are no layers."""
        return {name: getattr(self, name) for name in STATES} if self.layers else {}

    def map(self, change: Callable[[Tensor], Tensor]) -> "RecurrentStates":
        """The same with ``change`` applied to every tensor."""
        changed: dict[str, Any] = {name: change(tensor) for name, tensor in self.tensors().items()}
        return replace(self, **changed)

    def check(self, n_layers: int, batch: tuple[int, ...]) -> None:
        """Raise KVLensError unless these belong to a model of ``n_layers`` and a bias with these axes of prompts."""
        lead = (len(self.layers), *batch)
        for name, tensor in self.tensors().items():
            n_more = 3 if name == "b_KV" else 2
            if tuple(tensor.shape[:-n_more]) != lead or tensor.dim() != len(lead) + n_more:
                sizes = "head, d_k, d_v" if name == "b_KV" else "rows, channel"
                axes = ", ".join(map(str, lead))
                raise KVLensError(f"KVBias: recurrent.{name} must be [{axes}, {sizes}], got {list(tensor.shape)}")
        if self.layers and self.layers[-1] >= n_layers:
            raise KVLensError(f"KVBias: recurrent.layers names layer {self.layers[-1]}, and the model has {n_layers}")

    def select(self, keep: Sequence[Float[Tensor, " head"]]) -> "RecurrentStates":
        """b_KV times ``keep`` of each layer; the convolution's inputs are unchanged."""
        kept = [b_kv * of_heads.to(b_kv)[:, None, None] for b_kv, of_heads in zip(self.b_KV, keep, strict=True)]
        return replace(self, b_KV=torch.stack(kept)) if kept else self


NO_STATES = RecurrentStates((), torch.zeros(0, 0, 0, 0), torch.zeros(0, 0, 0))
"""Of a model in which every layer is attention: no layers, no tensors."""


def combined(states: Sequence[RecurrentStates], weights: Sequence[float | int], shift_state: str) -> RecurrentStates:
    """The weighted sum of the states; the convolution's inputs are the first's, the last's, or zeros ("zero").

    Raises:
        KVLensError: with ``shift_state="equal"`` the convolution's inputs differ.
    """
    first = states[0]
    for other in states:
        if shift_state == "equal" and not torch.equal(other.conv, first.conv):
            raise KVLensError(
                "combine: recurrent.conv, the convolution's inputs, differs; shift_state='last' takes the last's, as a + b does"
            )
    conv = torch.zeros_like(first.conv) if shift_state == "zero" else states[-1 if shift_state == "last" else 0].conv
    terms = [weight * state.b_KV for weight, state in zip(weights, states, strict=True)]
    return replace(first, b_KV=torch.stack(terms).sum(dim=0), conv=conv)


def recurrent_from(layers: Any, tensors: Mapping[str, Tensor]) -> RecurrentStates:
    """The states described in a file.

    Raises:
        KVLensError: tensors are missing or of the wrong kind.
    """
    if layers == [] and not tensors:
        return NO_STATES
    listed = isinstance(layers, list) and bool(layers) and all(isinstance(layer, int) for layer in layers)
    if set(tensors) != set(STATES) or not listed:
        raise KVLensError(
            f"KVBias.load: recurrent layers are a list of numbers and hold {', '.join(STATES)}; the file has {brief(layers)} "
            f"and {', '.join(sorted(tensors))}"
        )
    return RecurrentStates(tuple(layers), tensors["b_KV"], tensors["conv"])


TENSORS = ("b_KV", "b_D", "last_k", "last_v", "last_q")
COUNTS = ("n_prompt_tokens", "position_offset")
LAST_POSITION = 2**24
"""Angles are computed in float32, which represents whole numbers exactly up to here."""


def check_fields(bias: Any) -> None:
    """Check every field of a :class:`~kvlens.kv_bias.KVBias`.

    Raises:
        KVLensError: a field has the wrong type or shape; what was expected, and what came.
    """
    f, lead = bias.fingerprint, tuple(bias.b_KV.shape[:-3])
    if not isinstance(f.heads, tuple) or [len(of) if isinstance(of, tuple) else 0 for of in f.heads] != [4] * f.n_layers:
        raise KVLensError(
            f"KVBias: fingerprint.heads must be four numbers for each layer, [layer={f.n_layers}, 4], got {brief(f.heads)}"
        )
    bias.recurrent.check(f.n_layers, lead[1:])
    n_layers = len(bias.attention_layers)
    if len(lead) not in (1, 2) or lead[0] != n_layers:
        raise KVLensError(f"KVBias: b_KV must be [layer={n_layers}, (batch,) head, d_phi, d_head], got {_shape(bias.b_KV)}")
    if (bias.features is None) != (f.attention == "linear") or (bias.features is None) != (bias.log_scale is None):
        raise KVLensError(f"KVBias: features and log_scale are only for softmax attention, but this is {f.attention}")
    heads, d_phi = f.n_heads, f.d_phi
    if bias.features is not None:
        bias.features.check(lead, f.n_kv_heads, f.d_key or f.d_head)
        d_phi = bias.features.n_features
        heads = f.n_heads if bias.b_KV.shape[-3] == f.n_heads else f.n_kv_heads
    expected = {
        "b_KV": (heads, d_phi, f.d_head),
        "b_D": (heads, d_phi),
        "last_k": (bias.last_k.shape[-3], f.n_kv_heads, f.d_head),
        "last_v": (bias.last_v.shape[-3], f.n_kv_heads, f.d_head),
        "last_q": (bias.last_q.shape[-3], f.n_heads, f.d_head),
    }
    if bias.log_scale is not None:
        expected["log_scale"] = (f.n_kv_heads,)
    for name, shape in expected.items():
        tensor = getattr(bias, name)
        if tuple(tensor.shape) != lead + shape:
            raise KVLensError(f"KVBias: {name} must be {list(lead + shape)}, got {_shape(tensor)}")
        if not tensor.is_floating_point():
            raise KVLensError(f"KVBias: {name} must hold floating-point numbers, got {tensor.dtype}")
    for name in COUNTS:
        _check_count(name, getattr(bias, name), lead[1:])


def check_numbers(bias: Any, what: str) -> None:
    """Raise KVLensError, as ``what``, where a number of the bias is NaN or infinite; names the tensor and its layer."""
    for name, tensor in bias.tensors().items():
        if bool(tensor.sum().isfinite()):
            continue  # a quarter of the time of looking at each number; a sum of finite ones can overflow
        if not bool(tensor.isfinite().all()):
            row = int((~tensor.isfinite()).flatten(1).any(dim=1).nonzero()[0])
            layer = (bias.recurrent.layers if name.startswith("recurrent.") else bias.attention_layers)[row]
            raise KVLensError(
                f"{what}: {name} of layer {layer} is not finite ({tensor.dtype}): numbers overflowed in the prompt's pass "
                "(convert it with the model in a wider dtype), or a hook changed them"
            )


def _shape(x: Tensor) -> list[int]:
    return list(x.shape)


def _check_count(name: str, value: Any, batch: tuple[int, ...]) -> None:
    """Raise unless ``value`` is a whole number from 0 to LAST_POSITION, or a tensor of one per prompt."""
    wanted = f"a whole number from 0 to {LAST_POSITION}" + (f", or {batch[0]} of them in a tensor" if batch else "")
    if isinstance(value, Tensor):
        fits = tuple(value.shape) == batch and not value.is_floating_point() and value.dtype != torch.bool
        low, high = (int(value.min()), int(value.max())) if fits and value.numel() else (0, 0)
    else:
        fits = isinstance(value, int) and not isinstance(value, bool)
        low = high = value if fits else 0
    if not fits or low < 0 or high > LAST_POSITION:
        raise KVLensError(f"KVBias: {name} must be {wanted}, got {value!r}")
