"""A converted prompt is as exact as Transformers' own cache, cut and continued: over several random models of each family."""

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS
from exactness import excess, measure

DENSE = ("bamba", "gemma3", "gpt2", "granite_hybrid", "llama", "olmo_hybrid", "qwen3", "qwen3_5")


@pytest.mark.parametrize("family", [*FAMILIES, *LIKE_THE_OTHERS])
@torch.no_grad()
def test_as_exact_as_transformers_own_cache(family):
    """Padded left and right, prompts of unequal length; test_bridge.py holds one model of each of FAMILIES without padding."""
    errors = [measure(family, seed, torch.float32, padded=True) for seed in range(2)]
    assert excess(errors, torch.float32) <= 1


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_as_exact_in_half_precision(family):
    errors = [measure(family, seed, torch.bfloat16, True) for seed in range(3)]
    assert excess(errors, torch.bfloat16) <= 1
