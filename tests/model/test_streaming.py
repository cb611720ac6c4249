"""A pass in segments against the whole pass: every variant, padding, cache and bias; and when the text must run whole."""

import itertools

import pytest
import torch
from precision import LAW
from small_models import LINEAR, linear_model, relative_error, sharp, small_model, tokens, warned_of
from tiny_text_model import tiny_text_model

from kvlens import KVLensError, convert_prompt
from kvlens.model import streaming
from kvlens.model.streaming import default_segment_length, segments

POS = 23

VARIANTS = {
    **{row: {} for row in LINEAR if row not in ("split", "attn in", "trained bias")},
    **{row: {} for row in ("side by side", "no norm, attention only", "self-attention form", "augmented in parallel")},
    "adjacent pairs": dict(rotary_adjacent_pairs=True, rotary_dim=4),
    "recurrent": dict(linear_attention_form="recurrent"),
}


@pytest.fixture
def short_segments(monkeypatch):
    """Segments of 5 tokens by default, or of as many as it is called with."""

    def of(length):
        monkeypatch.setattr(streaming, "MULTIPLE", 1)
        monkeypatch.setattr(streaming, "default_segment_length", lambda *_: length)

    of(5)
    return of


def variant(name):
    changes = VARIANTS[name]
    return sharp("rope after" if changes else name, gain=1, **changes)


def lengths_seen(model, monkeypatch):
    """How many tokens each pass through the first block has, from now on."""
    seen, block = [], model.blocks[0]
    forward = block.forward
    monkeypatch.setattr(block, "forward", lambda x, **rest: (seen.append(x.shape[1]), forward(x, **rest))[1])
    return seen


def caches_equal(one, two):
    assert torch.equal(one.previous_attention_mask, two.previous_attention_mask)
    for a, b in zip(one.entries, two.entries, strict=True):
        assert relative_error(a.state.kv, b.state.kv) < LAW
        assert (a.state.k_sum is None) == (b.state.k_sum is None)
        assert a.shift_state.keys() == b.shift_state.keys()
        for x in a.shift_state:
            assert relative_error(a.shift_state[x], b.shift_state[x]) < LAW
        assert torch.equal(torch.as_tensor(a.n_tokens), torch.as_tensor(b.n_tokens))
        assert a.n_positions == b.n_positions
        assert not a.frozen


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", VARIANTS)
def test_streamed_equals_whole(name, short_segments, monkeypatch):
    model, text = variant(name), tokens(3, POS)
    short_segments(100)
    whole_cache, cache = model.empty_cache(3), model.empty_cache(3)
    whole, plain = model(text, past_kv_cache=whole_cache), model(text)
    short_segments(5)
    seen = lengths_seen(model, monkeypatch)
    assert relative_error(model(text), plain) < LAW
    assert relative_error(model(text, past_kv_cache=cache), whole) < LAW
    assert seen == 2 * [5, 5, 5, 5, 3]
    caches_equal(cache, whole_cache)
    token = tokens(3, 1, seed=9)
    assert relative_error(model(token, past_kv_cache=cache), model(token, past_kv_cache=whole_cache)) < LAW


@pytest.mark.parametrize("length", [1, 2, 7, POS - 1, POS, POS + 1])
def test_any_length_of_segment(length):
    model, text = variant("window 3 with queries"), tokens(2, POS)  # segments shorter than the window among them
    parts = list(segments(model, text, segment_length=length))
    assert [part.shape[1] for part in parts[:-1]] == [length] * (len(parts) - 1)
    assert relative_error(torch.cat(parts, dim=1), model(text)) < LAW


@pytest.mark.parametrize("name", ["rope after", "gqa decay", "learned", "sinusoidal", "rope before"])
def test_padding_anywhere_bias_and_cache(name, short_segments):
    model, text = variant(name), tokens(3, POS)
    mask = torch.rand(3, POS, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[0, :7], mask[1, 11:], mask[2] = False, False, True  # a segment without a real token, rows of unequal length
    bias, before = convert_prompt(model, tokens(3, 4, seed=5)), tokens(3, 6, seed=6)
    for biased, cached in itertools.product((False, True), repeat=2):
        if biased:
            model.attach_kv_bias(bias)
        caches = [model.empty_cache(3), model.empty_cache(3)]
        for cache in caches if cached else ():
            model(before, past_kv_cache=cache)
        streamed = model(text, attention_mask=mask.long(), past_kv_cache=caches[0])
        short_segments(100)
        whole = model(text, attention_mask=mask.long(), past_kv_cache=caches[1])
        short_segments(5)
        assert relative_error(streamed[mask], whole[mask]) < LAW, (biased, cached)
        caches_equal(*caches)
        model.detach_kv_bias()


def test_one_bias_serves_every_row_and_its_shift_state_is_read_once(short_segments):
    model, text = variant("window 3 with queries"), tokens(3, POS)
    prompt = tokens(1, 6, seed=4)[0]
    with model.kv_bias(convert_prompt(model, prompt)):
        streamed = model(text)
    whole = model(torch.cat([prompt.expand(3, -1), text], dim=1))[:, 6:]
    assert relative_error(streamed, whole) < LAW


def test_normalizers_below_zero_are_counted_over_the_whole_pass(short_segments):
    """In segments, too: the share in the warning is that of all tokens, not of the first segment that has any."""
    model, text = variant("rope after"), tokens(1, POS)
    bias = convert_prompt(model, tokens(1, 6, seed=4)[0]) * -2.0

    def read():
        with model.kv_bias(bias):
            model(text)

    in_segments = warned_of(read)
    short_segments(100)
    assert in_segments == warned_of(read) != []


def test_a_frozen_cache_stays_as_it_is(short_segments):
    model, text = variant("rope after"), tokens(2, POS)
    cache = model.empty_cache(2)
    model(tokens(2, 4, seed=1), past_kv_cache=cache)
    cache.freeze()
    state, first = cache.entries[0].state.kv.clone(), model(text, past_kv_cache=cache)
    assert torch.equal(cache.entries[0].state.kv, state)
    assert cache.entries[0].n_positions == 4
    assert cache.previous_attention_mask.shape == (2, 4)
    assert cache.entries[0].frozen
    assert torch.equal(model(text, past_kv_cache=cache), first)


@pytest.mark.parametrize("masked", [False, True])
def test_every_return_type(masked, short_segments):
    model, text = variant("rope after"), tokens(3, POS)
    mask = torch.ones(3, POS, dtype=torch.long)
    mask[1, :6], mask[2, 9:] = 0, 0
    options = dict(attention_mask=mask) if masked else {}
    streamed = [model(text, return_type=kind, **options) for kind in ("logits", "loss", "both", None)]
    per_token = model(text, return_type="loss", loss_per_token=True, **options)
    residual = model(text, stop_at_layer=1, **options)
    short_segments(100)
    logits, loss = model(text, return_type="both", **options)
    real = mask.bool()
    assert relative_error(streamed[0][real], logits[real]) < LAW
    assert abs(streamed[1] - loss) < LAW * loss
    assert relative_error(streamed[2].logits[real], logits[real]) < LAW
    assert streamed[2].loss == streamed[1]
    assert streamed[3] is None
    assert relative_error(per_token, model(text, return_type="loss", loss_per_token=True, **options)) < LAW
    assert relative_error(residual[real], model(text, stop_at_layer=1, **options)[real]) < LAW


def test_hooks_of_either_kind_and_gradients_let_the_text_run_whole(short_segments, monkeypatch):
    model, text = variant("rope after"), tokens(1, POS)
    seen = lengths_seen(model, monkeypatch)

    def ignore(*_, **__):
        return None

    model.run_with_hooks(text, fwd_hooks=[("blocks.1.hook_resid_post", ignore)])
    model.run_with_cache(text)
    for register in ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model.blocks[1].mlp, register)(ignore)
        model(text)
        handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(ignore)
    model(text)
    handle.remove()
    assert seen == [POS] * 6
    seen.clear()
    model.b_U.requires_grad_(True)
    assert model(text).requires_grad
    with torch.no_grad():
        model(text)
    model.b_U.requires_grad_(False)
    bias = convert_prompt(model, tokens(1, 4)[0])
    bias.layers[0].attention.b_kv.requires_grad_(True)
    seen.clear()
    with model.kv_bias(bias):
        assert model(text).requires_grad
    assert seen == [POS]
    seen.clear()
    model(text, stop_at_layer=0)
    model(text)
    assert seen == [5, 5, 5, 5, 3]


def test_softmax_the_parallel_form_and_variants_that_need_all_scores_run_whole(short_segments, monkeypatch):
    plain = dict(kv_shift=None, positional_embedding_type="none")
    models = [
        small_model(),
        linear_model(linear_attention_form="parallel"),
        linear_model(**plain, attention_variant=dict(negative=dict(k=2, beta=0.5))),
        linear_model(**plain, attention_variant=dict(ridge=dict(strength=0.5))),
    ]
    for model in models:
        model.requires_grad_(False)
        seen = lengths_seen(model, monkeypatch)
        model(tokens(1, POS))
        assert seen == [POS]


def test_strings_and_left_padding_are_read_as_one_text(short_segments):
    model = tiny_text_model(dtype=torch.float64)
    texts = ["The widget is purple and the gadget is green", "Return both"]
    for options in (dict(padding_side="left"), dict(padding_side="right"), dict(prepend_bos=False), {}):
        streamed = model(texts, **options)
        short_segments(100)
        assert streamed.shape[1] > 10
        assert relative_error(streamed, model(texts, **options)) < LAW
        short_segments(5)


def test_too_long_a_text_and_wrong_tokens_are_refused_before_anything_runs(short_segments, monkeypatch):
    model = linear_model(positional_embedding_type="standard").requires_grad_(False)
    seen = lengths_seen(model, monkeypatch)
    with pytest.raises(KVLensError, match="a text of 43 tokens is longer than n_ctx=41"):
        model(tokens(1, 43))
    with pytest.raises(KVLensError, match=r"token ids must lie in 0\.\.16"):
        model(torch.cat([tokens(1, 20), torch.tensor([[17]])], dim=1))
    assert not seen


def test_a_failure_leaves_the_cache_as_it_was(short_segments, monkeypatch):
    model, text = variant("rope after"), tokens(1, POS)
    cache = model.empty_cache(1)
    model(tokens(1, 4, seed=1), past_kv_cache=cache)
    state, forward = cache.entries[0].state.kv.clone(), model.blocks[1].forward
    calls = itertools.count()

    def fails_at_the_third(x, **rest):
        if next(calls) == 2:
            raise RuntimeError("stopped")
        return forward(x, **rest)

    monkeypatch.setattr(model.blocks[1], "forward", fails_at_the_third)
    with pytest.raises(RuntimeError, match="stopped"):
        model(text, past_kv_cache=cache)
    assert torch.equal(cache.entries[0].state.kv, state)
    assert cache.previous_attention_mask.shape == (1, 4)


def test_the_length_of_a_segment_follows_the_model_and_the_batch():
    model = linear_model(d_mlp=2048)
    assert default_segment_length(model, 1) == 1024
    assert default_segment_length(model, 4) == 256
    assert default_segment_length(model, 10_000) == 64
    assert default_segment_length(linear_model(d_mlp=256), 1) == 8192


def test_progress_is_reported_and_ends_at_one():
    told = []
    list(segments(variant("rope after"), tokens(1, POS), segment_length=10, on_progress=told.append))
    assert told == [pytest.approx(10 / POS), pytest.approx(20 / POS), 1.0]


def test_a_long_start_is_generated_from_without_its_logits(monkeypatch):
    model, start = linear_model().requires_grad_(False), tokens(2, 9)
    options = dict(max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False)
    whole = model.generate(start, **options)
    monkeypatch.setattr(streaming, "LONG", 8)
    unembed, seen = model.unembed.forward, []
    monkeypatch.setattr(model.unembed, "forward", lambda x: (seen.append(x.shape[1]), unembed(x))[1])
    assert torch.equal(model.generate(start, **options), whole)
    assert seen == [1, 1, 1, 1]


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_a_mask_of_ones_makes_text_of_pad_tokens_in_pieces(attention):
    model = tiny_text_model(attention=attention, dtype=torch.float64)
    pad = model.tokenizer.pad_token_id
    text = torch.tensor([[pad, pad, 7, 9, pad, 11, pad]])
    cache = model.empty_cache()
    with torch.no_grad():
        pieces = [model(x, attention_mask=torch.ones_like(x), past_kv_cache=cache) for x in text.split([1, 2, 2, 2], dim=1)]
        whole = model(text)
    assert relative_error(torch.cat(pieces, dim=1), whole) < LAW
