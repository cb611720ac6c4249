"""The parts of a bias that interventions exchange: what a head has, and what belongs to a group of heads or to a whole layer.

A head's *bias* is its b_KV and b_D; of a recurrent layer, the state of a value head. The *shift state* is what tokens just
before the text leave: raw keys, values and queries of a KV shift, which belong to a key-value head, or in a recurrent layer the
inputs of its short convolution, which belong to the layer and not to a head.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias
from kvlens.model import joined_heads

OF_BIAS, OF_SHIFT_STATE = ("b_KV", "b_D"), ("last_k", "last_v", "last_q")
"""The tensors of the attention layers in a bias, and those of the shift state that it carries."""
RECURRENT = "recurrent."
"""In front of the names of a recurrent layer's tensors."""
HEAD = "query head; value head of a recurrent layer"
"""What a column ``head`` holds."""
WHOLE_LAYER = -1
"""In the place of a head: what belongs to a whole layer."""
HEAD_PART, SHIFT_STATE_PART, CONVOLUTION_PART = "head", "shift_state", "convolution"


class Part(NamedTuple):
    """What is exchanged by itself.

    Attributes:
        layer: from 0.
        head: query head, value head of a recurrent layer; key-value head of a shift state; -1 of a convolution.
        kind: ``head``: b_KV and b_D, or the state; ``shift_state``: the raw keys, values and queries that a KV shift carries
            over, of one key-value head; ``convolution``: the inputs of a recurrent layer's short convolution.
    """

    layer: int
    head: int
    kind: str = HEAD_PART

    @property
    def code(self) -> str:
        """As tables and pages write it: ``0.2``, ``0.s2``, ``0.c``."""
        return f"{self.layer}." + {HEAD_PART: f"{self.head}", SHIFT_STATE_PART: f"s{self.head}"}.get(self.kind, "c")

    @property
    def name(self) -> str:
        """As a sentence writes it: ``L0H2``, ``shift state L0KV2``, ``convolution L0``."""
        kinds = {HEAD_PART: f"L{self.layer}H{self.head}", SHIFT_STATE_PART: f"shift state L{self.layer}KV{self.head}"}
        return kinds.get(self.kind, f"convolution L{self.layer}")

    @classmethod
    def of_code(cls, code: str) -> "Part":
        """The part with a :attr:`code`."""
        layer, _, head = code.partition(".")
        if head == "c":
            return cls(int(layer), WHOLE_LAYER, CONVOLUTION_PART)
        return cls(int(layer), int(head.removeprefix("s")), SHIFT_STATE_PART if head[0] == "s" else HEAD_PART)


def tensors_of(bias: KVBias) -> dict[str, Tensor]:
    """Everything that interventions exchange, by name, each with an axis of layers in front."""
    found = {name: getattr(bias, name) for name in OF_BIAS + OF_SHIFT_STATE}
    return found | {RECURRENT + name: tensor for name, tensor in bias.recurrent.tensors().items()}


def with_tensors(bias: KVBias, tensors: Mapping[str, Tensor]) -> KVBias:
    """``bias`` with tensors named as in :func:`tensors_of`."""
    changed: dict[str, Any] = {name: tensor for name, tensor in tensors.items() if not name.startswith(RECURRENT)}
    states: dict[str, Any] = {
        name.removeprefix(RECURRENT): tensor for name, tensor in tensors.items() if name.startswith(RECURRENT)
    }
    return replace(bias, **changed, recurrent=replace(bias.recurrent, **states) if states else bias.recurrent)


def most_heads(bias: KVBias) -> int:
    """Of the layers' numbers of heads the largest, which is how many there are in an intervention."""
    return max(map(bias.n_heads_of, range(bias.n_layers)))


def layers_with_convolution(bias: KVBias) -> tuple[int, ...]:
    """The recurrent layers that keep inputs of a short convolution."""
    return bias.recurrent.layers if bias.recurrent.conv.shape[-2] else ()


def has_shift_state(bias: KVBias) -> bool:
    """Whether the model shifts anything, or has a short convolution."""
    shifted = any(getattr(bias, name).shape[-3] for name in OF_SHIFT_STATE)
    return shifted or bool(layers_with_convolution(bias))


def heads_of(bias: KVBias) -> list[tuple[int, int]]:
    """(layer, head) of every head, in order."""
    return [(layer, head) for layer in range(bias.n_layers) for head in range(bias.n_heads_of(layer))]


def exchangeable(bias: KVBias) -> list[Part]:
    """All that is exchanged by itself, layer by layer: heads, shift states, the inputs of a short convolution."""
    parts = [Part(layer, head) for layer, head in heads_of(bias)]
    if any(getattr(bias, name).shape[-3] for name in OF_SHIFT_STATE):
        parts += [Part(layer, g, SHIFT_STATE_PART) for layer in bias.attention_layers for g in range(bias.n_kv_heads_of(layer))]
    parts += [Part(layer, WHOLE_LAYER, CONVOLUTION_PART) for layer in layers_with_convolution(bias)]
    return sorted(parts, key=lambda part: (part.layer, part.kind != HEAD_PART, part.kind, part.head))


def of_kv_head(bias: KVBias, layer: int, head: int) -> slice:
    """The query heads of a layer that read a key-value head."""
    group = bias.first_state_head(layer) // bias.n_kv_heads_of(layer)
    return slice(head * group, (head + 1) * group)


def kv_heads_read(bias: KVBias) -> Int[Tensor, "layer head"]:
    """The key-value head that each query head of the attention layers reads."""
    groups = [bias.first_state_head(layer) // bias.n_kv_heads_of(layer) for layer in bias.attention_layers]
    read = torch.arange(bias.n_heads) // torch.tensor(groups, dtype=torch.long)[:, None]
    return read.clamp(max=bias.last_k.shape[-2] - 1).to(bias.b_KV.device)


def in_layers(bias: KVBias, of_attention: Tensor, of_recurrent: Tensor) -> list[Tensor]:
    """What the heads of attention layers have and what those of recurrent layers have, in the order of the model's layers.

    A layer without heads has what no head of another layer has. Where a layer has both kinds, rows of numbers of different
    length are padded with zeros.
    """
    rows = {l: x[: bias.first_state_head(l)] for l, x in zip(bias.attention_layers, of_attention, strict=True)}
    for layer, row in zip(bias.recurrent.layers, of_recurrent, strict=True):
        rows[layer] = joined_heads([rows[layer], row], dim=-row.dim()) if layer in rows else row
    none = next(iter(rows.values()))[:0]
    return [rows.get(layer, none) for layer in range(bias.n_layers)]


def indicators(bias: KVBias, parts: list[Part]) -> tuple[Float[Tensor, "part layer head"], Float[Tensor, "part layer head"]]:
    """1 at the bias, and at the shift state, that each part of :func:`exchangeable` is."""
    of_bias = torch.zeros(len(parts), bias.n_layers, most_heads(bias))
    of_shift_state = torch.zeros_like(of_bias)
    for row, (layer, head, kind) in enumerate(parts):
        if kind == HEAD_PART:
            of_bias[row, layer, head] = 1
        elif kind == SHIFT_STATE_PART:
            of_shift_state[row, layer, of_kv_head(bias, layer, head)] = 1
        else:
            of_shift_state[row, layer, bias.first_state_head(layer) :] = 1
    return of_bias.to(bias.b_KV), of_shift_state.to(bias.b_KV)
