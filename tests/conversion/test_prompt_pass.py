"""Softmax prompts with every key kept: logits equal those with the prompt in context, in bounded memory for any length."""

import pytest
import torch
from precision import LAW, float64, relative_error
from scaled_models import REAL, scaled_up
from small_models import SOFTMAX, by_steps, model_of, peaked, small_model, tokens
from tiny_hf import tiny_hf_model
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, KVBias, KVLensError, KVShiftConfig, convert_prompt, counterfactuals
from kvlens.conversion import H2O, AttentionMatching, ExpectedAttention, KVzip, Landmark, SnapKV, StreamingLLM
from kvlens.model import streaming


def with_and_without(model, prompt, text, bias) -> float:
    """Relative error of the logits of ``text`` with the bias, against those with the prompt in context."""
    with torch.no_grad():
        whole = model(torch.cat([prompt, text], dim=1))[:, prompt.shape[1] :]
        with model.kv_bias(bias):
            return relative_error(model(text), whole)


@pytest.mark.parametrize("architecture", ["olmoe", "olmo3"])
def test_norms_over_all_heads_act_under_a_bias_too(architecture):
    """TransformerLens applies them behind hook_q and hook_k. Without the norms it was off by 1."""
    plain = dict(fold_ln=False, center_writing_weights=False, center_unembed=False)
    with float64():
        hf_model = tiny_hf_model(architecture, seed=3)
        model = HookedKVTransformer.from_pretrained("tiny", hf_model=hf_model, dtype="float64", **plain)
    tokens = torch.randint(0, 300, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shifted = HookedKVTransformer.from_hooked_transformer(model, kv_shift=KVShiftConfig(init="identity"))
        assert relative_error(shifted(tokens), model(tokens)) < LAW
        normed = shifted.run_with_cache(tokens)[1]["blocks.0.attn.hook_k_shifted"]
        attn = shifted.blocks[0].attn
        k = shifted.run_with_cache(tokens)[1]["blocks.0.attn.hook_k"].flatten(2)
        k = torch.nn.functional.rms_norm(k, k.shape[-1:], attn.k_norm.w, model.cfg.eps)
        assert relative_error(normed, k.view_as(normed)) < LAW  # the shift comes after the norm
    prompt, text = tokens[:, :11], tokens[:, 11:]
    assert with_and_without(model, prompt, text, convert_prompt(model, prompt)) < LAW


def test_a_bidirectional_model_has_no_bias():
    model = small_model(attention_dir="bidirectional")
    with pytest.raises(KVLensError, match="bidirectional attention the prompt's own keys depend on the text after it"):
        convert_prompt(model, tokens(1, 5))


@pytest.mark.parametrize("kind", ["rotary, grouped", "alibi", "learned", "shifted"])
def test_prompts_of_unequal_length_are_those_of_each_alone(kind):
    model, prompt = model_of("softmax", kind), tokens(1, 7).expand(2, -1)
    both = convert_prompt(model, counterfactuals(model, prompt[0], [[], [(4, 7)]], positions="closed"))
    assert both.position_offset.tolist() == [7, 4]
    for row, length in ((0, 7), (1, 4)):
        text = tokens(1, 6, seed=3)
        assert with_and_without(model, prompt[row : row + 1, :length], text, both.select_prompt(row)) < 1e-12
    text = tokens(2, 6, seed=3)
    with torch.no_grad(), model.kv_bias(both):
        new = model(text)
    assert relative_error(new[1], model(torch.cat([prompt[1:, :4], text[1:]], dim=1))[0, 4:]) < 1e-12


@pytest.fixture
def data_if_needed(request, kind):
    return request.getfixturevalue("outside_data") if kind == "stories260K" else None


SCALED = [*((kind, "QK") for kind in REAL), *zip(REAL, "QK" * 4, strict=True)]
"""Longer queries and longer keys give the same scores: each model has one of the two. The next test takes them as they are."""


@pytest.mark.parametrize(("kind", "which"), SCALED)
def test_exact_on_real_models(kind, which, data_if_needed):
    """Queries and keys 20 times as long: scores of up to 5,000, of both up to 100,000. TransformerLens' cache says it, too."""
    prompts, texts = tokens(3, 11), tokens(3, 13, seed=1)
    with torch.no_grad(), scaled_up(kind, torch.float64, which, data_if_needed) as model:
        whole, bias = model(torch.cat([prompts, texts], dim=1))[:, prompts.shape[1] :], convert_prompt(model, prompts)
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(prompts))
        real = torch.ones(len(prompts), 24, dtype=torch.long)  # or a drawn token that pads is none
        model(prompts, past_kv_cache=cache, attention_mask=real[:, :11])
        cached = model(texts, past_kv_cache=cache, attention_mask=real[:, 11:])
        with model.kv_bias(bias):
            converted = model(texts)
    assert relative_error(converted, whole) < LAW and relative_error(cached, whole) < LAW


@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("which", ["", "QK"])
def test_a_converted_prompt_is_as_near_to_float64_as_the_prompt_itself(kind, which, data_if_needed):
    """The median of 16 prompts: of single ones the error scatters, since with queries and keys 20 times as long two scores of
    100,000 may be a tie in float32. Measured: 0.5 to 1.2 of the plain pass's, of four times allowed."""
    prompt, text = tokens(16, 11), tokens(16, 13, seed=1)
    both = torch.cat([prompt, text], dim=1)
    with torch.no_grad(), scaled_up(kind, torch.float64, which, data_if_needed) as double:
        true = double(both)[:, prompt.shape[1] :]
    with torch.no_grad(), scaled_up(kind, torch.float32, which, data_if_needed) as single:
        for steps in (True, False):
            with by_steps(single, steps):
                plain = single(both)[:, prompt.shape[1] :].double()
                with single.kv_bias(convert_prompt(single, prompt)):
                    converted = single(text).double()
            off_plain, off = (((x - true).norm(dim=(1, 2)) / true.norm(dim=(1, 2))).median() for x in (plain, converted))
            assert float(off) < 4 * float(off_plain), steps


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        *((kind, "exact") for kind in SOFTMAX),
        *((kind, "landmark") for kind in ("rotary, grouped", "alibi", "shifted", "sinks")),
    ],
)
def test_a_pass_with_every_hook_says_what_bare_ones_say(kind, method):
    """With the two summands of z apart, that is, where bare passes have one softmax over the keys of both."""
    model = model_of("softmax", kind)
    prompt, text = tokens(2, 7), tokens(2, 9, seed=1)
    options = {} if method == "exact" else dict(method=method, n_features=3, n_continuations=2, continuation_length=6)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :3] = 0
    real = mask.bool()
    with torch.no_grad(), model.kv_bias(convert_prompt(model, prompt, verbose=False, **options)):
        hooked, cache = model.run_with_cache(text, attention_mask=mask)
        assert "blocks.1.attn.hook_z_bias" in cache
        for steps in (True, False):
            with by_steps(model, steps):
                assert relative_error(model(text, attention_mask=mask)[real], hooked[real]) < 1e-12
                cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
                pieces = ((0, 5), (5, 8), (8, 9))
                parts = [model(text[:, a:b], attention_mask=mask[:, a:b], past_kv_cache=cache) for a, b in pieces]
                assert relative_error(torch.cat(parts, dim=1)[real], hooked[real]) < 1e-12


def test_hooks_of_a_biased_softmax_model():
    model = model_of("softmax", "rotary, grouped")
    prompt, text = tokens(1, 7), tokens(1, 4, seed=1)
    bias = convert_prompt(model, prompt)
    with torch.no_grad(), model.kv_bias(bias):
        _, cache = model.run_with_cache(text)
    at = "blocks.1.attn."
    assert cache[at + "hook_b_kv"].shape == (1, 6, 7, 6)  # query heads
    assert cache[at + "hook_phi_q"].shape == (1, 4, 6, 7)
    whole = model.run_with_cache(torch.cat([prompt, text], dim=1))[1]
    pattern = whole["pattern", 1][:, :, 7:]
    from_prompt = torch.einsum("bhij,bjhd->bihd", pattern[..., :7], whole["v", 1][:, :7].repeat_interleave(2, dim=2))
    torch.testing.assert_close(cache[at + "hook_z_bias"], from_prompt, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(cache["pattern", 1], pattern[..., 7:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["rotary", "rotary, grouped"])
@pytest.mark.parametrize("batch", [None, 2])
def test_what_hooks_make_of_the_old_bias_is_what_the_new_one_continues_from(kind, batch):
    """Tested by continuing from a bias without that head, under which the prompt is read alike."""
    model = model_of("softmax", kind)
    one, two = (tokens(batch or 1, n, seed=n) for n in (5, 4))
    one, two = (one, two) if batch else (one[0], two[0])
    old, text = convert_prompt(model, one), tokens(batch or 1, 6, seed=2)

    def ablate(b, hook):
        b[:, 3] = 0

    def logits(bias):
        with torch.no_grad(), model.kv_bias(bias):
            return model(text)

    rest = [(layer, head) for layer in range(2) for head in range(model.cfg.n_heads) if (layer, head) != (1, 3)]
    expected = logits(convert_prompt(model, two, initial=old.select(heads=rest)))
    hooks = [(f"blocks.1.attn.hook_b_{x}", ablate) for x in ("kv", "d")]
    assert relative_error(logits(convert_prompt(model, two, initial=old, fwd_hooks=hooks)), expected) < 1e-12
    whole = convert_prompt(model, two, initial=old)
    assert relative_error(logits(whole), expected) > 1e-3  # far above rounding
    looked = convert_prompt(model, two, initial=old, fwd_hooks=[("blocks.1.attn.hook_b_kv", lambda b, hook: None)])
    assert torch.equal(looked.b_KV, whole.b_KV)


TEXTS = dict(n_continuations=3, continuation_length=4, n_held_out=2)
METHODS = [
    Landmark(n_keys=3, **TEXTS),
    AttentionMatching(n_keys=5, on_policy=True, **TEXTS),
    StreamingLLM(n_keys=6, **TEXTS),
    H2O(n_keys=6, **TEXTS),
    SnapKV(n_keys=6, window=2, **TEXTS),
    ExpectedAttention(n_keys=6, **TEXTS),
    KVzip(n_keys=6, **TEXTS),
]
LOCAL = dict(use_local_attn=True, window_size=20, attn_types=["local", "global"])
KINDS = {"softmax, learned": {}, "softmax, shifted": {}, "softmax, alibi": LOCAL}


def in_little_memory(monkeypatch) -> list[int]:
    """Few scores and one head at a time; the result lists the lengths of the prompt's segments."""
    lengths, whole = [], streaming.tokens_at_once

    def observed(*of):
        lengths.append(whole(*of))
        return lengths[-1]

    monkeypatch.setattr(streaming, "NUMBERS_AT_ONCE", 3000)
    monkeypatch.setattr("kvlens.conversion.prompt_pass.NUMBERS_AT_ONCE", 3000)
    monkeypatch.setattr(streaming, "tokens_at_once", observed)
    monkeypatch.setattr("kvlens.ops.landmarks.NUMBERS_AT_ONCE", 1)
    return lengths


def assert_same(a: KVBias, b: KVBias) -> None:
    for x, y in ((a.b_KV, b.b_KV), (a.b_D, b.b_D), (a.features.keys, b.features.keys), (a.last_k, b.last_k)):
        assert relative_error(x, y) < LAW
    if a.fit is not None:
        assert relative_error(a.fit.head_output_error, b.fit.head_output_error) < LAW


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_a_method_converts_a_long_prompt_as_it_would_in_one_piece(method, monkeypatch):
    model, prompt = peaked("softmax, rotary"), tokens(2, 37)
    whole = convert_prompt(model, prompt, method=method, verbose=False)
    lengths = in_little_memory(monkeypatch)
    assert_same(convert_prompt(model, prompt, method=method, verbose=False), whole)
    assert 1 < lengths[0] < 37


@pytest.mark.parametrize("kind", KINDS)
def test_segments_of_a_prompt_are_the_prompt(kind, monkeypatch):
    """A second prompt after a first one: the segments read the bias that they continue, too."""
    model, prompt, more = peaked(kind, peak=1, **KINDS[kind]), tokens(1, 37), tokens(1, 29, seed=1)
    first = convert_prompt(model, prompt)
    both, hooked = convert_prompt(model, more, initial=first), []
    in_little_memory(monkeypatch)
    assert_same(convert_prompt(model, prompt), first)
    assert_same(convert_prompt(model, more, initial=first), both)
    convert_prompt(model, prompt, fwd_hooks=[("blocks.0.hook_resid_pre", lambda x, hook: hooked.append(x.shape[1]))])
    assert hooked == [37]  # a hook sees the whole prompt
