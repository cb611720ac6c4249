"""Which models have a dual model at all: one check for every analysis of this package."""

from kvlens import HookedKVTransformer
from kvlens.dual import check_attention


def has_dual_model(model: HookedKVTransformer) -> None:
    """For ``Analysis.check_model``: raise KVLensError for an attention that no dual model is known for."""
    check_attention(model, 1)
