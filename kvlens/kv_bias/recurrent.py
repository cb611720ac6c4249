"""The recurrent layers of a hybrid model in a bias: their states, and the inputs of their short convolutions.

A recurrent layer keeps the prompt in one matrix per value head (:mod:`kvlens.mixers`), which is that head's b_KV. Its shape
differs from that of an attention layer's keys and values, so a :class:`~kvlens.KVBias` stores the two kinds separately.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.errors import KVLensError, brief

TENSORS = ("b_KV", "conv")


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
        return {name: getattr(self, name) for name in TENSORS} if self.layers else {}

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
    if set(tensors) != set(TENSORS) or not listed:
        raise KVLensError(
            f"KVBias.load: recurrent layers are a list of numbers and hold {', '.join(TENSORS)}; the file has {brief(layers)} "
            f"and {', '.join(sorted(tensors))}"
        )
    return RecurrentStates(tuple(layers), tensors["b_KV"], tensors["conv"])
