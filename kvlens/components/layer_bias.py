"""One layer's share of a KV bias, as its attention reads it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.kv_bias import KVBias


class LayerBias(NamedTuple):
    """b_KV, b_D and the shift boundary of one layer. The leading axis is the batch of prompts, 1 for a single prompt."""

    b_kv: Float[Tensor, "batch head d_phi d_head"]
    b_d: Float[Tensor, "batch head d_phi"]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]

    @classmethod
    def of(cls, bias: KVBias, layer: int, device: torch.device) -> "LayerBias":
        """Views of ``bias``, so that one in training is read as it is now; they are moved when they are read."""
        offset = bias.position_offset
        tensors = (bias.b_KV, bias.b_D, bias.last_k, bias.last_v, bias.last_q)
        b_kv, b_d, last_k, last_v, last_q = (t[layer] if bias.batch_size is not None else t[layer][None] for t in tensors)
        return cls(b_kv, b_d, last_k, last_v, last_q, offset.to(device) if isinstance(offset, Tensor) else offset)
