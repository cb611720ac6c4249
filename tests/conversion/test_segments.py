"""Conversion in segments equals conversion in one pass; what a hook sees then; progress and refusals."""

import pytest
import torch
from small_models import linear_model, model_of, relative_error, tokens

from kvlens import convert_prompt
from kvlens.corpus import train_bpe_tokenizer
from kvlens.model import streaming

ROUNDING = 1e-14  # float64: tens of terms through two layers
FIELDS = ("b_KV", "b_D", "last_k", "last_v", "last_q")
POS = 23
NAMES = ["rope after", "window 3 with queries", "rope before", "taylor", "gqa decay", "learned"]


def assert_same_bias(one, two):
    for field in FIELDS:
        a, b = getattr(one, field), getattr(two, field)
        assert a.shape == b.shape
        if b.numel() and b.norm() > 0:
            assert relative_error(a, b) < ROUNDING, field
    for count in ("n_prompt_tokens", "position_offset"):
        assert torch.equal(torch.as_tensor(getattr(one, count)), torch.as_tensor(getattr(two, count)))


@pytest.mark.parametrize(
    ("name", "length"), [*((name, 5) for name in NAMES), *((name, 1) for name in NAMES[::2]), ("learned", POS + 4)]
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


def test_without_hooks_a_long_prompt_streams_by_itself(monkeypatch):
    model = linear_model().requires_grad_(False)
    whole, told = convert_prompt(model, tokens(1, POS)), []
    monkeypatch.setattr(streaming, "default_segment_length", lambda model, batch: 10)
    assert_same_bias(convert_prompt(model, tokens(1, POS), on_progress=told.append), whole)
    assert told == [pytest.approx(10 / POS), pytest.approx(20 / POS), 1.0]


def test_a_hook_sees_the_whole_prompt_unless_a_length_is_given(monkeypatch):
    model, prompt, seen = linear_model().requires_grad_(False), tokens(1, POS), []
    monkeypatch.setattr(streaming, "default_segment_length", lambda model, batch: 5)

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
    assert relative_error(whole.b_KV, convert_prompt(model, prompt, initial=initial).b_KV) > 1e-3  # far above rounding


def test_gradients_flow_through_segments():
    model, prompt = linear_model(), tokens(1, POS)
    gradients = []
    for length in (None, 6):
        model.zero_grad()
        bias = convert_prompt(model, prompt, detach=False, segment_length=length)
        (bias.b_KV.sum() + bias.b_D.sum()).backward()
        gradients.append(model.W_E.grad.clone())
    assert relative_error(gradients[1], gradients[0]) < 1e-13  # backward sums again what forward summed
    assert gradients[0].norm() > 0
