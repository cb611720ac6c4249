"""The hooked model and its configuration, loading and saving."""

from kvlens.model.attention_variant import AttentionVariantConfig, Augmented, Negative, Regularised, Ridge
from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.protocol import KVModel, ReadsPrompts
from kvlens.model.regressor import HookedKVRegressor
from kvlens.model.streaming import run_in_segments
from kvlens.model.transformer import HookedKVTransformer

__all__ = [
    "AttentionVariantConfig",
    "Augmented",
    "HookedKVRegressor",
    "HookedKVTransformer",
    "HookedKVTransformerConfig",
    "KVModel",
    "KVShiftConfig",
    "Negative",
    "ReadsPrompts",
    "Regularised",
    "Ridge",
    "run_in_segments",
]
