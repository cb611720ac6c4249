"""One layer's share of a KV bias, as its attention reads it."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.kv_bias import KVBias
from kvlens.ops.softmax_attention import ScaledFeatures


class LayerBias(NamedTuple):
    """b_KV, b_D and the shift boundary of one layer. The leading axis is the batch of prompts, 1 for a single prompt.

    ``features`` gives the features of queries [batch, pos, head, d_head] under a scale that divides the scores: the feature
    map that a softmax bias brings along (its b_KV and b_D are then one per key-value head). None for linear attention, whose
    feature map is the model's own.
    """

    b_kv: Float[Tensor, "batch head d_phi d_head"]
    b_d: Float[Tensor, "batch head d_phi"]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]
    features: Callable[[Tensor, float], ScaledFeatures] | None = None

    @classmethod
    def of(cls, bias: KVBias, layer: int, device: torch.device) -> "LayerBias":
        """Views of ``bias``, so that one in training is read as it is now; they are moved when they are read."""
        offset = bias.position_offset
        tensors = (bias.b_KV, bias.b_D, bias.last_k, bias.last_v, bias.last_q)
        b_kv, b_d, last_k, last_v, last_q = (t[layer] if bias.batch_size is not None else t[layer][None] for t in tensors)
        return cls(b_kv, b_d, last_k, last_v, last_q, offset.to(device) if isinstance(offset, Tensor) else offset)
