"""The fused form equals the eager form up to rounding, and runs wherever the pattern is not hooked."""

import threading

import pytest
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVLensError, KVShiftConfig

VARIANTS = {
    "learned": {},
    "rotary": dict(positional_embedding_type="rotary", rotary_dim=4),
    "adjacent rotary": dict(positional_embedding_type="rotary", rotary_adjacent_pairs=True),
    "gqa": dict(n_key_value_heads=2, positional_embedding_type="rotary"),
    "ungrouped gqa": dict(n_key_value_heads=2, ungroup_grouped_query_attention=True),
    "alibi": dict(positional_embedding_type="alibi"),
    "given alibi": dict(positional_embedding_type="alibi", alibi_slopes=[0.5, 0.25, 0.0, 1.0, 2.0, 3.0]),
    "shortformer": dict(positional_embedding_type="shortformer"),
    "no positions": dict(positional_embedding_type="none"),
    "attn_result": dict(use_attn_result=True),
    "split": dict(use_split_qkv_input=True),
    "qk norm": dict(use_qk_norm=True),
    "local": dict(use_local_attn=True, window_size=3, attn_types=["local", "global"]),
    "sinks": dict(use_attention_sinks=True),
    "log-n": dict(use_logn_attn=True, train_seq_length=4),
    "bidirectional": dict(attention_dir="bidirectional"),
    "scaled by layer": dict(scale_attn_by_inverse_layer_idx=True),
    "shift": dict(kv_shift=KVShiftConfig(window=2, queries=True), positional_embedding_type="rotary"),
    "norms over all heads, shift": dict(
        original_architecture="Olmo2ForCausalLM", kv_shift=KVShiftConfig(), n_key_value_heads=3
    ),
    "clamped": dict(clip_qkv=0.3),
    "shift, gqa": dict(kv_shift=KVShiftConfig(), n_key_value_heads=3, positional_embedding_type="rotary"),
}


def build(**changes):
    basic = dict(n_layers=2, d_model=30, n_heads=6, d_head=6, n_ctx=24, d_vocab=17, act_fn="gelu", d_mlp=20, seed=0)
    model = HookedKVTransformer(HookedKVTransformerConfig(**{**basic, "dtype": torch.float64, **changes}))
    if model.cfg.use_attention_sinks:
        for block in model.blocks:
            torch.nn.init.normal_(block.attn.sinks, generator=torch.Generator().manual_seed(1))
    return model.eval()


def tokens(batch, pos, seed=0):
    return torch.randint(0, 17, (batch, pos), generator=torch.Generator().manual_seed(seed))


def both_forms(model, run):
    eager = run()
    model.set_softmax_form("fused")
    fused = run()
    model.set_softmax_form("eager")
    return eager, fused


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_logits_agree_with_and_without_padding(name):
    model, x = build(**VARIANTS[name]), tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :4], mask[2, 8:] = 0, 0
    for attention_mask in (None, mask):
        eager, fused = both_forms(model, lambda m=attention_mask: model(x, attention_mask=m))
        real = mask.bool() if attention_mask is not None else torch.ones_like(mask).bool()
        # float64 sums of at most 30 terms, through two layers
        torch.testing.assert_close(fused[real], eager[real], rtol=1e-12, atol=1e-12)
        assert bool(fused.isfinite().all())


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_agree(name):
    model, x = build(**VARIANTS[name]), tokens(3, 11)

    def gradients():
        model.zero_grad()
        model(x, return_type="loss").backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    eager, fused = both_forms(model, gradients)
    assert eager.keys() == fused.keys()
    for key, gradient in eager.items():
        torch.testing.assert_close(fused[key], gradient, rtol=1e-10, atol=1e-12)


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


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(attention="linear"), "linear_attention_form"),
        (dict(attn_scores_soft_cap=5.0), "soft-capping"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_with_the_reason(changes, words):
    model = build(**changes)
    with pytest.raises(KVLensError, match=words):
        model.set_softmax_form("fused")
    assert model.cfg.softmax_form == "eager"
    with pytest.raises(KVLensError, match=words):
        build(**changes, softmax_form="fused")


def test_an_unknown_form_proposes_the_nearest():
    with pytest.raises(KVLensError, match="did you mean 'fused'"):
        build().set_softmax_form("fusd")


# --- for the duration of a call ---

# TransformerLens itself generates nothing with these: it needs causal attention, and no cache of theirs is right
NOT_GENERATED = ("bidirectional", "shortformer", "ungrouped gqa")


def written(model, x, **options):
    return model.generate(x, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False, **options)


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@pytest.mark.parametrize("name", [n for n in VARIANTS if n not in NOT_GENERATED])
def test_text_is_generated_fused_and_is_the_same(name, use_past_kv_cache, fused_calls):
    model, x = build(**VARIANTS[name]), tokens(3, 7)
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


def test_layers_that_cannot_be_fused_run_eagerly_and_are_refused_only_on_request(fused_calls):
    for changes in (dict(attn_scores_soft_cap=5.0), dict(attention="linear")):
        model = build(**changes)
        written(model, tokens(2, 7))
        with pytest.raises(KVLensError, match="cannot be used with this model"), model.using_softmax_form("fused"):
            pass
    assert not fused_calls
