"""A converted prompt is as exact as Transformers' own cache, cut and continued: over several random models of each family."""

from statistics import mean

import pytest
import torch
from bridge_models import FAMILIES, LIKE_THE_OTHERS, N_PROMPT, PROMPT, PURELY_RECURRENT, TEXT, tiny
from exactness import excess, measure, relative_error

from kvlens import KVTransformerBridge, convert_prompt

DENSE = ("bamba", "gemma3", "gpt2", "llama", "olmo_hybrid", "qwen3_5")


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


@pytest.mark.parametrize("family", [*FAMILIES, *PURELY_RECURRENT])
def test_gradients_are_as_exact_as_those_of_one_pass(family):
    """Of a sum of squared logits by every embedding, through a converted prompt and through one pass, against float64."""

    def gradient(model, logits):
        logits.square().sum().backward()
        found = model.get_input_embeddings().weight.grad.double()
        model.zero_grad()
        return [found]

    ours, theirs = [], []
    for seed in range(2):
        plain, exact = tiny(family, seed), tiny(family, seed).double()
        exact.config._experts_implementation = "eager"
        whole = torch.cat([PROMPT, TEXT], dim=1)
        expected = gradient(exact, exact(whole).logits[:, N_PROMPT:])
        theirs.append(relative_error(gradient(plain, plain(whole).logits[:, N_PROMPT:]), expected))
        model = KVTransformerBridge.boot_transformers(plain)
        with model.kv_bias(convert_prompt(model, PROMPT, detach=False)):
            ours.append(relative_error(gradient(plain, model(TEXT)), expected))
    # two orders of the same sums round alike, by more or less in each model; a path that is missing leaves off 10 % or more
    assert mean(ours) <= max(3 * mean(theirs), 16 * torch.finfo(torch.float32).eps)  # some models of theirs hardly round
