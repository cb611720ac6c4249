"""The exact bias of a prompt with softmax attention, which keeps every key; and what it is made of.

Attention over it is softmax attention over the prompt (r = M, weight 1). Conversion approximates it by fewer keys or by
features (:mod:`kvlens.conversion.prompt_pass`), and the bridge is compared with Transformers under it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.kv_bias.features import VirtualKeys
from kvlens.kv_bias.fields import NO_STATES, Fingerprint, RecurrentStates
from kvlens.kv_bias.kv_bias import KVBias
from kvlens.kv_bias.storage import padded


class PromptBatch(NamedTuple):
    """Tokens of the prompt(s), which of them are read, and whether the caller gave a batch.

    Attributes:
        mask: True at tokens that are read; None if all are. The others are padding, or deleted in a counterfactual prompt.
        has_batch: whether the bias gets a batch axis.
        keeps_positions: whether tokens that are not read still take up positions.
    """

    tokens: Int[Tensor, "batch pos"]
    mask: Bool[Tensor, "batch pos"] | None
    has_batch: bool
    keeps_positions: bool = False

    def lengths(self) -> int | Int[Tensor, " batch"]:
        """The number of tokens that are read: an int, or one per row if rows differ."""
        if self.mask is None:
            return self.tokens.shape[1]
        lengths = self.mask.sum(dim=1)
        return int(lengths[0]) if bool((lengths == lengths[0]).all()) else lengths

    def n_positions(self) -> int | Int[Tensor, " batch"]:
        """The number of positions that the prompt takes up: one for each token that is read, or for every token."""
        return self.tokens.shape[1] if self.keeps_positions else self.lengths()


class PromptReading(NamedTuple):
    """What one pass over a prompt leaves for conversion; the layers are those with attention.

    Attributes:
        keys: as scored.
        values: at the same positions.
        residual: the residual stream after the last layer.
        queries: as scored, of each layer; None unless they were asked for.
        shift_state: raw last rows of the projections that are shifted, by "k", "v" and "q".
        recurrent: the states of recurrent layers, including the effect of the bias that the prompt continues.
    """

    keys: Float[Tensor, "layer batch kv_head pos d_key"]
    values: Float[Tensor, "layer batch kv_head pos d_head"]
    residual: Float[Tensor, "batch pos d_model"]
    queries: list[Float[Tensor, "batch pos head d_key"]] | None = None
    shift_state: Mapping[str, Float[Tensor, "layer batch window head d_head"]] = {}
    recurrent: RecurrentStates = NO_STATES


def exact_bias(reading: PromptReading, prompt: PromptBatch, old: KVBias | None, fingerprint: Fingerprint) -> KVBias:
    """The bias of a prompt alone, with a batch axis; states of recurrent layers cover the prompt and everything before it.

    Args:
        reading: of the pass over the prompt.
        prompt: the prompt; positions that are not read get weight 0.
        old: the bias that the prompt continues; its positions come first.
        fingerprint: fingerprint of the model.
    """
    keys, values = reading.keys, reading.values
    n_layers, batch, n_kv_heads, n_pos, d_head = values.shape
    heads = {"k": n_kv_heads, "v": n_kv_heads, "q": fingerprint.n_heads}
    last = {x: reading.shift_state.get(x, values.new_zeros(n_layers, batch, 0, n, d_head)) for x, n in heads.items()}
    lengths = torch.as_tensor(prompt.n_positions(), device=keys.device).expand(batch)
    distance = lengths[:, None] - torch.arange(n_pos, device=keys.device)
    weight = torch.ones(batch, n_pos, device=keys.device) if prompt.mask is None else prompt.mask
    on = weight[:, None, :].to(keys).expand(*keys.shape[:-1])
    if fingerprint.layers_differ:
        alike = fingerprint.n_heads == fingerprint.n_kv_heads  # rows of key-value heads could not be told from query heads'
        sizes = [(n_kv, n // n_kv if alike else 1) for n, n_kv, *_ in fingerprint.heads]
        on, values = (
            padded([x[:, :n].repeat_interleave(group, dim=1) for x, (n, group) in zip(of, sizes, strict=True)])
            for of in (on, values)
        )
    return KVBias(
        b_KV=values * on[..., None],
        b_D=on.clone(),
        last_k=last["k"],
        last_v=last["v"],
        last_q=last["q"],
        n_prompt_tokens=prompt.lengths(),
        position_offset=prompt.n_positions() + (0 if old is None else old.position_offset),
        fingerprint=fingerprint,
        features=VirtualKeys(keys, distance.clamp(min=1)[None, :, None].expand(*keys.shape[:-1]).clone()),
        log_scale=keys.new_zeros(keys.shape[:3]),
        recurrent=reading.recurrent,
    )
