"""The fused form equals the eager form up to rounding, and runs wherever the pattern is not hooked."""

import threading

import pytest
import torch
from small_models import SOFTMAX, model_of, small_model, tokens

from kvlens import HookedKVTransformer, KVLensError

VARIANTS = {
    **{name: changes for name, changes in SOFTMAX.items() if name != "soft-capped"},
    "ungrouped": dict(n_heads=6, n_key_value_heads=2, ungroup_grouped_query_attention=True),
    "shortformer": dict(positional_embedding_type="shortformer"),
    "log-n": dict(use_logn_attn=True, train_seq_length=4),
    "bidirectional": dict(attention_dir="bidirectional"),
}
NOT_FUSED = {"linear_attention_form": dict(attention="linear"), "soft-capping": dict(attn_scores_soft_cap=5.0)}


def build(name="learned", **changes):
    return model_of("softmax", "learned", **VARIANTS[name], **changes).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_with_and_without_padding_and_gradients_agree(name):
    model, x = build(name).requires_grad_(True), tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :4], mask[2, 8:] = 0, 0
    results = []
    for form in ("eager", "fused"):
        model.set_softmax_form(form)
        model.zero_grad()
        model(x, return_type="loss").backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            results.append((model(x), model(x, attention_mask=mask), gradients))
    (eager, eager_padded, expected), (fused, fused_padded, gradients) = results
    near = dict(rtol=1e-12, atol=1e-12)  # float64 sums of at most 30 terms, through two layers
    torch.testing.assert_close(fused, eager, **near)
    torch.testing.assert_close(fused_padded[mask.bool()], eager_padded[mask.bool()], **near)
    assert bool(fused_padded.isfinite().all())
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-12)


def test_a_hooked_layer_runs_eagerly_and_the_others_stay_fused(fused_calls):
    model, x = build(), tokens(2, 9)
    expected = model.run_with_cache(x)[1]
    assert not fused_calls
    model.set_softmax_form("fused")
    _, cache = model.run_with_cache(x, names_filter=["blocks.1.attn.hook_pattern", "blocks.1.hook_resid_post"])
    assert len(fused_calls) == 1
    torch.testing.assert_close(cache["pattern", 1], expected["pattern", 1], rtol=1e-12, atol=1e-14)
    patched = model.run_with_hooks(x, fwd_hooks=[("blocks.0.attn.hook_pattern", lambda p, hook: torch.zeros_like(p))])
    assert not torch.allclose(patched, model(x))


def test_the_form_is_no_part_of_the_fingerprint_and_is_saved(tmp_path):
    model = build()
    before = model.fingerprint()
    model.set_softmax_form("fused")
    assert model.fingerprint() == before
    model.save(tmp_path / "m")
    assert HookedKVTransformer.load(tmp_path / "m").cfg.softmax_form == "fused"


@pytest.mark.parametrize("words", NOT_FUSED)
def test_what_the_kernel_cannot_do_runs_eagerly_and_is_refused_on_request(words, fused_calls):
    model = small_model(**NOT_FUSED[words])
    written(model, tokens(2, 7))
    assert not fused_calls
    with pytest.raises(KVLensError, match=words):
        model.set_softmax_form("fused")
    with pytest.raises(KVLensError, match=words), model.using_softmax_form("fused"):
        pass
    assert model.cfg.softmax_form == "eager"
    with pytest.raises(KVLensError, match=words):
        small_model(**NOT_FUSED[words], softmax_form="fused")


# --- for the duration of a call ---


def written(model, x, **options):
    return model.generate(x, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False, **options)


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@pytest.mark.parametrize("name", ["learned", "rotary, grouped", "alibi", "shifted", "local", "sinks"])
def test_text_is_generated_fused_and_is_the_same(name, use_past_kv_cache, fused_calls):
    model, x = build(name), tokens(3, 7)
    with model.using_softmax_form("eager"):
        eager = written(model, x, use_past_kv_cache=use_past_kv_cache)
    assert not fused_calls
    assert torch.equal(written(model, x, use_past_kv_cache=use_past_kv_cache), eager)
    assert len(fused_calls) == 2 * 5  # layers, tokens
    assert model.cfg.softmax_form == "eager"


def test_a_form_that_was_chosen_stays_and_a_call_may_ask_for_another(fused_calls):
    model, x = build(), tokens(2, 7)
    model.set_softmax_form("eager")
    written(model, x)
    assert not fused_calls
    with model.using_softmax_form("fused"):
        written(model, x)
    assert fused_calls
    fused_calls.clear()
    model.set_softmax_form("fused")
    with model.using_softmax_form("eager"), model.using_softmax_form():  # the block's form is a choice, too
        written(model, x)
    assert not fused_calls
    assert model.cfg.softmax_form == "fused"


def test_a_hooked_pattern_is_still_seen_while_text_is_generated(fused_calls):
    model, x, seen = build(), tokens(2, 7), []
    with model.hooks(fwd_hooks=[("blocks.1.attn.hook_pattern", lambda pattern, hook: seen.append(pattern.shape))]):
        written(model, x)
    assert len(seen) == 5
    assert len(fused_calls) == 5  # the other layer


def test_a_block_always_restores_the_softmax_form(fused_calls):
    model, other, x = build(), build(seed=4), tokens(2, 7)
    with pytest.raises(ZeroDivisionError), model.using_softmax_form():
        other(x)
        assert not fused_calls  # another model
        with model.using_softmax_form("eager"):
            model(x)
        assert not fused_calls
        model(x)
        assert fused_calls
        raise ZeroDivisionError
    fused_calls.clear()
    model(x)
    assert not fused_calls


def test_another_thread_runs_in_the_models_own_form(fused_calls):
    model, x, found = build(), tokens(2, 7), []
    with model.using_softmax_form("fused"):
        thread = threading.Thread(target=lambda: found.append(model(x)))
        thread.start()
        thread.join()
        assert not fused_calls
        torch.testing.assert_close(model(x), found[0], rtol=1e-12, atol=1e-12)
    assert len(fused_calls) == 2
