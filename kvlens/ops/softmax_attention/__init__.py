"""Softmax attention with its normalizer, and a KV bias merged into it in log space (what its forms share: ``types``)."""

from kvlens.ops.softmax_attention.beside import KeysBeside, attend_beside, fused_beside
from kvlens.ops.softmax_attention.bias import join_bias, naive_join_bias
from kvlens.ops.softmax_attention.fused import fused_softmax_attention
from kvlens.ops.softmax_attention.grouped import by_kv_head
from kvlens.ops.softmax_attention.naive import naive_softmax_attention
from kvlens.ops.softmax_attention.types import JoinedBias, ScaledFeatures, ScaledMass, SoftmaxAttentionOutput
from kvlens.ops.softmax_attention.visible import visible_keys

__all__ = [
    "JoinedBias",
    "KeysBeside",
    "ScaledFeatures",
    "ScaledMass",
    "SoftmaxAttentionOutput",
    "attend_beside",
    "by_kv_head",
    "fused_beside",
    "fused_softmax_attention",
    "join_bias",
    "naive_join_bias",
    "naive_softmax_attention",
    "visible_keys",
]
