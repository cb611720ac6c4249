"""What holds for every kind of attention: pieces, padding, forms and hooks change nothing; a converted prompt is the prompt."""

import pytest
import torch
from precision import LAW
from small_models import ATTENTION_VARIANTS, LINEAR, SOFTMAX, WITHOUT_BIAS, by_steps, relative_error, tokens

from kvlens import convert_prompt

KINDS = [
    *(("linear", name) for name in (*LINEAR, *ATTENTION_VARIANTS)),
    *(("softmax", name) for name in (*SOFTMAX, *ATTENTION_VARIANTS)),
]
CONVERTIBLE = [(kind, name) for kind, name in KINDS if name not in WITHOUT_BIAS]


def each(kinds):
    return pytest.mark.parametrize(("kind", "name"), kinds, ids=[f"{kind}, {name}" for kind, name in kinds])


def in_each_form(model, linear=("auto",)):
    if model.cfg.attention == "softmax":
        for steps in (True, False):
            with by_steps(model, steps):
                yield
    else:
        for form in linear:
            model.cfg.linear_attention_form = form
            yield


def in_pieces(model, text):
    cache = model.empty_cache(len(text))
    pieces = ((0, 1), (1, 6), (6, 7), (7, 8), (8, 11))
    return torch.cat([model(text[:, a:b], past_kv_cache=cache) for a, b in pieces], dim=1)


@each(KINDS)
def test_decoding_in_pieces_equals_one_pass(kind, name, shared):
    model, text = shared(kind, name), tokens(3, 11)
    whole = model(text)
    for _ in in_each_form(model):
        assert relative_error(in_pieces(model, text), whole) < LAW


@each(KINDS)
def test_left_and_right_padding_change_nothing(kind, name, shared):
    model, text, junk = shared(kind, name), tokens(1, 7), tokens(1, 4, seed=9)
    whole, left = model(text), torch.tensor([[0] * 4 + [1] * 7])
    for _ in in_each_form(model):
        behind, before = torch.cat([junk, text], dim=1), torch.cat([text, junk], dim=1)
        assert relative_error(model(behind, attention_mask=left)[:, 4:], whole) < LAW
        assert relative_error(model(before, attention_mask=left.flip(1))[:, :7], whole) < LAW


@each(KINDS)
def test_rows_behind_padding_continue_as_alone_and_a_frozen_cache_is_read_and_not_written(kind, name, shared):
    model, long, short, more = shared(kind, name), tokens(1, 7), tokens(1, 3, seed=1), tokens(2, 4, seed=2)
    cache, mask = model.empty_cache(2), torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    model(torch.cat([long, torch.cat([tokens(1, 4, seed=8), short], dim=1)]), attention_mask=mask, past_kv_cache=cache)
    model(more[:, :2], past_kv_cache=cache)
    cache.freeze()
    first, again = (model(more[:, 2:], past_kv_cache=cache) for _ in range(2))
    assert torch.equal(first, again)
    for row, text in enumerate((long, short)):
        alone = model(torch.cat([text, more[[row]]], dim=1))[:, -2:]
        assert relative_error(first[[row]], alone) < LAW


@each(KINDS)
def test_forms_and_hooks_change_nothing_and_the_pattern_makes_z(kind, name, shared):
    model, text = shared(kind, name), tokens(2, 9)
    hooked, cache = model.run_with_cache(text)
    every = model.cfg.attention_variant is None or model.cfg.attention_variant.negative is None
    for _ in in_each_form(model, ("parallel", "chunked", "recurrent", "auto") if every else ("parallel", "auto")):
        assert relative_error(model(text), hooked) < LAW
    if name.startswith("ridge"):
        return  # it solves for z
    pattern = cache["pattern", 1]
    assert bool((pattern.triu(diagonal=1) == 0).all())
    if kind == "linear" and name in LINEAR and name != "trained bias":
        values = cache["v_shifted" if "blocks.1.attn.hook_v_shifted" in cache else "v", 1, "attn"]
        z = torch.einsum("bhqk,bkhd->bqhd", pattern, values.repeat_interleave(model.cfg.n_heads // values.shape[2], dim=2))
        assert relative_error(z, cache["z", 1]) < LAW


@each(CONVERTIBLE)
def test_a_converted_prompt_replaces_the_prompt_in_one_pass_and_in_pieces(kind, name, shared):
    model, prompt, text = shared(kind, name), tokens(3, 7, seed=4), tokens(3, 11)
    whole = model(torch.cat([prompt, text], dim=1))[:, 7:]
    assert relative_error(model(text), whole) > 1e-3  # the prompt matters
    for _ in in_each_form(model):
        bias = convert_prompt(model, prompt)
        with model.kv_bias(bias):
            assert relative_error(model(text), whole) < LAW
            assert relative_error(in_pieces(model, text), whole) < LAW
    assert bias.n_prompt_tokens == 7 and bias.fit is None
    assert bias.position_offset == (0 if model.cfg.rotates_after else 7)
    n_kv_heads = model.cfg.n_key_value_heads or model.cfg.n_heads
    if kind == "softmax":
        assert bias.features.keys.shape == (2, 3, n_kv_heads, 7, 6)
    else:
        assert bias.b_KV.shape == (2, 3, model.cfg.n_heads, model.cfg.d_phi, 6)


@each(CONVERTIBLE)
def test_the_pattern_under_a_bias_has_the_texts_columns_of_the_whole_one_and_lacks_the_prompts(kind, name, shared):
    model, both, point = shared(kind, name), tokens(2, 16), "blocks.1.attn.hook_pattern"
    whole = model.run_with_cache(both, names_filter=point)[1][point]
    with model.kv_bias(convert_prompt(model, both[:, :7])):
        under = model.run_with_cache(both[:, 7:], names_filter=point)[1][point]
    assert relative_error(under, whole[:, :, 7:, 7:]) < LAW
    assert whole[:, :, 7:, :7].norm() > 0.1 * under.norm()  # it lacks something


@each(CONVERTIBLE)
def test_prompts_one_after_another_equal_their_concatenation(kind, name, shared):
    model, text, bias = shared(kind, name), tokens(1, 9), None
    pieces = [tokens(1, n, seed=n)[0] for n in (4, 1, 2, 3)]
    for piece in pieces:
        bias = convert_prompt(model, piece, initial=bias)
    whole = convert_prompt(model, torch.cat(pieces))
    assert (bias.n_prompt_tokens, bias.position_offset) == (10, whole.position_offset)
    for field in ("b_KV", "b_D", "last_k", "last_v", "last_q"):
        a, b = getattr(bias, field), getattr(whole, field)
        assert a.shape == b.shape
        if b.numel() and b.norm() > 0:
            assert relative_error(a, b) < LAW, field
    expected = model(torch.cat([*pieces, text[0]])[None])[:, 10:]
    with model.kv_bias(bias):
        assert relative_error(model(text), expected) < LAW
