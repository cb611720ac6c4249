"""Softmax attention with its normalizer, and a KV bias merged into it in log space (``types`` says what its forms share)."""

from kvlens.checks import doors
from kvlens.ops.softmax_attention.bias import join_bias, naive_join_bias
from kvlens.ops.softmax_attention.extra_keys import ExtraKeys, attend_with_extra_keys, merge_extra_keys
from kvlens.ops.softmax_attention.fused import fused_softmax_attention
from kvlens.ops.softmax_attention.grouped import by_kv_head
from kvlens.ops.softmax_attention.naive import naive_softmax_attention
from kvlens.ops.softmax_attention.types import JoinedBias, ScaledFeatures, ScaledMass, SoftmaxAttentionOutput
from kvlens.ops.softmax_attention.visible import visible_keys

__all__ = [
    "ExtraKeys",
    "JoinedBias",
    "ScaledFeatures",
    "ScaledMass",
    "SoftmaxAttentionOutput",
    "attend_with_extra_keys",
    "by_kv_head",
    "fused_softmax_attention",
    "join_bias",
    "merge_extra_keys",
    "naive_join_bias",
    "naive_softmax_attention",
    "visible_keys",
]

doors(__name__)
