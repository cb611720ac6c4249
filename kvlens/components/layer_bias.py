"""One layer's share of a KV bias, as its attention reads it."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.kv_bias import KVBias, SoftmaxFeatures
from kvlens.ops.softmax_attention import ScaledFeatures
from kvlens.ops.softmax_features import ScoreRule


class LayerBias(NamedTuple):
    """b_KV, b_D and the shift boundary of one layer. The leading axis is the batch of prompts, 1 for a single prompt.

    ``features`` is the feature map that a softmax bias brings along, with its ``log_scale`` (b_KV and b_D are then one per
    key-value head, or per query head after single heads were selected). None for linear attention, whose feature map is the
    model's own.
    """

    b_kv: Float[Tensor, "batch head d_phi d_head"]
    b_d: Float[Tensor, "batch head d_phi"]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]
    layer: int = 0
    features: SoftmaxFeatures | None = None
    log_scale: Float[Tensor, "batch kv_head"] | None = None

    @classmethod
    def of(cls, bias: KVBias, layer: int, device: torch.device) -> "LayerBias":
        """Views of ``bias``, so that one in training is read as it is now; they are moved when they are read."""
        offset = bias.position_offset
        tensors = (bias.b_KV, bias.b_D, bias.last_k, bias.last_v, bias.last_q)
        b_kv, b_d, last_k, last_v, last_q = (t[layer] if bias.batch_size is not None else t[layer][None] for t in tensors)
        log_scale = bias.log_scale
        if log_scale is not None:
            log_scale = log_scale[layer] if bias.batch_size is not None else log_scale[layer][None]
        offset = offset.to(device) if isinstance(offset, Tensor) else offset
        return cls(b_kv, b_d, last_k, last_v, last_q, offset, layer, bias.features, log_scale)

    def phi(
        self,
        q: Float[Tensor, "batch pos head d_head"],
        rule: ScoreRule,
        positions: Int[Tensor, "#batch pos"] | None,
        b_kv: Float[Tensor, "#batch some_head d_phi d_head"],
        b_d: Float[Tensor, "#batch some_head d_phi"],
    ) -> ScaledFeatures:
        """Features of the queries, for b_KV and b_D as they are about to be read (after their hooks)."""
        assert self.features is not None
        assert self.log_scale is not None
        return self.features.read(self.layer, q, rule, positions, self.log_scale.to(q), b_kv, b_d)
