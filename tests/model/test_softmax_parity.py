"""With shift off, bias off and softmax, a HookedKVTransformer is TransformerLens' model bit for bit."""

import pytest
import torch
from small_models import plain_model, relative_error, small_model, tokens

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig
from kvlens._tl import TransformerLensKeyValueCache

VARIANTS = {
    "learned": {},
    "rotary": dict(positional_embedding_type="rotary", rotary_dim=4),
    "gqa": dict(n_heads=6, d_model=36, n_key_value_heads=2, positional_embedding_type="rotary"),
    "alibi": dict(positional_embedding_type="alibi"),
    "shortformer": dict(positional_embedding_type="shortformer"),
    "attn_result": dict(use_attn_result=True),
    "split": dict(use_split_qkv_input=True),
    "attn_in": dict(use_attn_in=True),
    "rms gated": dict(normalization_type="RMS", gated_mlp=True),
    "qk norm": dict(use_qk_norm=True),
    "parallel": dict(parallel_attn_mlp=True),
    "local": dict(use_local_attn=True, window_size=3, attn_types=["local", "global"]),
    "bfloat16": dict(dtype=torch.bfloat16),
    "attn only": dict(attn_only=True),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_cache_and_gradients_are_those_of_transformer_lens(name):
    plain, ours = plain_model(**VARIANTS[name]), small_model(**VARIANTS[name])
    for (left, a), (right, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert left == right
        assert torch.equal(a, b)
    x = tokens(3, 11)
    results = []
    for model in (plain, ours):
        logits, cache = model.run_with_cache(x)
        model(x, return_type="loss").backward()
        results.append((logits, dict(cache.items()), {n: p.grad for n, p in model.named_parameters()}))
    (logits, cache, grads), (our_logits, our_cache, our_grads) = results
    assert torch.equal(logits, our_logits)
    assert list(cache) == list(our_cache)
    assert all(torch.equal(cache[key], our_cache[key]) for key in cache)
    for key, grad in grads.items():
        assert (grad is None) == (our_grads[key] is None)
        assert grad is None or torch.equal(grad, our_grads[key])


@pytest.mark.parametrize("name", ["learned", "rotary", "gqa", "alibi"])
def test_decoding_is_that_of_transformer_lens(name):
    plain, ours = plain_model(**VARIANTS[name]), small_model(**VARIANTS[name])
    x = tokens(3, 5)
    for kwargs in ({}, {"use_past_kv_cache": False}):
        expected = plain.generate(x, max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False, **kwargs)
        got = ours.generate(x, max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False, **kwargs)
        if name != "learned":  # TransformerLens places the cached token wrongly there when it has no tokenizer
            assert torch.equal(expected, got)


def test_generation_with_learned_positions_and_no_tokenizer_gives_the_new_token_its_position():
    model = small_model()
    x = tokens(3, 5)
    cached = model.generate(x, max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False)
    whole = model.generate(x, max_new_tokens=6, do_sample=False, stop_at_eos=False, verbose=False, use_past_kv_cache=False)
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("init", ["identity"])
@pytest.mark.parametrize("name", ["learned", "rotary", "gqa"])
def test_a_shift_grafted_at_the_identity_changes_nothing(name, init):
    plain = plain_model(**VARIANTS[name])
    shift = KVShiftConfig(window=2, queries=True, init=init)
    ours = HookedKVTransformer.from_hooked_transformer(plain, kv_shift=shift)
    x = tokens(3, 11)
    assert torch.equal(plain(x), ours(x))
    assert ours.blocks[0].attn.q_shift_coef.shape == (ours.cfg.n_heads, 3)
    assert ours.blocks[0].attn.k_shift_coef.shape == (ours.cfg.n_kv_heads, 3)


@pytest.mark.parametrize("name", ["learned", "rotary", "gqa"])
def test_a_shifted_softmax_model_decodes_as_its_full_forward_pass(name):
    model = small_model(**{**VARIANTS[name], "dtype": torch.float64}, kv_shift=KVShiftConfig(window=3, queries=True))
    x = tokens(3, 11)
    full = model(x)
    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 3)
    pieces = [model(x[:, :2], past_kv_cache=cache), model(x[:, 2:7], past_kv_cache=cache)]
    pieces += [model(x[:, i : i + 1], past_kv_cache=cache) for i in range(7, 11)]
    assert relative_error(torch.cat(pieces, dim=1), full) < 1e-14  # the same float64 sums, about 60 terms each


def test_a_shifted_softmax_model_skips_left_padding():
    model = small_model(positional_embedding_type="rotary", dtype=torch.float64, kv_shift=KVShiftConfig(window=2))
    x = tokens(1, 7)
    padded = torch.cat([tokens(1, 4, seed=5), x], dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 7])
    assert relative_error(model(padded, attention_mask=mask)[:, 4:], model(x)) < 1e-14


def test_given_alibi_slopes_are_used():
    slopes = [0.5, 0.25, 0.0, 1.0, 2.0]
    model = small_model(positional_embedding_type="alibi", alibi_slopes=slopes)
    _, cache = model.run_with_cache(tokens(1, 4))
    bare = small_model(positional_embedding_type="alibi", alibi_slopes=[0.0] * 5)
    _, without = bare.run_with_cache(tokens(1, 4))
    difference = cache["attn_scores", 0][0, :, 3, :] - without["attn_scores", 0][0, :, 3, :]
    expected = -torch.tensor(slopes)[:, None] * torch.tensor([3.0, 2.0, 1.0, 0.0])
    torch.testing.assert_close(difference, expected, atol=1e-5, rtol=0)


def test_a_cache_that_a_plain_model_filled_is_refused():
    plain, ours = plain_model(), small_model(kv_shift=KVShiftConfig())
    cache = TransformerLensKeyValueCache.init_cache(plain.cfg, "cpu", 2)
    plain(tokens(2, 4), past_kv_cache=cache, attention_mask=torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(KVLensError, match="already holds 4 keys"):
        ours(tokens(2, 1), past_kv_cache=cache)


def test_the_global_generators_are_left_alone(monkeypatch):
    monkeypatch.setattr(
        torch.cuda, "manual_seed_all", lambda seed: pytest.fail("GPUs would be seeded, when they are first used")
    )
    before = torch.get_rng_state()
    small_model(seed=7)
    assert torch.equal(before, torch.get_rng_state())
