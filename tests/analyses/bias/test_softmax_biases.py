"""The analyses of a bias on softmax models: parts add up to the model's output, and removals match real ones."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from analysis_models import SOFTMAX, softmax_model, tokens

from kvlens import combine, convert_prompt
from kvlens.analyses import (
    bias_ablation,
    bias_by_head,
    bias_by_layer,
    bias_decomposition,
    bias_effects,
    bias_positions,
    bias_singular_values,
)

PROMPT, TEXT = tokens(6), tokens(5)


@pytest.mark.parametrize("by", ["attended", "source"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_positions_are_the_shares_of_the_patterns_own_keys(name, by):
    model = softmax_model(name)
    frame = bias_positions(model, PROMPT, TEXT, by=by, at=range(5))
    sums = frame.groupby(["layer", "head", "position"])["output_share"].sum()
    np.testing.assert_allclose(sums, 1.0, rtol=1e-9)
    if by == "attended":
        _, cache = model.run_with_cache(torch.cat([PROMPT, TEXT])[None])
        of_prompt = frame[(frame["part"] == "prompt") & (frame["layer"] == 1)]["attention"].to_numpy()
        expected = cache["pattern", 1][0, :, 6:, :6].detach().numpy().reshape(-1)
        np.testing.assert_allclose(of_prompt, expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("name", SOFTMAX)
def test_removing_a_head_is_selecting_the_others(name):
    model = softmax_model(name)
    bias = convert_prompt(model, PROMPT)
    pairs = [(layer, head) for layer in range(bias.n_layers) for head in range(bias.n_heads)]
    with torch.no_grad(), model.kv_bias(bias):
        whole = model(TEXT[None]).log_softmax(-1)
    with torch.no_grad(), model.kv_bias(bias.select(heads=pairs[1:])):
        less = model(TEXT[None]).log_softmax(-1)
    expected = float((whole.exp() * (whole - less)).sum(-1).mean())
    found = bias_ablation(model, bias, TEXT, [pairs[:1]]).loc[0, "kl"]
    assert found == pytest.approx(expected, rel=1e-9)
    assert bias_by_head(model, PROMPT, TEXT).loc[0, "zero_kl"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["learned positions", "rotary, grouped"])
def test_removing_a_query_head_is_blinding_it_to_the_prompt(name):
    """By hand, without a bias: the text's queries of that head see no key of the prompt in front of it."""
    model = softmax_model(name)
    pairs = [(layer, head) for layer in range(2) for head in range(model.cfg.n_heads)]
    whole, n = torch.cat([PROMPT, TEXT])[None], len(PROMPT)
    seeing = model(whole)[0, n:].log_softmax(-1)
    kl = []
    for layer, head in pairs:

        def blind(scores, hook, head=head):
            scores[:, head, n:, :n] = -torch.inf

        hooks = [(f"blocks.{layer}.attn.hook_attn_scores", blind)]
        blinded = model.run_with_hooks(whole, fwd_hooks=hooks)[0, n:].log_softmax(-1)
        kl.append(float((seeing.exp() * (seeing - blinded)).sum(-1).mean()))
    assert bias_ablation(model, PROMPT, TEXT, [[pair] for pair in pairs])["kl"].tolist() == pytest.approx(kl, rel=1e-8)
    assert bias_effects(model, PROMPT, TEXT, parts=["bias"])["kl"].tolist() == pytest.approx(kl, rel=1e-8)
    assert bias_by_head(model, PROMPT, TEXT)["zero_kl"].tolist() == pytest.approx(kl, rel=1e-8)


@pytest.mark.parametrize("name", SOFTMAX)
def test_every_query_head_has_its_rows(name):
    model = softmax_model(name)
    n = model.cfg.n_layers * model.cfg.n_heads
    bias = convert_prompt(model, PROMPT)
    assert len(bias_by_head(model, PROMPT, TEXT, bias=bias)) == n
    assert len(bias_singular_values(model, bias)) == n * min(bias.d_phi, model.cfg.d_head)
    assert set(bias_decomposition(model, PROMPT, TEXT)["head"]) == set(range(model.cfg.n_heads))
    assert len(bias_effects(model, PROMPT, TEXT, parts=["bias"])) == n


@pytest.mark.parametrize("name", SOFTMAX)
def test_other_prompts_instead_of_a_heads_own(name):
    """Each against a bias put together by sums: the rest of this prompt, and that head of the others."""
    model = softmax_model(name)
    bias, others = convert_prompt(model, PROMPT), convert_prompt(model, tokens(12, seed=4).reshape(2, 6))
    methods = ["resample", "mean"]
    frame = bias_effects(model, bias, TEXT, methods=methods, parts=["bias"], references=others, by="layer")
    everything = bias_effects(model, bias, TEXT, methods=methods, parts=["bias"], references=others, by="model")
    with torch.no_grad(), model.kv_bias(bias):
        whole = model(TEXT[None]).log_softmax(-1)[0]
    kl = frame.set_index(["method", "reference", "layer"])["kl"]
    for layer, rest in ((0, [1]), (1, [0])):
        for i in range(2):
            taken = others.select_prompt(i).select(layers=[layer])
            with torch.no_grad(), model.kv_bias(combine(bias.select(layers=rest), taken, shift_state="first")):
                less = model(TEXT[None]).log_softmax(-1)[0]
            assert kl["resample", i, layer] == pytest.approx(float((whole.exp() * (whole - less)).sum(-1).mean()), rel=1e-8)
    assert everything["kl"].gt(0).all() and len(everything) == 3
    itself = bias_effects(model, bias, TEXT, methods=methods, references=convert_prompt(model, PROMPT[None]), by="model")
    np.testing.assert_allclose(itself["kl"], 0, atol=1e-12)


def test_sizes_are_of_what_the_stored_numbers_stand_for():
    """exp(log_scale) times them: the same bias with its scale stored elsewhere has the same sizes, and none overflows."""
    model = softmax_model("rotary, grouped")
    bias = convert_prompt(model, PROMPT, method="random", n_features=8)
    assert bias.log_scale.unique().numel() > 1
    moved = torch.linspace(-3.0, 5.0, bias.log_scale.numel(), dtype=bias.b_KV.dtype).view_as(bias.log_scale)
    smaller = moved.exp()[:, :, None]
    same = replace(bias, b_KV=bias.b_KV / smaller[..., None], b_D=bias.b_D / smaller, log_scale=bias.log_scale + moved)
    first, second = (bias_by_head(model, PROMPT, TEXT, bias=each) for each in (bias, same))
    np.testing.assert_allclose(second[["b_kv_norm", "b_d_norm"]], first[["b_kv_norm", "b_d_norm"]], rtol=1e-12)
    whole = (bias.b_KV * bias.log_scale.exp()[..., None, None]).repeat_interleave(3, dim=1).norm(dim=(-2, -1))
    np.testing.assert_allclose(first["b_kv_norm"], whole.flatten(), rtol=1e-12)
    values = (
        bias_singular_values(model, bias)
        .groupby(["layer", "head"])["singular_value"]
        .agg(lambda sigma: (sigma**2).sum() ** 0.5)
    )
    np.testing.assert_allclose(values, whole.flatten(), rtol=1e-12)
    by_layer = bias_by_layer(model, PROMPT, TEXT, bias=bias)["b_kv_norm"]
    np.testing.assert_allclose(by_layer, whole.norm(dim=1), rtol=1e-12)
    enormous = bias_singular_values(model, replace(bias, log_scale=bias.log_scale + 1e4))
    assert np.isfinite(enormous[["singular_value", "energy_share"]]).all(axis=None)
