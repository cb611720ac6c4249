"""Softmax conversion on a trained model: all keys are exact, and a closed form leaves the plain choice of keys far behind."""

import pytest
import torch
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.conversion.softmax import learned


@pytest.fixture(scope="module")
def story(outside_data):
    """(model, prompt [128], texts [4, 64], others [24, 64]): the model's own story, and its continuations."""
    model = HookedKVTransformer.from_llama2c(outside_data / "stories260K.bin", outside_data / "tok512.bin")
    generator = torch.Generator().manual_seed(0)

    def extended(text, n):
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(text))
        new = text
        for _ in range(n):
            new = torch.multinomial(model(new, past_kv_cache=cache)[:, -1].softmax(-1), 1, generator=generator)
            text = torch.cat([text, new], dim=1)
        return text

    with torch.no_grad():
        prompt = extended(torch.tensor([[1]]), 127)
        further = extended(prompt.repeat(28, 1), 64)[:, 128:]
        return model, prompt[0], further[:4], further[4:]


def error(story, bias) -> float:
    """Relative error of the logits, averaged over the tokens of the texts."""
    model, prompt, texts, _ = story
    with torch.no_grad():
        old = model(torch.cat([prompt.repeat(4, 1), texts], dim=1))[:, 128:]
        with model.kv_bias(bias):
            new = model(texts)
    return float(((new - old).norm(dim=-1) / old.norm(dim=-1)).mean())


def test_eight_keys_of_128(story):
    """Measured over eight contexts: dropped 10.2, the 8 most attended keys 5.7, equal budgets 1.6, greedy ones 1.26 %."""
    model, prompt, _, others = story
    at = dict(method="landmark", n_features=8, verbose=False)
    greedy = convert_prompt(model, prompt, budget="greedy", **at)
    at |= dict(reference=others, n_held_out=0)  # the first wrote its own
    searched, equal = error(story, greedy), error(story, convert_prompt(model, prompt, **at))
    assert searched < 0.018 and equal < 0.024
    assert searched < 0.85 * equal  # 0.71 here
    assert error(story, convert_prompt(model, prompt, keys="mass", fit=False, **at)) > 2 * searched
    assert 0.9 * 8 * 5 * 4 <= int(greedy.fit.n_keys.sum()) <= 8 * 5 * 4  # weights that came out negative are dropped
    assert float(greedy.fit.head_output_error.mean()) < 0.1


def test_learned_features_learn_and_a_polynomial_cannot(story, monkeypatch):
    """Measured here: dropped 8.7, 64 features learned in 300 steps 0.50, 100 0.72, 50 1.0, second-order polynomial 35 %."""
    monkeypatch.setattr(learned, "STEPS", 50)
    model, prompt, _, others = story
    at = dict(reference=others, n_held_out=0, verbose=False)
    dropped = error(story, convert_prompt(model, prompt).zero_like())
    assert error(story, convert_prompt(model, prompt, method="learned", n_features=64, **at)) < 0.2 * dropped
    assert error(story, convert_prompt(model, prompt, method="taylor", **at)) > 2 * dropped
