"""The parts of a bias that interventions exchange: what a head has, and what belongs to a group of heads or to a whole layer.

A head's *bias* is its b_KV and b_D; of a recurrent layer, the state of a value head. The *shift state* is what tokens just
before the text leave: raw keys, values and queries of a KV shift, which belong to a key-value head, or in a recurrent layer the
inputs of its short convolution, which belong to the layer and not to a head. Parts of two prompts fit into each other
:func:`in_one_space`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVBias, combine
from kvlens.model import joined_heads

OF_BIAS, OF_SHIFT_STATE = ("b_KV", "b_D"), ("last_k", "last_v", "last_q")
"""The tensors of the attention layers in a bias, and those of the shift state that it carries."""
RECURRENT = "recurrent."
"""What the names of a recurrent layer's tensors begin with."""
HEAD = "query head; value head of a recurrent layer"
"""What a column ``head`` holds."""
WHOLE_LAYER = -1
"""What stands in the place of a head where a part belongs to a whole layer."""
HEAD_PART, SHIFT_STATE_PART, CONVOLUTION_PART = "head", "shift_state", "convolution"


class ExchangedPart(NamedTuple):
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
        """The name in tables and pages: ``0.2``, ``0.s2``, ``0.c``."""
        return f"{self.layer}." + {HEAD_PART: f"{self.head}", SHIFT_STATE_PART: f"s{self.head}"}.get(self.kind, "c")

    @property
    def name(self) -> str:
        """The name in a sentence: ``L0H2``, ``shift state L0KV2``, ``convolution L0``."""
        kinds = {HEAD_PART: f"L{self.layer}H{self.head}", SHIFT_STATE_PART: f"shift state L{self.layer}KV{self.head}"}
        return kinds.get(self.kind, f"convolution L{self.layer}")

    @classmethod
    def of_code(cls, code: str) -> "ExchangedPart":
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


def zeros_of(bias: KVBias) -> KVBias:
    """A bias of zeros, as if there had been no prompt and no token before the text, at the same offset."""
    bias = bias.per_query_head()
    return with_tensors(bias, {name: torch.zeros_like(tensor) for name, tensor in tensors_of(bias).items()})


def mean_of(biases: list[KVBias]) -> KVBias:
    """The mean of biases in the same features."""
    together = zip(*(tensors_of(bias).items() for bias in biases), strict=True)
    return with_tensors(biases[0], {of[0][0]: torch.stack([tensor for _, tensor in of]).mean(dim=0) for of in together})


def in_one_space(*biases: KVBias) -> list[KVBias]:
    """Each of several biases in the features of all of them, per query head, so that parts of one fit into another.

    Biases of a linear model share their features already. Those of a softmax model have their own virtual keys. With all keys
    concatenated,

        phi(q) = [phi_a(q); phi_b(q); ...]        b_KV of a = [b_KV_a; 0; ...]        b_KV of b = [0; b_KV_b; ...]

    and b_D likewise, each bias gives the same outputs as before, and sums, means and mixtures of them are biases too. Each
    keeps its shift state, offset and token count.

    Raises:
        KVLensError: biases of different models or with features of different kinds.
    """
    if len(biases) == 1:
        return [biases[0].per_query_head()]
    biases = tuple(bias.padded().per_query_head() for bias in biases)  # compact ones would each leave out the others' keys
    if biases[0].features is None:
        return list(biases)
    alone = torch.eye(len(biases)).tolist()
    kept = (*OF_SHIFT_STATE, "recurrent", "n_prompt_tokens", "position_offset")
    return [
        replace(combine(*biases, weights=weights, shift_state="first"), **{name: getattr(own, name) for name in kept})
        for weights, own in zip(alone, biases, strict=True)
    ]


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


def exchangeable(bias: KVBias) -> list[ExchangedPart]:
    """All that is exchanged by itself, layer by layer: heads, shift states, the inputs of a short convolution."""
    parts = [ExchangedPart(layer, head) for layer, head in heads_of(bias)]
    if any(getattr(bias, name).shape[-3] for name in OF_SHIFT_STATE):
        parts += [
            ExchangedPart(layer, g, SHIFT_STATE_PART)
            for layer in bias.attention_layers
            for g in range(bias.n_kv_heads_of(layer))
        ]
    parts += [ExchangedPart(layer, WHOLE_LAYER, CONVOLUTION_PART) for layer in layers_with_convolution(bias)]
    return sorted(parts, key=lambda part: (part.layer, part.kind != HEAD_PART, part.kind, part.head))


def heads_with(bias: KVBias, part: ExchangedPart) -> range:
    """The heads of a layer that a part is of: one; those that read a key-value head; or those behind a convolution."""
    if part.kind == CONVOLUTION_PART:
        return range(bias.first_state_head(part.layer), bias.n_heads_of(part.layer))
    n = 1 if part.kind == HEAD_PART else bias.first_state_head(part.layer) // bias.n_kv_heads_of(part.layer)
    return range(part.head * n, (part.head + 1) * n)


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
