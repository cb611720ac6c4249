"""The hooked model and its configuration, loading and saving."""

from kvlens.model.attention_variant import AttentionVariantConfig, Augmented, Negative, Regularised, Ridge
from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.parts import Ends, HeadMatrices, Layer, LinearNorm, Part
from kvlens.model.protocol import KVModel, ReadsPrompts
from kvlens.model.reading import (
    HeadsRead,
    StreamReading,
    direct_path,
    head_hooks,
    head_matrices,
    heads_per_layer,
    joined_heads,
    output_weights,
    read_attention,
    read_stream,
    recurrent_layers,
    visit_heads,
)
from kvlens.model.regressor import HookedKVRegressor
from kvlens.model.streaming import run_in_segments
from kvlens.model.transformer import HookedKVTransformer

__all__ = [
    "AttentionVariantConfig",
    "Augmented",
    "Ends",
    "HeadMatrices",
    "HeadsRead",
    "HookedKVRegressor",
    "HookedKVTransformer",
    "HookedKVTransformerConfig",
    "KVModel",
    "KVShiftConfig",
    "Layer",
    "LinearNorm",
    "Negative",
    "Part",
    "ReadsPrompts",
    "Regularised",
    "Ridge",
    "StreamReading",
    "direct_path",
    "head_hooks",
    "head_matrices",
    "heads_per_layer",
    "joined_heads",
    "output_weights",
    "read_attention",
    "read_stream",
    "recurrent_layers",
    "run_in_segments",
    "visit_heads",
]
