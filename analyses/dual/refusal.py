"""The check, shared by the analyses of this package, that a model's attention has a dual model."""

from kvlens import HookedKVTransformer
from kvlens.dual import check_attention


def has_dual_model(model: HookedKVTransformer) -> None:
    """For ``Analysis.check_model``: raise KVLensError for an attention without a known dual model."""
    check_attention(model, 1)
