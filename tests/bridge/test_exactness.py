"""A converted prompt is as exact as Transformers' own cache, cut and continued: over several texts for each family."""

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS, N_PROMPT, PROMPT, TEXT, in_float64
from exactness import excess, measure, plain_and_bridge, relative_error
from tiny_hf import PURELY_RECURRENT, tiny_hf_model

from kvlens import convert_prompt

DENSE = ("bamba", "gemma3", "gpt2", "llama", "olmo_hybrid", "qwen3_5")


@pytest.mark.parametrize("family", [*FAMILIES, *LIKE_THE_OTHERS])
@torch.no_grad()
def test_as_exact_as_transformers_own_cache(family, bridge_of):
    """Padded left and right, prompts of unequal length; test_bridge.py holds each of FAMILIES without padding."""
    plain = tiny_hf_model(family)
    errors = [measure(plain, bridge_of(family), seed, padded=True) for seed in range(2)]
    assert excess(errors, torch.float32) <= 1


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_as_exact_in_half_precision(family):
    models = plain_and_bridge(family, 0, torch.bfloat16)
    assert excess([measure(*models, seed, padded=True) for seed in range(3)], torch.bfloat16) <= 1


@pytest.mark.parametrize("family", [*FAMILIES, *PURELY_RECURRENT])
def test_gradients_are_as_exact_as_those_of_one_pass(family, bridge_of):
    """Of a sum of squared logits by every embedding, through a converted prompt and through one pass, against float64."""
    plain, exact, model = tiny_hf_model(family), in_float64(tiny_hf_model(family)), bridge_of(family)
    whole = torch.cat([PROMPT, TEXT], dim=1)

    def gradient(held, logits):
        logits.square().sum().backward()
        found = held.get_input_embeddings().weight.grad.double()
        held.zero_grad()
        return [found]

    expected = gradient(exact, exact(whole).logits[:, N_PROMPT:])
    theirs = relative_error(gradient(plain, plain(whole).logits[:, N_PROMPT:]), expected)
    with model.kv_bias(convert_prompt(model, PROMPT, detach=False)):
        ours = relative_error(gradient(model.original_model, model(TEXT)), expected)
    # two orders of the same sums round alike, by more or less in each model; a path that is missing leaves off 10 % or more
    assert ours <= max(3 * theirs, 16 * torch.finfo(torch.float32).eps)  # some of theirs hardly round
