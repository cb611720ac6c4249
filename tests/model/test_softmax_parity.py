"""With shift off, bias off and softmax, a HookedKVTransformer is TransformerLens' model: the same numbers in float64."""

import pytest
import torch
from precision import LAW, relative_error
from small_models import plain_model, small_model, tokens
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, KVLensError, KVShiftConfig

F64 = dict(dtype=torch.float64)
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
    "attn only": dict(attn_only=True),
}


def same(new, old):
    """The same number by another way; scores of keys that are not seen are -inf in both."""
    seen = old.isfinite()
    return torch.equal(seen, new.isfinite()) and (new[seen] - old[seen]).norm() <= 1e-11 * old[seen].norm()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_cache_and_gradients_are_those_of_transformer_lens(name):
    plain, ours = (build(**F64, **VARIANTS[name]) for build in (plain_model, small_model))
    for (left, a), (right, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert left == right
        assert torch.equal(a, b)
    x = tokens(3, 11)
    results = []
    for model in (plain, ours):
        _, cache = model.run_with_cache(x)
        model.zero_grad()
        logits = model(x)  # nothing is hooked now
        model.loss_fn(logits, x).backward()
        results.append((logits, dict(cache.items()), {n: p.grad for n, p in model.named_parameters()}))
    (logits, cache, grads), (our_logits, our_cache, our_grads) = results
    assert same(our_logits, logits)
    assert list(cache) == list(our_cache)
    assert [key for key in cache if not same(our_cache[key], cache[key])] == []
    whole = max(grad.norm() for grad in grads.values() if grad is not None)
    for key, grad in grads.items():  # that of b_K is zero by theory
        assert (grad is None) == (our_grads[key] is None)
        assert grad is None or (our_grads[key] - grad).norm() <= 1e-11 * whole, key


@pytest.mark.parametrize("name", ["learned", "rotary", "gqa", "alibi"])
def test_decoding_is_that_of_transformer_lens(name):
    plain, ours = (build(**F64, **VARIANTS[name]) for build in (plain_model, small_model))
    x, options = tokens(3, 5), dict(max_new_tokens=4, do_sample=False, stop_at_eos=False, verbose=False)
    expected = plain.generate(x, use_past_kv_cache=False, **options)
    assert torch.equal(ours.generate(x, use_past_kv_cache=False, **options), expected)
    assert torch.equal(ours.generate(x, **options), expected)
    if name != "learned":  # TransformerLens places the cached token wrongly there when it has no tokenizer
        assert torch.equal(plain.generate(x, **options), expected)


@pytest.mark.parametrize("name", ["learned", "rotary", "gqa"])
def test_a_shift_grafted_at_the_identity_changes_nothing(name):
    plain, x = plain_model(**F64, **VARIANTS[name]), tokens(3, 11)
    shift = KVShiftConfig(window=2, queries=True, init="identity")
    ours = HookedKVTransformer.from_hooked_transformer(plain, kv_shift=shift)
    assert same(ours(x), plain(x))
    assert ours.blocks[0].attn.q_shift_coef.shape == (ours.cfg.n_heads, 3)
    assert ours.blocks[0].attn.k_shift_coef.shape == (ours.cfg.n_kv_heads, 3)


def test_given_alibi_slopes_are_used():
    slopes = [0.5, 0.25, 0.0, 1.0, 2.0]
    model = small_model(positional_embedding_type="alibi", alibi_slopes=slopes, dtype=torch.float64)
    _, cache = model.run_with_cache(tokens(1, 4))
    bare = small_model(positional_embedding_type="alibi", alibi_slopes=[0.0] * 5, dtype=torch.float64)
    _, without = bare.run_with_cache(tokens(1, 4))
    difference = cache["attn_scores", 0][0, :, 3, :] - without["attn_scores", 0][0, :, 3, :]
    expected = -torch.tensor(slopes, dtype=torch.float64)[:, None] * torch.arange(3, -1, -1)
    assert relative_error(difference, expected) < LAW


def test_a_cache_that_a_plain_model_filled_is_refused():
    plain, ours = plain_model(), small_model(kv_shift=KVShiftConfig())
    cache = TransformerLensKeyValueCache.init_cache(plain.cfg, "cpu", 2)
    plain(tokens(2, 4), past_kv_cache=cache, attention_mask=torch.ones(2, 4, dtype=torch.long))
    with pytest.raises(KVLensError, match="already holds 4 keys"):
        ours(tokens(2, 1), past_kv_cache=cache)
