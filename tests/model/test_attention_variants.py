"""Attention variants inside models: against the loops, in training, decoding, conversion and weight processing; refusals."""

import pytest
import torch
from precision import LAW
from small_models import ATTENTION_VARIANTS as VARIANTS
from small_models import PARALLEL, WITHOUT_BIAS, model_of, relative_error, small_model, tokens
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

from kvlens import HookedKVTransformer, KVLensError, convert_prompt
from kvlens.model import AttentionVariantConfig, Negative, Regularised
from kvlens.ops.attention_variants import naive_negative, naive_regularized, naive_ridge

BUILD = ("softmax", "linear")


def variant_model(kind, variant, **changes):
    return model_of(kind, "self-attention form", attention_variant=variant, **changes)


def expected_z(model, x):
    """z of layer 0 by the loops, from what the hooks show before it."""
    kept, at = model.cfg.attention_variant, "blocks.0.attn."
    _, cache = model.run_with_cache(x)

    def per_head(name):
        t = cache[at + name]
        return t.repeat_interleave(model.cfg.n_heads // t.shape[2], dim=2).transpose(1, 2)

    v = per_head("hook_v_augmented" if kept.augmented is not None and kept.augmented.values else "hook_v_shifted")
    linear = model.cfg.attention == "linear"
    q, k = per_head("hook_rot_q"), per_head("hook_rot_k")
    products = q @ k.transpose(-1, -2)
    z = torch.empty_like(v)
    for b, h in [(b, h) for b in range(v.shape[0]) for h in range(v.shape[1])]:
        if kept.ridge is not None:
            scale = 1.0 if linear else model.blocks[0].attn.attn_scale
            kernel, at_query = (k @ k.transpose(-1, -2))[b, h] / scale, products[b, h] / scale
            kernels = (kernel, at_query) if linear else (kernel.exp(), at_query.exp())
            z[b, h] = naive_ridge(*kernels, v[b, h], kept.ridge.strength)
            continue
        pattern, scores = cache[at + "hook_pattern"][b, h], cache[at + "hook_attn_scores"][b, h]
        rest = pattern @ v[b, h]
        if kept.negative is not None:
            rest = naive_negative(pattern, scores, v[b, h], kept.negative.k, kept.negative.beta, kept.negative.per)
        if kept.regularised is not None:
            plain = pattern @ v[b, h]
            whole = naive_regularized(pattern, v[b, h], kept.regularised.alpha, kept.regularised.form)
            rest = whole if kept.negative is None else rest + whole - plain
        z[b, h] = rest
    return z.transpose(1, 2), cache[at + "hook_z"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("name", VARIANTS)
def test_heads_against_the_loops(kind, name, shared):
    slow, fast = expected_z(shared(kind, name), tokens(2, 9))
    assert relative_error(fast, slow) < LAW


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_match_finite_differences(kind, name):
    """Along one random direction in all weights; h^2 and rounding / h are both below 1e-6 here."""
    model, x = model_of(kind, name), tokens(1, 6)
    parameters = [p for _, p in sorted(model.named_parameters())]
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    start, h = [p.detach().clone() for p in parameters], 1e-5

    def loss_at(t):
        for p, s, d in zip(parameters, start, directions, strict=True):
            p.data.copy_(s + t * d)
        return model(x, return_type="loss")

    numeric = float(loss_at(h) - loss_at(-h)) / (2 * h)
    for p in parameters:
        p.requires_grad_(True)
    gradients = torch.autograd.grad(loss_at(0.0), parameters, allow_unused=True)
    analytic = sum(float((g * d).sum()) for g, d in zip(gradients, directions, strict=True) if g is not None)
    assert analytic == pytest.approx(numeric, rel=1e-5, abs=1e-7)


def test_ridge_does_not_normalize_for_any_normalizer():
    divided, plain = (variant_model("linear", VARIANTS["ridge"], normalizer=normalizer) for normalizer in ("kernel", "none"))
    assert relative_error(plain(tokens(2, 9)), divided(tokens(2, 9))) < LAW


@pytest.mark.parametrize("per", ["query", "label"])
def test_decoding_linear_attention_with_decay_and_negatives(per):
    """gamma^{i-j} between a query and tokens of earlier pieces."""
    changes = dict(decay="retnet", normalizer="none", positional_embedding_type="none")
    model = variant_model("linear", AttentionVariantConfig(negative=Negative(k=3, beta=0.4, per=per)), **changes)
    x, cache = tokens(2, 9), TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 2)
    pieces = [model(x[:, a:b], past_kv_cache=cache) for a, b in [(0, 4), (4, 5), (5, 9)]]
    assert relative_error(torch.cat(pieces, dim=1), model(x)) < LAW


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("name", WITHOUT_BIAS)
def test_conversion_is_refused_with_its_reason(kind, name, shared):
    with pytest.raises(KVLensError, match=r"has no KV bias: (negative samples are chosen|ridge attention also needs)"):
        convert_prompt(shared(kind, name), tokens(1, 7)[0])


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_fires_its_own_hooks_and_they_act(kind, name, shared):
    model, x, kept = shared(kind, name), tokens(1, 9), VARIANTS[name]
    augmented = kept.augmented
    expected = {
        "hook_k_augmented": augmented is not None and augmented.keys,
        "hook_v_augmented": augmented is not None and augmented.values,
        "hook_z_own": kept.regularised is not None,
        "hook_z_negative": kept.negative is not None,
    }
    plain, cache = model.run_with_cache(x)
    assert {leaf: f"blocks.1.attn.{leaf}" in cache for leaf in expected} == expected
    for leaf in [*(leaf for leaf, fires in expected.items() if fires), "hook_z"]:
        hook = (f"blocks.0.attn.{leaf}", lambda t, hook: t * 0)
        assert relative_error(model.run_with_hooks(x, fwd_hooks=[hook]), plain) > 1e-4, leaf  # it acts


@pytest.mark.parametrize("kind", BUILD)
def test_variants_that_are_nothing_are_plain_attention(kind):
    x = tokens(2, 9)
    plain = variant_model(kind, None)
    for variant in [
        dict(regularised=dict(alpha=0.0)),
        dict(regularised=dict(alpha=0.0, form="one_step")),
        dict(negative=dict(k=2, beta=0.0)),
    ]:
        assert relative_error(variant_model(kind, variant)(x), plain(x)) < LAW
    grafted = HookedKVTransformer.from_hooked_transformer(plain, attention_variant=AttentionVariantConfig(augmented=PARALLEL))
    # its last layer starts at 0
    assert relative_error(grafted(x), plain(x)) < LAW


@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("changes", [{}, dict(use_split_qkv_input=True), dict(ungroup_grouped_query_attention=True)])
def test_an_mlp_beside_a_projection_reads_what_the_projection_reads(kind, changes):
    """DUAL app. E.5: W x + c W_2 gelu(W_1 x), where x is the normed stream and W_1 as wide as two of the projections."""
    model, x = model_of(kind, "augmented in parallel", **changes), tokens(2, 9)
    _, cache = model.run_with_cache(x)
    attn, normed = model.blocks[0].attn, model.blocks[0].ln1(cache["blocks.0.hook_resid_pre"])
    for name, mlp in (("k", attn.augment_k), ("v", attn.augment_v)):
        first, second = mlp.weights
        assert first.shape == (1, 36, 2 * 2 * 6) and second.shape == (2, 24, 6)
        beside = torch.einsum("bpi,hid->bphd", torch.nn.functional.gelu(normed @ first[0]), second)
        shifted, found = (cache[f"blocks.0.attn.hook_{name}_{stage}"] for stage in ("shifted", "augmented"))
        beside = beside.repeat_interleave(shifted.shape[2] // 2, dim=2)
        assert relative_error(found, shifted + 0.5 * beside) < LAW


def test_every_parameter_of_a_variant_is_drawn_and_trains():
    model = small_model(attention_variant=VARIANTS["all but ridge"])
    for name, parameter in model.named_parameters():
        if ".augment_" in name:
            assert bool(torch.isfinite(parameter).all()) and float(parameter.detach().abs().max()) > 0, name
    model(tokens(2, 9), return_type="loss").backward()
    assert all(float(p.grad.abs().max()) > 0 for name, p in model.named_parameters() if ".augment_" in name)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("kind", BUILD)
@pytest.mark.parametrize("name", VARIANTS)
def test_weight_processing_keeps_the_output_or_is_refused(kind, name):
    model, x, augmented = model_of(kind, name, kv_shift=None), tokens(2, 9), VARIANTS[name].augmented
    before = model(x).log_softmax(-1)
    if augmented == PARALLEL:
        with pytest.raises(KVLensError, match="fold_ln would change .* the MLP beside a projection"):
            model.process_weights_()
        model.process_weights_(fold_ln=False)
    elif name in ("normalised, negative alpha", "augmented keys") and kind == "softmax":
        model.process_weights_(fold_value_biases=True)
    else:
        with pytest.raises(KVLensError, match="fold_value_biases would change"):
            model.process_weights_(fold_value_biases=True)
        model.process_weights_()
    assert relative_error(model(x).log_softmax(-1), before) < LAW
    with pytest.raises(KVLensError, match="refactor_factored"):
        model.process_weights_(refactor_factored_attn_matrices=True)


def test_fingerprints():
    plain = variant_model("linear", None)
    assert "attention_variant" not in plain.fingerprint().rest
    weaker = variant_model("linear", AttentionVariantConfig(regularised=Regularised(0.1)))
    with pytest.raises(KVLensError):
        weaker.attach_kv_bias(convert_prompt(plain, tokens(1, 9)))
