"""The hooked model, its configuration, loading and saving."""

from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.regressor import HookedKVRegressor
from kvlens.model.transformer import HookedKVTransformer

__all__ = ["HookedKVRegressor", "HookedKVTransformer", "HookedKVTransformerConfig", "KVShiftConfig"]
