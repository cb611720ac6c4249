"""Hooked modules: they hold parameters and hook points and call :mod:`kvlens.ops`, which has the mathematics.

Hook points on every ``blocks.{layer}.attn``, in addition to the base's, which keep their meaning (``hook_k``, ``hook_v`` are the
raw projections). The hook point of a feature that is off does not fire: with everything off, a cache has exactly TransformerLens'
keys. In a cache, use the full name (``cache["blocks.0.attn.hook_phi_q"]``) or the layer type (``cache["phi_q", 0, "attn"]``).

| hook point | shape | content |
|---|---|---|
| ``hook_k_shift_coef``, ``hook_v_shift_coef``, ``hook_q_shift_coef`` | [kv_head or head, window+1] | the coefficients as used: 0 of the token itself, j of the token j before it |
| ``hook_k_shifted``, ``hook_v_shifted``, ``hook_q_shifted`` | [batch, pos, kv_head or head, d_head] | after the shift, before RoPE |
| ``hook_phi_q``, ``hook_phi_k`` | [batch, pos, head or kv_head, d_phi] | features; ``hook_rot_q``, ``hook_rot_k`` hold the rotated ones |
| ``hook_b_kv``, ``hook_b_d`` | [batch or 1, head, d_phi(, d_head)] | the bias as read, at every pass and decoding step; by query head, even with grouped keys. For softmax times exp(``log_scale``): the numbers of one bias can be put into another |
| ``hook_b_keys`` | [batch or 1, head, key, d_head] | softmax: the virtual keys as read, likewise by query head. With ``hook_b_kv`` and ``hook_b_d`` they are the whole bias: patch all three (to ablate a head, zeros in those two are enough without a KV shift), and with a KV shift the last rows, too |
| ``hook_last_k``, ``hook_last_v``, ``hook_last_q`` | [batch or 1, window, kv_head or head, d_head] | the shift state as read |
| ``hook_normalizer`` | [batch, pos, head] | phi(q).D, bias included; for softmax with a bias, the logarithm of the normalizer |
| ``hook_z_context``, ``hook_z_bias`` | [batch, pos, head, d_head] | the two summands of ``hook_z`` |
| ``hook_pattern`` (the base's), with a bias | [batch, head, pos, pos] | the text's columns alone, over the normalizer of text *and* bias: after a long prompt a row may sum to 0.002. For softmax, what it lacks to 1 is the share of the bias. The whole rows, with a column per prompt token, are ``hook_pattern`` in a pass over prompt and text without a bias |

For linear attention ``hook_attn_scores`` and ``hook_pattern`` hold the implied scores and pattern, computed only when hooked.
"""  # noqa: E501

from kvlens.components.attention import KVAttention
from kvlens.components.block import KVBlock, OffsetPosEmbed, SinusoidalPosEmbed
from kvlens.components.decode_cache import LinearCacheEntry, ShiftedCacheEntry, upgrade_cache
from kvlens.components.feature_maps import FEATURE_MAPS, FeatureMap, per_head
from kvlens.components.heads import counted_by, hidden_tokens_keep_positions, is_hooked
from kvlens.components.layer_bias import LayerBias, Normalizers, Remembered, check_batch, shown
from kvlens.components.softmax_attention import runs_fused

__all__ = [
    "FEATURE_MAPS",
    "FeatureMap",
    "KVAttention",
    "KVBlock",
    "LayerBias",
    "LinearCacheEntry",
    "Normalizers",
    "OffsetPosEmbed",
    "Remembered",
    "ShiftedCacheEntry",
    "SinusoidalPosEmbed",
    "check_batch",
    "counted_by",
    "hidden_tokens_keep_positions",
    "is_hooked",
    "per_head",
    "runs_fused",
    "shown",
    "upgrade_cache",
]
