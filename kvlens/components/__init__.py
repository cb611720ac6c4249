"""Hooked modules: they hold parameters and hook points and call :mod:`kvlens.ops`; no mathematics of their own."""

from kvlens.components.attention import build_attention
from kvlens.components.block import KVBlock, KVUnembed
from kvlens.components.decode_cache import LinearCacheEntry, ShiftedCacheEntry, upgrade_cache
from kvlens.components.kv_shift import KVLENS_HOOKS
from kvlens.components.layer_bias import LayerBias
from kvlens.components.linear_attention import GroupedLinearAttention, LinearAttention
from kvlens.components.pos_embed import NoPosEmbed, OffsetPosEmbed, SinusoidalPosEmbed
from kvlens.components.softmax_attention import GroupedSoftmaxAttention, SoftmaxAttention

__all__ = [
    "KVLENS_HOOKS",
    "GroupedLinearAttention",
    "GroupedSoftmaxAttention",
    "KVBlock",
    "KVUnembed",
    "LayerBias",
    "LinearAttention",
    "LinearCacheEntry",
    "NoPosEmbed",
    "OffsetPosEmbed",
    "ShiftedCacheEntry",
    "SinusoidalPosEmbed",
    "SoftmaxAttention",
    "build_attention",
    "upgrade_cache",
]
