"""A kernel normalizer of 0: if nothing is visible the output is 0 with finite gradients; any other zero is a located error."""

import pytest
import torch
from precision import relative_error, share
from small_models import linear_model, tokens

from kvlens import KVLensError, KVShiftConfig, convert_prompt


def unshifted(**changes):
    defaults = dict(kv_shift=None, dtype=torch.float32, n_ctx=32)
    return linear_model(**{**defaults, "positional_embedding_type": "none", **changes})


def as_induction_head(model):
    """KVSA's own: alpha = (0, 1), so that the first token has a key of zeros."""
    for block in model.blocks:
        with torch.no_grad():
            block.attn.k_shift_coef.copy_(torch.tensor([0.0, 1.0]).expand_as(block.attn.k_shift_coef))
    return model


@pytest.mark.parametrize("form", ["parallel", "chunked", "recurrent"])
def test_a_key_of_zeros_gives_an_output_of_zeros_and_finite_gradients(form):
    model = as_induction_head(unshifted(feature_map="identity", kv_shift=KVShiftConfig(), linear_attention_form=form))
    with torch.no_grad():
        z = model.run_with_cache(tokens(2, 5), names_filter="blocks.0.attn.hook_z")[1]["blocks.0.attn.hook_z"]
    assert bool((z[:, 0] == 0).all())
    if form == "parallel":
        pattern = model.run_with_cache(tokens(2, 5))[1]["pattern", 0]
        assert bool((pattern[:, :, 0] == 0).all() and pattern.isfinite().all())
    loss = model(tokens(2, 5), return_type="loss")
    loss.backward()
    assert bool(loss.isfinite())
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def test_a_normalizer_that_is_zero_alone_names_layer_head_and_position():
    model = unshifted(feature_map="identity")

    def cancel(phi_k, hook):
        """The second token's key is minus the first one's."""
        phi_k = phi_k.clone()
        phi_k[:, 1, 1] = -phi_k[:, 0, 1]
        return phi_k

    with pytest.raises(KVLensError, match=r"layer 1, head 1, position 1: the normalizer .* 'identity' cancel"):
        model.run_with_hooks(tokens(2, 4), fwd_hooks=[("blocks.1.attn.hook_phi_k", cancel)])


def scaled_to(model, score):
    """The model with queries and keys that meet at a largest |q.k / scale| of ``score`` in its first layer."""
    _, cache = model.run_with_cache(tokens(2, 9), names_filter=["blocks.0.attn.hook_q", "blocks.0.attn.hook_k"])
    q, k = (cache[f"blocks.0.attn.hook_{x}"] for x in "qk")
    largest = float(torch.einsum("bqhd,bkhd->bhqk", q, k).abs().max()) / model.blocks[0].attn.attn_scale
    with torch.no_grad():
        for block in model.blocks:
            for x in "QK":
                getattr(block.attn, f"W_{x}").mul_((score / largest) ** 0.5)
    return model


def logits_and_gradients(model, seed=0, other=None):
    """Logits, all gradients in one row, and the smallest normalizer; with queries and keys as another model computes them."""
    normalizers = []
    hooks = [(lambda name: name.endswith("hook_normalizer"), lambda n, hook: normalizers.append(n.min().item()))]
    if other is not None:
        _, given = other.run_with_cache(tokens(2, 9, seed), names_filter=lambda name: name.endswith(("hook_q", "hook_k")))
        hooks += [(name, lambda x, hook: x + (given[hook.name] - x).detach()) for name in given]
    model.zero_grad()
    logits, loss = model.run_with_hooks(tokens(2, 9, seed), return_type="both", fwd_hooks=hooks)
    loss.backward()
    gradients = torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])
    return logits, gradients, min(normalizers)


@pytest.mark.parametrize(("feature_map", "score"), [("random", 300.0), ("hedgehog", 300.0), ("hedgehog", 2000.0)])
def test_features_of_exponentials_hold_large_scores_in_a_float32_model(feature_map, score):
    """Both in float64; the weights of both are float32's. Where float32's features gave 0 / 0, float64's are far from 0."""
    model = scaled_to(unshifted(feature_map=feature_map, n_random_features=16), score)
    wide = unshifted(feature_map=feature_map, n_random_features=16, dtype=torch.float64)
    wide.load_state_dict(model.state_dict())
    found, exact = logits_and_gradients(model), [logits_and_gradients(wide, seed) for seed in range(4)]
    rounded = [logits_and_gradients(wide, seed, other=model) for seed in range(4)]
    for of in range(2):
        errors = [relative_error(a[of], b[of]) for a, b in zip(rounded, exact, strict=True)]
        assert share(relative_error(found[of], exact[0][of]), errors) < 1
    assert found[2] > 1e-290
    bias = convert_prompt(model, tokens(2, 9)[0])
    assert bool(bias.stacked("b_kv").isfinite().all()) and bool((bias.stacked("b_d").sum(dim=-1) > 0).all())


@pytest.mark.parametrize(
    ("feature_map", "score", "remedy"),
    [("random", 5e3, "use smaller"), ("hedgehog", 1e6, "use smaller"), ("elu_plus_one", 1e7, "accumulation_dtype='float64'")],
)
@pytest.mark.parametrize("names", [[], ["hook_pattern"]])
def test_features_that_underflow_are_an_error_that_names_layer_head_and_cause(feature_map, score, remedy, names):
    """Not 0 without a word: a token always sees itself under a positive map."""
    model = scaled_to(unshifted(feature_map=feature_map, n_random_features=16), score)
    with pytest.raises(
        KVLensError, match=rf"layer \d, head \d, position \d: the normalizer .* underflows.*\n?.*{feature_map}.*{remedy}"
    ):
        model.run_with_cache(tokens(2, 30), names_filter=lambda name: any(name.endswith(hook) for hook in names))
    with pytest.raises(KVLensError, match=r"layer \d, head .* underflows"):
        convert_prompt(model, tokens(2, 30)[0])


def test_keys_that_a_hook_takes_away_are_no_underflow():
    model = unshifted(feature_map="random", n_random_features=16)
    hooks = [("blocks.0.attn.hook_phi_k", lambda phi, hook: phi * 0), ("blocks.0.attn.hook_z", lambda z, hook: seen.append(z))]
    seen = []
    model.run_with_hooks(tokens(2, 5), fwd_hooks=hooks)
    assert bool((seen[0] == 0).all())
