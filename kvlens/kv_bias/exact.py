"""The exact bias of a prompt with softmax attention, which keeps every key; and what it is made of.

Attention over it is softmax attention over the prompt (r = M, weight 1). Conversion approximates it by fewer keys or by
features (:mod:`kvlens.conversion.prompt_pass`), and the bridge is compared with Transformers under it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.fields import Fingerprint
from kvlens.kv_bias.kv_bias import KVBias
from kvlens.kv_bias.layers import Keys, Layer


@dataclass(frozen=True, eq=False)
class PromptBatch:
    """Tokens of the prompt(s), which of them are read, and whether the caller gave a batch.

    Attributes:
        mask: True at tokens that are read; None if all are. The others are padding, or deleted in a counterfactual prompt.
        has_batch: whether the bias gets a batch axis.
        n_places: how many positions are taken up, where tokens that are not read take up theirs; None: as many as are read.
        places: then the position of each token, where those that are not read were left out; None: as they stand.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None
    has_batch: bool
    n_places: int | None = None
    places: Int[Tensor, "batch pos"] | None = None

    @property
    def keeps_positions(self) -> bool:
        """Whether tokens that are not read still take up positions."""
        return self.n_places is not None

    def lengths(self) -> int | Int[Tensor, " batch"]:
        """The number of tokens that are read: an int, or one per row if rows differ."""
        if self.mask is None:
            return self.tokens.shape[1]
        lengths = self.mask.sum(dim=1)
        return int(lengths[0]) if bool((lengths == lengths[0]).all()) else lengths

    def n_positions(self) -> int | Int[Tensor, " batch"]:
        """The number of positions that the prompt takes up: one for each token that is read, or for every token."""
        return self.lengths() if self.n_places is None else self.n_places


class PromptReading(NamedTuple):
    """What one pass over a prompt leaves for conversion; each list has the layers with attention, in order.

    Attributes:
        keys: as scored.
        values: at the same positions.
        residual: the residual stream after the last layer.
        queries: as scored, of each layer; None unless they were asked for.
        shift_state: raw last rows of the projections that are shifted, by "k", "v" and "q".
        recurrent: by its number, what each recurrent layer keeps, including the effect of the bias that the prompt continues.
    """

    keys: Sequence[Float[Tensor, "batch kv_head pos d_key"]]
    values: Sequence[Float[Tensor, "batch kv_head pos d_head"]]
    residual: Float[Tensor, "batch pos d_model"]
    queries: list[Float[Tensor, "batch pos head d_key"]] | None = None
    shift_state: Mapping[str, Sequence[Float[Tensor, "batch window head d_head"]]] = {}
    recurrent: Mapping[int, Layer] = {}


def exact_bias(reading: PromptReading, prompt: PromptBatch, old: KVBias | None, fingerprint: Fingerprint) -> KVBias:
    """The bias of a prompt alone, with a batch axis; states of recurrent layers cover the prompt and everything before it.

    Args:
        reading: of the pass over the prompt.
        prompt: the prompt; positions that are not read get weight 0.
        old: the bias that the prompt continues; its positions come first.
        fingerprint: fingerprint of the model.
    """
    batch, n_pos = prompt.tokens.shape
    lengths = torch.as_tensor(prompt.n_positions(), device=prompt.tokens.device).expand(batch)
    places = torch.arange(n_pos, device=prompt.tokens.device) if prompt.places is None else prompt.places
    distance = lengths[:, None] - places
    layers = [Layer() for _ in range(fingerprint.n_layers)]
    for i, (layer, keys, values) in enumerate(zip(fingerprint.attention_layers, reading.keys, reading.values, strict=True)):
        weight = torch.ones(batch, n_pos, device=keys.device) if prompt.mask is None else prompt.mask
        on = weight[:, None, :].to(keys).expand(keys.shape[:-1])
        features = VirtualKeys(keys, distance.clamp(min=1)[:, None].expand(keys.shape[:-1]).clone())
        part = Keys(values * on[..., None], on.clone(), keys.new_zeros(keys.shape[:2]), features)
        last = {x: of_layers[i] for x, of_layers in reading.shift_state.items()}
        layers[layer] = Layer.of_keys(part, fingerprint.heads[layer][0], last)
    for layer, kept in reading.recurrent.items():
        layers[layer] = Layer((*layers[layer].parts, *kept.parts), {**layers[layer].last, **kept.last})
    offset = prompt.n_positions() + (0 if old is None else old.position_offset)
    return KVBias(tuple(layers), prompt.lengths(), offset, fingerprint, record=None)
