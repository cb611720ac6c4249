"""Torch's kernel and the base's steps give the same numbers; the kernel runs wherever scores and pattern are not hooked."""

import pytest
import torch
from precision import LAW
from small_models import ATTENTION_VARIANTS, BLOCKS, SOFTMAX, by_steps, model_of, relative_error, small_model, tokens

from kvlens import convert_prompt

VARIANTS = {
    **{name: changes for name, changes in SOFTMAX.items() if name != "soft-capped"},
    "ungrouped": dict(n_heads=6, n_key_value_heads=2, ungroup_grouped_query_attention=True),
    "shortformer": BLOCKS["shortformer"],
    "shortformer, split": dict(positional_embedding_type="shortformer", use_split_qkv_input=True),
    "log-n": dict(use_logn_attn=True, train_seq_length=4),
    "bidirectional": dict(attention_dir="bidirectional"),
}
NOT_BY_KERNEL = {
    "linear": dict(attention="linear"),
    "soft-capped": dict(attn_scores_soft_cap=5.0),
    "negative": dict(attention_variant=ATTENTION_VARIANTS["negative per query"]),
    "ridge": dict(attention_variant=ATTENTION_VARIANTS["ridge"]),
}


def build(name="learned", **changes):
    return model_of("softmax", "learned", **VARIANTS[name], **changes).eval()


def assert_law(new, old):
    assert relative_error(new, old) < LAW


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_with_and_without_padding_and_gradients_agree(name, fused_calls):
    model, x = build(name).requires_grad_(True), tokens(3, 11)
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :4], mask[2, 8:] = 0, 0

    def found():
        model.zero_grad()
        model(x, return_type="loss").backward()
        with torch.no_grad():
            return (
                model(x),
                model(x, attention_mask=mask),
                {n: p.grad for n, p in model.named_parameters() if p.grad is not None},
            )

    logits, padded, gradients = found()
    assert fused_calls
    fused_calls.clear()
    with by_steps(model):
        expected, expected_padded, expected_gradients = found()
    assert not fused_calls
    assert_law(logits, expected)
    assert_law(padded[mask.bool()], expected_padded[mask.bool()])
    assert bool(padded.isfinite().all())
    whole = max(x.norm() for x in expected_gradients.values())
    for n, gradient in expected_gradients.items():  # that of b_K is zero by theory
        assert (gradients[n] - gradient).norm() <= 1e-11 * whole, n


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["attn_scores", "pattern"])
def test_a_hooked_layer_alone_computes_scores_and_pattern(name, which, fused_calls):
    model, x = build(), tokens(2, 9)
    hooks = {f"{which}_hooks": [(f"blocks.1.attn.hook_{name}", lambda x, hook: None)]}
    expected = model(x)
    assert len(fused_calls) == 2
    fused_calls.clear()
    assert_law(model.run_with_hooks(x, **hooks), expected)
    assert len(fused_calls) == 1
    fused_calls.clear()
    hooks = [(f"blocks.0.attn.hook_{name}", lambda x, hook: torch.zeros_like(x))]
    assert relative_error(model.run_with_hooks(x, fwd_hooks=hooks), expected) > 1e-3
    assert len(fused_calls) == 1


@pytest.mark.parametrize("name", ["z", "q", "resid_post", "mlp_out"])
def test_other_hooks_leave_the_kernel(name, fused_calls):
    model = build()
    model.run_with_cache(tokens(2, 9), names_filter=lambda point: point.endswith(f"hook_{name}"))
    assert len(fused_calls) == 2


@pytest.mark.parametrize("name", NOT_BY_KERNEL)
def test_what_the_kernel_cannot_compute_has_its_own_form(name, fused_calls):
    written(small_model(**NOT_BY_KERNEL[name]), tokens(2, 7))
    assert not fused_calls


def written(model, x, **options):
    return model.generate(x, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False, **options)


@pytest.mark.parametrize("use_past_kv_cache", [True, False])
@pytest.mark.parametrize("name", ["learned", "rotary, grouped", "alibi", "shifted", "local", "sinks", "shortformer"])
def test_generated_text_is_the_same(name, use_past_kv_cache, fused_calls):
    model, x = build(name), tokens(3, 7)
    new = written(model, x, use_past_kv_cache=use_past_kv_cache)
    assert len(fused_calls) == 2 * 5  # layers, tokens
    with by_steps(model):
        assert torch.equal(written(model, x, use_past_kv_cache=use_past_kv_cache), new)


@pytest.mark.parametrize("name", ["shortformer", "shortformer, split"])
def test_a_prompt_is_converted_where_keys_alone_have_positions(name):
    model, x = build(name), tokens(2, 19)
    expected = model(x)[:, 12:]
    with model.kv_bias(convert_prompt(model, x[:, :12])):
        assert_law(model(x[:, 12:]), expected)
        assert_law(model.logits_on(x[:, 12:], 3), expected[:, -3:])
