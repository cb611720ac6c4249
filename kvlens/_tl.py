"""Every name that kvlens takes from TransformerLens, in one place.

TransformerLens 4 removed ``HookedTransformer`` and its components. If it is installed, the names below are placeholder classes
that can be referenced and subclassed but not instantiated (:mod:`kvlens._tl4`): :class:`kvlens.KVTransformerBridge`, conversion
and biases work, and ``HookedKVTransformer`` raises an error that says what it needs. Importing TransformerLens takes seconds,
so ``kvlens/__init__`` and the command line import it only when needed.
"""

import contextlib
import warnings
from collections.abc import Iterator

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
    sample_logits,
)
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES
from transformer_lens.weight_processing import ProcessWeights

try:
    import transformer_lens.loading_from_pretrained as loading
    from transformer_lens import HookedTransformer, HookedTransformerConfig
    from transformer_lens.components import (
        MLP,
        AbstractAttention,
        Attention,
        GatedMLP,
        GroupedQueryAttention,
        LayerNorm,
        LayerNormPre,
        PosEmbed,
        TransformerBlock,
        Unembed,
    )
    from transformer_lens.HookedTransformer import Output

    def check_release() -> None:
        """Raise KVLensError if the installed release of TransformerLens has no HookedTransformer; this one has it."""

except ImportError:  # TransformerLens 4
    from kvlens._tl4 import (
        MLP,
        AbstractAttention,
        Attention,
        GatedMLP,
        GroupedQueryAttention,
        HookedTransformer,
        HookedTransformerConfig,
        LayerNorm,
        LayerNormPre,
        Output,
        PosEmbed,
        TransformerBlock,
        Unembed,
        check_release,
        loading,
    )

__all__ = [
    "MLP",
    "POST_NORM_ARCHITECTURES",
    "SUPPORTED_ACTIVATIONS",
    "USE_DEFAULT_VALUE",
    "AbstractAttention",
    "ActivationCache",
    "Attention",
    "GatedMLP",
    "GroupedQueryAttention",
    "HookPoint",
    "HookedTransformer",
    "HookedTransformerConfig",
    "LayerNorm",
    "LayerNormPre",
    "Output",
    "PosEmbed",
    "ProcessWeights",
    "Slice",
    "TransformerBlock",
    "TransformerLensKeyValueCache",
    "TransformerLensKeyValueCacheEntry",
    "Unembed",
    "check_release",
    "get_attention_mask",
    "get_device_for_block_index",
    "get_offset_position_ids",
    "loading",
    "sample_logits",
    "without_deprecation_warning",
]


@contextlib.contextmanager
def without_deprecation_warning() -> Iterator[None]:
    """Silence TransformerLens' deprecation of HookedTransformer, and nothing else: kvlens pins the release that has it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer", category=DeprecationWarning)
        yield
