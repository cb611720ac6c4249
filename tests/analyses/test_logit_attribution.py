"""The summands' logits and the constant are the model's centered logits, whatever the final norm; folded, their difference is
TransformerLens'."""

import pytest
import torch
from analysis_models import tokens
from kvlens.analyses.logit_attribution import (
    LogitTarget,
    check_heads_write_directly,
    component_logits,
    constant_logits,
    final_scale,
    final_scale_name,
    logit_target,
)
from small_models import sharp

from kvlens import KVLensError

TOKENS = tokens(5)
NORMS = ["LN", "RMS, gated", "RMS at the end", "no norm"]
ROUNDING = 2 * 6 * 30 * 2.3e-16  # both ways, five components and a constant, products of 30 numbers


def model_of(name, folded):
    model = sharp(name)
    if folded:
        model.process_weights_(center_unembed=False, center_writing_weights=False)
        assert not hasattr(getattr(model, "ln_final", None), "w")
    return model


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_components_and_the_constant_are_the_logits(name, folded):
    if folded and name == "RMS at the end":
        with pytest.raises(KVLensError, match="fold_ln would change"):
            model_of(name, folded)
        return
    model = model_of(name, folded)
    logits, cache = model.run_with_cache(TOKENS[None])
    components, labels = cache.decompose_resid(return_labels=True, apply_ln=False)
    assert len(labels) == 5  # rotary positions: embed, and attention and MLP of two layers
    right, wrong = tokens(5, seed=1), tokens(5, seed=2)
    scale = final_scale(model, {final_scale_name(model): cache[final_scale_name(model)]})[0]
    for other in (None, wrong):
        parts = component_logits(model, components[:, 0], scale, right, other)
        constant = constant_logits(model, right, other)
        expected = LogitTarget(torch.arange(5), right, other).read(logits[0])
        size = parts.abs().sum(dim=0) + constant.abs()
        assert ((parts.sum(dim=0) + constant - expected).abs() < ROUNDING * size).all()
    if folded and name in ("LN", "RMS, gated"):
        ours = component_logits(model, components[:, 0], scale, right, wrong)
        theirs = cache.logit_attrs(components, right[None], wrong[None])[:, 0]
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", NORMS)
def test_a_heads_probe_is_its_results_logit(name):
    model = model_of(name, folded=False)
    _, cache = model.run_with_cache(TOKENS[None])
    target = logit_target(model, TOKENS, answer=3, rival=11)
    scale = final_scale(model, cache)[0]
    for layer in range(2):
        z = cache[f"blocks.{layer}.attn.hook_z"][0]
        results = torch.einsum("phd,hdm->hpm", z, model.blocks[layer].attn.W_O)[:, -1:]
        by_result = component_logits(model, results, scale[-1:], torch.tensor([3]), torch.tensor([11]))
        probes = target.probes(model, scale, layer)
        torch.testing.assert_close((z * probes).sum(-1)[-1], by_result[:, 0], rtol=1e-10, atol=1e-14)
        assert not probes[:-1].any()


def test_targets():
    model = sharp()
    following = logit_target(model, TOKENS)
    assert following.positions.tolist() == [0, 1, 2, 3]
    assert following.tokens.tolist() == TOKENS[1:].tolist()
    logits = torch.arange(2 * 5 * 17.0).reshape(2, 5, 17)
    chosen = logit_target(model, TOKENS, answer=3, rival=11)
    assert chosen.read(logits).tolist() == [[-8.0], [-8.0]]
    assert following.read(logits)[1].tolist() == [int(TOKENS[i + 1]) - 8 for i in range(4)]  # less the mean of 0..16


def test_heads_behind_a_norm_of_their_own_are_refused():
    model = sharp()
    check_heads_write_directly(model, "this")
    model.cfg.use_normalization_before_and_after = True
    with pytest.raises(KVLensError, match="this: .* passes through a norm"):
        check_heads_write_directly(model, "this")
