"""The summands' logits and the constant are the model's centered logits, whatever the final norm; folded, their difference is
TransformerLens'. The parts of a layer add up, and each part's logit is what the model loses when the part is taken out of its
direct path.
"""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import PENCIL_PROMPT, PENCIL_TEXT, VARIANTS, centered, pencil_model, tokens
from kvlens.analyses.batch.work import load_analysis
from kvlens.analyses.declaration import Record
from kvlens.analyses.logit_attribution import (
    COLUMNS,
    LogitTarget,
    check_heads_write_directly,
    component_logits,
    constant_logits,
    final_scale,
    final_scale_name,
    layer_contributions,
    logit_targets,
    residual_directions,
)
from small_models import sharp

from kvlens import KVLensError, analyses, convert_prompt

TOKENS = tokens(5)
NORMS = ["LN", "RMS, gated", "RMS at the end", "no norm"]
ROUNDING = 2 * 6 * 30 * 2.3e-16  # both ways, five components and a constant, products of 30 numbers


def normed(name, folded):
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
            normed(name, folded)
        return
    model = normed(name, folded)
    logits, cache = model.run_with_cache(TOKENS[None])
    components, labels = cache.decompose_resid(return_labels=True, apply_ln=False)
    assert len(labels) == 5  # rotary positions: embed, and attention and MLP of two layers
    right, wrong = tokens(5, seed=1), tokens(5, seed=2)
    scale = final_scale(model, {final_scale_name(model): cache[final_scale_name(model)]})[0]
    for other in (None, wrong):
        parts = component_logits(components[:, 0], scale, residual_directions(model, right, other))
        constant = constant_logits(model, right, other)
        expected = LogitTarget(TOKENS, torch.arange(5), right, other).read(logits[0])
        size = parts.abs().sum(dim=0) + constant.abs()
        assert ((parts.sum(dim=0) + constant - expected).abs() < ROUNDING * size).all()
    if folded and name in ("LN", "RMS, gated"):
        ours = component_logits(components[:, 0], scale, residual_directions(model, right, wrong))
        theirs = cache.logit_attrs(components, right[None], wrong[None])[:, 0]
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", NORMS)
def test_a_heads_probe_is_its_results_logit(name):
    model = normed(name, folded=False)
    _, cache = model.run_with_cache(TOKENS[None])
    [target] = logit_targets(model, TOKENS, answer=3, rival=11)
    scale = final_scale(model, cache)[0]
    directions = residual_directions(model, torch.tensor([3]), torch.tensor([11]))
    for layer, probes in enumerate(target.probes(model, scale)):
        z = cache[f"blocks.{layer}.attn.hook_z"][0]
        results = torch.einsum("phd,hdm->hpm", z, model.blocks[layer].attn.W_O)[:, -1:]
        by_result = component_logits(results, scale[-1:], directions)
        torch.testing.assert_close((z * probes).sum(-1)[-1], by_result[:, 0], rtol=1e-10, atol=1e-14)
        assert not probes[:-1].any()


@pytest.mark.parametrize("name", ["layer_contributions", "bias_positions", "bias_decomposition"])
def test_the_unembedding_is_read_once_for_all_layers(name, monkeypatch):
    """Its mean over the vocabulary took half of the time of an analysis."""
    read = []
    monkeypatch.setattr(
        "kvlens.analyses.logit_attribution.residual_directions",
        lambda model, tokens, rival=None: read.append(1) or residual_directions(model, tokens, rival),
    )
    getattr(analyses, name)(sharp(), tokens(6, seed=1), TOKENS)
    assert len(read) == 1


def test_targets():
    model = sharp()
    [following] = logit_targets(model, TOKENS)
    assert following.positions.tolist() == [0, 1, 2, 3]
    assert following.tokens.tolist() == TOKENS[1:].tolist()
    logits = torch.arange(2 * 5 * 17.0).reshape(2, 5, 17)
    [chosen] = logit_targets(model, TOKENS, answer=3, rival=11)
    assert chosen.read(logits).tolist() == [[-8.0], [-8.0]]
    assert following.read(logits)[1].tolist() == [int(TOKENS[i + 1]) - 8 for i in range(4)]  # less the mean of 0..16


def test_heads_behind_a_norm_of_their_own_are_refused():
    model = sharp()
    check_heads_write_directly(model, "this")
    model.cfg.use_normalization_before_and_after = True
    with pytest.raises(KVLensError, match="this: .* passes through a norm"):
        check_heads_write_directly(model, "this")


PROMPT, TEXT = tokens(7), tokens(5, seed=1)
MODELS = [
    *VARIANTS,
    "side by side",
    "no norm, attention only",
    "folded LN",
    "RMS, gated",
    "folded RMS",
    "RMS at the end",
    "trained bias",
    "softmax, learned",
    "softmax, shifted",
    "softmax, rotary, grouped",
    "softmax, shortformer",
]


def reading(model):
    """Attach the prompt if it can be a bias; otherwise return the tokens before the text."""
    if model.cfg.attention == "softmax":
        return PROMPT
    if not model.cfg.trainable_kv_bias:
        model.attach_kv_bias(convert_prompt(model, PROMPT))
    return PROMPT[:0]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_add_up_and_heads_to_their_layer(name):
    model = sharp(name)
    before = reading(model)
    logits = centered(model(torch.cat([before, TEXT])[None])[0, -5:])
    chosen_tokens, tolerance = [11, 0, 16, 5, 2], 1e-12
    frames = [layer_contributions(model, before, TEXT, tokens=chosen_tokens, per_head=per_head) for per_head in (False, True)]
    for frame in frames:
        sums = frame.groupby(["position", "target", "target_token"], sort=False)[["logit", "residual_share"]].sum()
        chosen = torch.tensor(sums.xs("chosen", level="target")["logit"].to_numpy()).reshape(5, 5)
        assert float(((chosen - logits[:, chosen_tokens]).norm(dim=-1) / logits.norm(dim=-1)).max()) < tolerance
        following = sums.xs("next", level="target")["logit"].to_numpy()
        expected = logits[torch.arange(4), TEXT[1:]].numpy()
        np.testing.assert_allclose(following, expected, atol=tolerance * float(logits.norm(dim=-1).max()))
        np.testing.assert_allclose(sums["residual_share"], 1, atol=tolerance)
    by_layer, by_head = frames
    is_head, n_heads = by_head["component"].isin(["attention_input", "attention_bias"]), model.cfg.n_heads
    assert by_head.loc[is_head, "head"].tolist() == list(range(n_heads)) * (is_head.sum() // n_heads)
    assert (by_head.loc[~is_head, "head"] == -1).all() and (by_layer["head"] == -1).all()
    rows, columns = ["position", "target", "target_token", "layer", "component"], ["residual_share", "logit"]
    sums = by_head.groupby(rows, dropna=False)[columns].sum(min_count=1)
    of_layers = by_layer.groupby(rows, dropna=False)[columns].sum(min_count=1)
    pd.testing.assert_frame_equal(sums, of_layers, rtol=1e3 * tolerance, atol=tolerance * float(logits.norm(dim=-1).max()))


def test_by_hand():
    # the prompt 1, 2 has the bias 5; the text 1, 2 reads 1 and 2 (1 + 4) of itself; a tenth of it is the logit of token 0
    # and token 1 has none: half of that tenth is above their mean, half below
    model = pencil_model()
    frame = layer_contributions(model, convert_prompt(model, PENCIL_PROMPT), PENCIL_TEXT, tokens=[0])
    written = [1.0, 1.0, 5.0, 0.0, 0.0], [2.0, 10.0, 10.0, 0.0, 0.0]
    rows = [
        (
            place,
            str(place),
            target,
            token,
            layer,
            component,
            -1,
            value,
            value / sum(written[place]),
            value / 20 if target == "chosen" else (-value / 20 if token == "1" else math.nan),
        )
        for place in (0, 1)
        for target, token in (("next", "1" if place == 0 else None), ("chosen", "0"))
        for (layer, component), value in zip(
            [(-1, "embed"), (0, "attention_input"), (0, "attention_bias"), (0, "attention_b_O"), (1, "unembed_bias")],
            written[place],
            strict=True,
        )
    ]
    expected = pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS.dtypes)
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-14)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["rope after", "gqa decay", "learned, queries shifted", "folded LN", "softmax, shifted"])
def test_attribution_predicts_ablation_node_by_node(name):
    """Take one part away from the residual stream, everything behind it held still: the logits move by its logits."""
    model = sharp(name)
    tokens_read = torch.cat([reading(model), TEXT])[None]
    frame = layer_contributions(model, tokens_read[0, :-5], TEXT, tokens=range(17), per_head=True)
    frame = frame[(frame["target"] == "chosen") & (frame["component"] != "unembed_bias")]
    logits, cache = model.run_with_cache(tokens_read)
    z = {"attention_input": "z_context" if "blocks.0.attn.hook_z_bias" in cache else "z", "attention_bias": "z_bias"}
    hold = [x for x in cache if x.endswith(("hook_mlp_out", "hook_attn_out")) or x == "ln_final.hook_scale"]
    for (layer, component, head), rows in frame.groupby(["layer", "component", "head"]):

        def silence(x, hook, head=head):
            x = x.clone()
            x[:, :, head if head >= 0 else slice(None)] = 0
            return x

        node = {
            "embed": "hook_embed",
            "pos_embed": "hook_pos_embed",
            "mlp": f"blocks.{layer}.hook_mlp_out",
            "attention_b_O": f"blocks.{layer}.hook_attn_out",
        }.get(component, f"blocks.{layer}.attn.hook_{z.get(component)}")
        if component == "attention_b_O":

            def silence(x, hook, layer=layer):
                return x - model.blocks[layer].attn.b_O

        held = [x for x in hold if x != node and not (head >= 0 and x == f"blocks.{layer}.hook_attn_out")]
        hooks = [(x, lambda value, hook: cache[hook.name]) for x in held] + [(node, silence)]
        change = centered(model.run_with_hooks(tokens_read, fwd_hooks=hooks) - logits)[0, -5:]
        predicted = -rows["logit"].to_numpy().reshape(5, 17)
        np.testing.assert_allclose(change.numpy(), predicted, atol=1e-12, err_msg=f"{layer} {component} {head}")
        assert np.abs(predicted).max() > 1e-6  # far above rounding


def test_norms_by_their_definition():
    model = sharp()
    bias = convert_prompt(model, PROMPT)
    found = layer_contributions(model, bias, TEXT, per_head=True)
    with model.kv_bias(bias):
        pd.testing.assert_frame_equal(layer_contributions(model, None, TEXT, per_head=True), found)
        _, cache = model.run_with_cache(TEXT[None])
    frame = found.set_index(["layer", "component", "head"])
    for head in range(5):
        vectors = cache["blocks.1.attn.hook_z_bias"][0, :, head] @ model.blocks[1].attn.W_O[head]
        np.testing.assert_allclose(frame.loc[(1, "attention_bias", head), "norm"], vectors.norm(dim=-1), rtol=1e-12)
    np.testing.assert_allclose(frame.loc[(0, "mlp", -1), "norm"], cache["blocks.0.hook_mlp_out"][0].norm(dim=-1), rtol=1e-12)
    np.testing.assert_allclose(frame.loc[(-1, "embed", -1), "norm"], model.W_E[TEXT].norm(dim=-1), rtol=1e-12)
    assert (frame.loc[(2, "unembed_bias", -1), ["norm", "residual_share"]] == 0).all(axis=None)


def test_the_order_of_the_rows_and_the_last_position():
    frame = layer_contributions(sharp("learned, queries shifted"), None, TEXT, tokens=[3, 4])
    block = [(-1, "embed"), (-1, "pos_embed")]
    block += [(layer, part) for layer in (0, 1) for part in ("attention_input", "attention_b_O", "mlp")] + [(2, "unembed_bias")]
    assert list(zip(frame["layer"], frame["component"], strict=True)) == block * 15
    assert frame["position"].tolist() == [place for place in range(5) for _ in range(27)]
    assert frame["target"].tolist() == (["next"] * 9 + ["chosen"] * 18) * 5
    last = frame[(frame["position"] == 4) & (frame["target"] == "next")]
    assert last["logit"].isna().all() and last["target_token"].isna().all() and last["norm"].notna().all()
    assert frame["logit"].isna().sum() == len(last)


def test_what_is_not_in_the_table_is_refused():
    model = sharp()
    model.add_hook("blocks.0.hook_resid_post", lambda x, hook: 2 * x)
    with pytest.raises(KVLensError, match="layer 0 adds to the residual stream is not the sum of its attention and its MLP"):
        layer_contributions(model, None, TEXT)


@pytest.mark.parametrize("name", ["rope after", "softmax, learned", "softmax, shifted", "softmax, rotary, grouped"])
def test_what_heads_read_of_the_prompt_has_rows_and_the_two_parts_are_the_whole(name):
    """As ``kvlens analyse`` has it: the prompt is a bias. Both parts of each head add up to what it reads where the prompt
    stands before the text."""
    model = sharp(name)
    frame = load_analysis("layer_contributions").run(model, Record("a", PROMPT, TEXT, {"answer": 5}), per_head=True)
    by = ["position", "target", "layer", "head"]
    attention = frame[frame["component"].isin(["attention_input", "attention_bias"])]
    assert attention.loc[attention["component"] == "attention_bias", "norm"].min() > 0
    unconverted = layer_contributions(model, PROMPT, TEXT, tokens=[5], per_head=True)
    whole = unconverted[unconverted["component"] == "attention_input"]
    found, expected = (x.groupby(by)["logit"].sum(min_count=1).dropna() for x in (attention, whole))
    assert found.index.equals(expected.index)
    difference = torch.tensor((found - expected).to_numpy()).norm()
    assert difference < 1e-11 * torch.tensor(expected.to_numpy()).norm()


FEW = torch.tensor([4, 16, 2, 9])
"""For a model of three classes, whose next tokens are not classes (refused: test_refusals.py)."""


def test_chosen_classes_are_split_and_patched():
    classifier = sharp(d_vocab_out=3)
    bias = convert_prompt(classifier, PROMPT)
    with classifier.kv_bias(bias):
        logits = classifier(FEW[None])[0]
    frame = analyses.layer_contributions(classifier, bias, FEW, next_token=False, tokens=[0, 2])
    sums = frame.groupby(["position", "target_token"])["logit"].sum().to_numpy().reshape(len(FEW), 2)
    torch.testing.assert_close(torch.tensor(sums), centered(logits)[:, [0, 2]], rtol=1e-9, atol=1e-9)
    assert analyses.bias_decomposition(classifier, PROMPT, FEW, answer=1)["logit"].notna().all()
    assert analyses.bias_effects(classifier, PROMPT, FEW, answer=1)["logit_change"].notna().all()
    patched = analyses.activation_patching(classifier, PROMPT, tokens(7, seed=2), FEW, answer=1, points=["b_kv"])
    assert patched["recovered"].notna().all()
    assert analyses.prompt_effect(classifier, PROMPT, torch.tensor([4, 1, 16, 2]))["loss"].notna().groupby(level=0).any().any()


def test_a_bidirectional_classifier_has_a_table():
    model = sharp("softmax, learned", d_vocab_out=3, attention_dir="bidirectional")
    frame = analyses.layer_contributions(model, None, FEW, next_token=False, tokens=[1])
    sums = torch.tensor(frame.groupby("position")["logit"].sum().to_numpy())
    torch.testing.assert_close(sums, centered(model(FEW[None])[0])[:, 1], rtol=1e-9, atol=1e-9)
