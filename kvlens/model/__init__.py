"""The model class: a HookedTransformer whose attention may be linear, shifted, and biased by a converted prompt."""

from kvlens.model.config import HookedKVTransformerConfig, KVShiftConfig
from kvlens.model.transformer import HookedKVTransformer

__all__ = ["HookedKVTransformer", "HookedKVTransformerConfig", "KVShiftConfig"]
