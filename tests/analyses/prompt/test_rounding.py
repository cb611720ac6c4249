"""Exact to rounding, compared with the model's own forward pass in its dtype, at any length; larger errors are detected."""

from dataclasses import replace

import pytest
import torch
from analysis_models import VARIANTS, random_model, tokens
from kvlens.analyses.predictions import text_logits
from kvlens.analyses.readings import SAMPLE, rounding_error

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import conversion_error


def verdict(model, prompt, text, bias=None) -> bool:
    return bool(conversion_error(model, prompt, text, bias=bias)["exact_to_rounding"].all())


@pytest.mark.parametrize(("dtype", "seed"), [(torch.float32, 0), (torch.float32, 1), (torch.float64, 0)])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_conversion_is_exact_and_one_part_in_100_000_is_not(name, dtype, seed):
    model = random_model(**VARIANTS[name], dtype=dtype, seed=seed)
    prompt, text = tokens(15, seed), tokens(9, seed + 7)
    bias = convert_prompt(model, prompt)
    assert verdict(model, prompt, text, bias)
    off = {torch.float32: 1e-4, torch.float64: 1e-9}[dtype]  # a hundred times and more what rounding makes
    assert not verdict(model, prompt, text, replace(bias, b_KV=(1 + off) * bias.b_KV))


def test_the_verdict_does_not_depend_on_the_length():
    model = random_model(dtype=torch.float32)
    for n in (20, 200, 1200):
        prompt, text = tokens(n), tokens(9, 1)
        bias = convert_prompt(model, prompt)
        assert rounding_error(model, prompt, text) < 1e-6  # a bound that grows with the text is above this from 4 tokens on
        assert verdict(model, prompt, text, bias)
        assert not verdict(model, prompt, text, replace(bias, b_KV=(1 + 1e-4) * bias.b_KV))


def test_in_bfloat16_a_conversion_is_exact_and_a_lost_prompt_is_not():
    model = random_model(dtype=torch.bfloat16)
    prompt, text = tokens(15), tokens(9, 7)
    assert verdict(model, prompt, text)
    assert not verdict(model, prompt, text, convert_prompt(model, prompt).zero_like())


def test_the_measured_error_is_that_of_the_same_weights_in_float64():
    model = random_model(dtype=torch.float32)
    exact = random_model(dtype=torch.float64)
    exact.load_state_dict({name: value.double() for name, value in model.state_dict().items()})
    prompt, text = tokens(15), tokens(9, 7)
    own, judge = (text_logits(m, prompt, text).double() for m in (model, exact))
    expected = float((own - judge).norm() / judge.norm())
    assert rounding_error(model, prompt, text) == pytest.approx(expected, rel=1e-3)  # rotary tables in float32 or float64
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters()) and model.cfg.dtype == torch.float32


def test_a_long_text_is_sampled_at_its_end(monkeypatch):
    model, prompt, text = random_model(dtype=torch.float32), tokens(300), tokens(SAMPLE - 200, 1)
    together = torch.cat([prompt, text])[-SAMPLE:]
    assert rounding_error(model, prompt, text) == rounding_error(model, together[:200], together[200:])
    longer = torch.cat([tokens(77, 3), text, text])
    assert rounding_error(model, prompt, longer) == rounding_error(model, prompt[:0], longer[-SAMPLE:])


def test_a_bias_that_is_attached_is_read_in_float64_too():
    model = random_model(dtype=torch.float32)
    with model.kv_bias(convert_prompt(model, tokens(11, 5))):
        assert verdict(model, tokens(15), tokens(9, 7))
    assert isinstance(model, HookedKVTransformer) and model.attached_kv_bias is None
