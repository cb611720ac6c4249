"""Linear attention: conversion in segments equals conversion in one pass, and tokens that write nothing pass by a bias."""

from dataclasses import replace

import pytest
import torch
from small_models import LINEAR, linear_model, model_of, relative_error, small_model, tokens

from kvlens import KVLensError, convert_prompt
from kvlens.conversion import carry_bias
from kvlens.corpus import train_bpe_tokenizer
from kvlens.model import streaming

ROUNDING = 1e-14  # float64: tens of terms through two layers
FIELDS = ("b_kv", "b_d", "last_k", "last_v", "last_q")
POS = 23


def assert_same_bias(one, two):
    for field in FIELDS:
        a, b = one.stacked(field), two.stacked(field)
        assert a.shape == b.shape
        if b.numel() and b.norm() > 0:
            assert relative_error(a, b) < ROUNDING, field
    for count in ("n_prompt_tokens", "position_offset"):
        assert torch.equal(torch.as_tensor(getattr(one, count)), torch.as_tensor(getattr(two, count)))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "length"), [*((name, 5) for name in LINEAR), *((name, 1) for name in [*LINEAR][::3]), ("learned", POS + 4)]
)
def test_in_segments_equals_in_one_pass(name, length):
    model, prompt = model_of("linear", name), tokens(2, POS)
    first = convert_prompt(model, tokens(2, 6, seed=1))
    for initial in (None, first):
        whole = convert_prompt(model, prompt, initial=initial)
        assert_same_bias(convert_prompt(model, prompt, initial=initial, segment_length=length), whole)


def test_prompts_of_unequal_length():
    tokenizer = train_bpe_tokenizer(["the cat sat on the mat and the dog ran to the man"] * 3, vocab_size=280)
    model = linear_model(d_vocab=len(tokenizer), normalizer="none", decay="retnet").requires_grad_(False)
    model.set_tokenizer(tokenizer)
    texts = ["the cat", "the dog ran to the man and sat on the mat", "a"]
    assert_same_bias(convert_prompt(model, texts, segment_length=3), convert_prompt(model, texts))


def test_a_hook_sees_the_whole_prompt_unless_a_length_is_given(monkeypatch):
    model, prompt, seen = linear_model().requires_grad_(False), tokens(1, POS), []
    monkeypatch.setattr(streaming, "default_segment_length", lambda *_: 5)

    def look(x, hook):
        seen.append((hook.name.rsplit(".", 1)[-1], x.shape[1]))

    hooks = [("blocks.0.attn.hook_k", look), ("blocks.0.attn.hook_last_k", look)]
    initial = convert_prompt(model, tokens(1, 4)[0])
    whole = convert_prompt(model, prompt, initial=initial, fwd_hooks=hooks)
    assert seen == [("hook_k", POS), ("hook_last_k", 2)]
    seen.clear()
    in_segments = convert_prompt(model, prompt, initial=initial, fwd_hooks=hooks, segment_length=10)
    assert seen == [("hook_k", 10), ("hook_last_k", 2), ("hook_k", 10), ("hook_k", 3)]
    assert_same_bias(in_segments, whole)


def test_an_intervention_at_every_token_is_the_same_in_segments():
    model, prompt = linear_model().requires_grad_(False), tokens(1, POS)
    initial = convert_prompt(model, tokens(1, 4)[0])
    hooks = [
        ("blocks.0.attn.hook_v", lambda v, hook: 0.5 * v),
        ("blocks.1.attn.hook_b_kv", lambda b, hook: 2.0 * b),
    ]
    options = dict(initial=initial, fwd_hooks=hooks)
    whole = convert_prompt(model, prompt, **options)
    assert_same_bias(convert_prompt(model, prompt, segment_length=7, **options), whole)
    assert (
        relative_error(whole.stacked("b_kv"), convert_prompt(model, prompt, initial=initial).stacked("b_kv")) > 1e-3
    )  # far above rounding


def test_gradients_flow_through_segments():
    model, prompt = linear_model(), tokens(1, POS)
    gradients = []
    for length in (None, 6):
        model.zero_grad()
        bias = convert_prompt(model, prompt, detach=False, segment_length=length)
        (bias.stacked("b_kv").sum() + bias.stacked("b_d").sum()).backward()
        gradients.append(model.W_E.grad.clone())
    assert relative_error(gradients[1], gradients[0]) < 1e-13  # backward sums again what forward summed
    assert gradients[0].norm() > 0


def silenced(model, prompt, bias):
    """The conversion of a prompt that writes nothing into A; it does write into D."""
    shifts_values = model.cfg.kv_shift is not None and model.cfg.kv_shift.values
    name = "hook_v_shifted" if shifts_values else "hook_v"
    hooks = [(f"blocks.{layer}.attn.{name}", lambda v, hook: torch.zeros_like(v)) for layer in range(model.cfg.n_layers)]
    return convert_prompt(model, prompt, initial=bias, fwd_hooks=hooks)


@pytest.mark.parametrize("batch", [None, 3])
@pytest.mark.parametrize("name", LINEAR)
def test_equals_the_conversion_of_a_prompt_without_values(name, batch):
    model = model_of("linear", name)
    first, second = (tokens(batch or 1, n, seed=n) for n in (5, 7))
    if batch is None:
        first, second = first[0], second[0]
    bias = convert_prompt(model, first)
    got, expected = carry_bias(model, bias, 7), silenced(model, second, bias)
    assert relative_error(got.stacked("b_kv"), expected.stacked("b_kv")) < 1e-14
    assert torch.equal(got.stacked("b_d"), bias.stacked("b_d"))
    assert got.position_offset == expected.position_offset
    assert got.n_prompt_tokens == expected.n_prompt_tokens
    assert torch.equal(got.stacked("last_k"), bias.stacked("last_k"))
    if model.cfg.rotates_after or model.cfg.decay is not None:
        assert relative_error(got.stacked("b_kv"), bias.stacked("b_kv")) > 1e-3  # it does move


def test_past_no_tokens_nothing_changes():
    model = linear_model().requires_grad_(False)
    bias = convert_prompt(model, tokens(1, 5)[0])
    assert torch.equal(carry_bias(model, bias, 0).stacked("b_kv"), bias.stacked("b_kv"))


def test_a_bias_of_another_model_is_not_carried():
    model = linear_model().requires_grad_(False)
    bias = convert_prompt(model, tokens(1, 5)[0])
    other = replace(bias, fingerprint=convert_prompt(linear_model(seed=4), tokens(1, 5)[0]).fingerprint, record=None)
    with pytest.raises(KVLensError, match="carry_bias"):
        carry_bias(model, other, 1)
    with pytest.raises(KVLensError, match="carry_bias: attention differs"):
        carry_bias(small_model(), bias, 1)


def test_a_softmax_prompt_moves_away():
    """With ALiBi keys are penalized by distance: three tokens that write nothing add three positions."""
    slopes = (0.5, 0.25, 0.125, 0.0625, 0.03125)
    model = small_model(dtype=torch.float64, positional_embedding_type="alibi", alibi_slopes=slopes).requires_grad_(False)
    bias = convert_prompt(model, tokens(2, 6))
    moved = carry_bias(model, bias, 3)
    assert moved.n_prompt_tokens == moved.position_offset == 9
    assert torch.equal(moved.stacked("distance"), bias.stacked("distance") + 3)
    whole = convert_prompt(model, tokens(2, 3, seed=4), initial=bias)
    assert torch.equal(whole.stacked("distance")[..., :6], moved.stacked("distance"))
    assert torch.equal(carry_bias(model, bias, 0).stacked("distance"), bias.stacked("distance"))
