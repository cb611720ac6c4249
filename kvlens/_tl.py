"""What kvlens takes from TransformerLens beside :mod:`kvlens.base`, in one place.

Importing TransformerLens takes seconds, so ``kvlens/__init__`` and the command line import it only when needed.
"""

from transformer_lens import ActivationCache
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import (
    SUPPORTED_ACTIVATIONS,
    USE_DEFAULT_VALUE,
    Slice,
    get_attention_mask,
    get_device_for_block_index,
    get_offset_position_ids,
)
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformer_lens.weight_processing import ProcessWeights

__all__ = [
    "POST_NORM_ARCHITECTURES",
    "SUPPORTED_ACTIVATIONS",
    "USE_DEFAULT_VALUE",
    "ActivationCache",
    "HookPoint",
    "ProcessWeights",
    "Slice",
    "TransformerLensKeyValueCache",
    "TransformerLensKeyValueCacheEntry",
    "get_attention_mask",
    "get_device_for_block_index",
    "get_offset_position_ids",
]
