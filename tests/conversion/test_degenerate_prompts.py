"""Prompts and sizes at the limits of every method of conversion: nothing is NaN, and what is approximate has a record."""

import warnings

import pytest
import torch
from precision import LAW, relative_error
from small_models import small_model, tokens
from tiny_text_model import tiny_text_model

from kvlens import KVBias, convert_prompt
from kvlens.conversion import METHODS, option_names
from kvlens.conversion.softmax import learned
from kvlens.conversion.softmax.few_keys import FewKeys

QUICK = dict(n_continuations=4, continuation_length=6, n_held_out=2)
PROMPTS = {"one token": tokens(1, 1)[0], "repeated token": torch.full((9,), 5), "plain": tokens(1, 9)[0]}
SIZES = {"one key": dict(n_features=1), "some": dict(n_features=4), "as many as tokens": dict(n_features=9)}
METHODS_AND_SIZES = [
    pytest.param(name, options, id=f"{name}, {size}")
    for name, kind in METHODS.items()
    for size, options in SIZES.items()
    if size == "some" or issubclass(kind, FewKeys)
]
TEXT = tokens(2, 5, seed=7)


def sharp_model(dtype):
    """Attention so sharp that a prompt gets all of it, up to rounding, at some queries and none at others."""
    sizes = dict(positional_embedding_type="rotary", n_heads=6, n_key_value_heads=3, n_ctx=64)
    model = small_model(**sizes, dtype=dtype).requires_grad_(False)
    for block in model.blocks:
        block.attn.W_Q.data *= 60
    return model


@pytest.fixture(scope="module")
def sharp():
    return sharp_model(torch.float32)


def options_of(method, options):
    return {name: value for name, value in options.items() if name in option_names(METHODS[method])}


def finite(bias: KVBias) -> bool:
    numbers = [bias.b_KV, bias.b_D]
    if bias.fit is not None:
        numbers += [bias.fit.head_output_error, bias.fit.mass_error, *bias.fit.answers.to_tensors().values()]
    return all(bool(x.isfinite().all()) for x in numbers)


@pytest.mark.parametrize(("method", "options"), METHODS_AND_SIZES)
def test_any_prompt_gives_finite_numbers_and_a_record(sharp, method, options, monkeypatch):
    monkeypatch.setattr(learned, "STEPS", 5)
    for prompt in PROMPTS.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more keys than tokens
            bias = convert_prompt(sharp, prompt, method=method, **options_of(method, {**QUICK, **options}), verbose=False)
        with sharp.kv_bias(bias):
            logits = sharp(TEXT)
        assert finite(bias) and bool(logits.isfinite().all())
        if bias.fit is None:  # every key is kept
            assert torch.equal(bias.b_KV, convert_prompt(sharp, prompt).b_KV)
        else:
            assert bias.fit.method == method


def test_every_key_kept_is_any_prompt():
    model = sharp_model(torch.float64)
    for prompt in PROMPTS.values():
        whole = model(torch.cat([prompt.expand(2, -1), TEXT], dim=1))[:, len(prompt) :]
        with model.kv_bias(convert_prompt(model, prompt)):
            assert relative_error(model(TEXT), whole) < LAW


@pytest.mark.parametrize(("method", "options"), [each for each in METHODS_AND_SIZES if "some" in each.id])
def test_padded_prompts_are_converted_like_single_ones(method, options, monkeypatch):
    """On the same reference text; random continuations differ between a batch and a single prompt."""
    monkeypatch.setattr(learned, "STEPS", 5)
    if method == "learned":
        pytest.skip("its features are learned for all prompts of a batch together")
    model = tiny_text_model(attention="softmax", kv_shift=None, gain=8, dtype=torch.float64)
    prompts = ["The widget is purple and the gadget is green.", "widget", "Return the gadget. Frobnicate both of them."]
    text = dict(reference=" the widget is green and the gadget is purple", n_held_out=0, continuation_length=2)
    given = options_of(method, {**text, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = convert_prompt(model, prompts, method=method, verbose=False, **given)
        singles = [convert_prompt(model, prompt, method=method, verbose=False, **given) for prompt in prompts]
    for row, single in enumerate(singles):
        with model.kv_bias(batch.select_prompt(row)):
            one = model(" The widget", prepend_bos=False)
        with model.kv_bias(single):
            assert torch.allclose(one, model(" The widget", prepend_bos=False), atol=1e-8), row
