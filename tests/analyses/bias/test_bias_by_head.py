"""Sizes by their definition, effects by intervention: the patched model confirms the table for each head."""

import math

import pandas as pd
import pytest
import torch
from analysis_models import PENCIL_PROMPT, PENCIL_TEXT, VARIANTS, bernoulli_kl, pencil_model, random_model, tokens

from kvlens import HookedKVTransformer, convert_prompt
from kvlens.analyses import baseline_ablation, bias_ablation, bias_by_head, bias_by_layer

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
EFFECTS = ["ablation_kl", "loss_change", "zero_kl", "zero_loss_change"]


def mean_kl_and_loss_change(whole, ablated, text):
    p, q = whole.log_softmax(-1), ablated.log_softmax(-1)
    places, targets = torch.arange(len(text) - 1), text[1:]
    return float((p.exp() * (p - q)).sum(-1).mean()), float((p - q)[places, targets].mean())


def test_by_hand():
    expected = pd.DataFrame(
        {
            "layer": [0],
            "head": [0],
            "b_kv_norm": [5.0],
            "b_d_norm": [0.0],  # no normalizer
            "bias_share": [(5 / 6 + 10 / 20) / 2],  # z_bias 5, 10; z_context 1, 10
            # no positions, no shift, no BOS: the baseline's bias is 0
            **{name: [(bernoulli_kl(0.7, 0.2) + bernoulli_kl(2.2, 1.2)) / 2] for name in EFFECTS[::2]},
            **{name: [math.log(1 + math.exp(0.2)) - math.log(1 + math.exp(0.7))] for name in EFFECTS[1::2]},
        }
    )
    expected = expected[["layer", "head", "b_kv_norm", "b_d_norm", "bias_share", *EFFECTS]]
    frame = bias_by_head(pencil_model(), PENCIL_PROMPT, PENCIL_TEXT)
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-13)
    by_layer = bias_by_layer(pencil_model(), PENCIL_PROMPT, PENCIL_TEXT)
    pd.testing.assert_frame_equal(by_layer, expected.drop(columns="head"), rtol=1e-13)


@pytest.mark.parametrize("name", VARIANTS)
def test_removing_a_head_is_what_a_hook_on_its_bias_does(name):
    model = random_model(**VARIANTS[name])
    bias, n_heads = convert_prompt(model, PROMPT), model.cfg.n_heads
    frame = bias_by_head(model, PROMPT, TEXT)
    assert list(zip(frame["layer"], frame["head"], strict=True)) == [(i, j) for i in range(2) for j in range(n_heads)]
    with model.kv_bias(bias):
        whole = model(TEXT[None])[0]
        for row in frame.itertuples():

            def forget(b, hook, head=row.head):
                b = b.clone()
                b[:, head] = 0
                return b

            names = [f"blocks.{row.layer}.attn.hook_{x}" for x in ("b_kv", "b_d")]
            ablated = model.run_with_hooks(TEXT[None], fwd_hooks=[(n, forget) for n in names])[0]
            kl, loss_change = mean_kl_and_loss_change(whole, ablated, TEXT)
            assert row.zero_kl == pytest.approx(kl, rel=1e-8, abs=1e-13)
            assert row.zero_loss_change == pytest.approx(loss_change, rel=1e-8, abs=1e-12)
    assert (frame["zero_kl"] > 1e-9).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_removing_layers_and_everything_is_selecting_the_rest(name):
    model = random_model(**VARIANTS[name])
    bias = convert_prompt(model, PROMPT)
    everything = [(layer, head) for layer in range(2) for head in range(model.cfg.n_heads)]
    total = bias_ablation(model, bias, TEXT, [everything]).iloc[0]
    layers = bias_by_layer(model, PROMPT, TEXT)
    with model.kv_bias(bias):
        whole = model(TEXT[None])[0]
    found = [(total["kl"], total["loss_change"]), *layers[["zero_kl", "zero_loss_change"]].itertuples(index=False)]
    for (kl, loss_change), kept in zip(found, ([], [1], [0]), strict=True):
        with model.kv_bias(bias.select(kept)):
            expected = mean_kl_and_loss_change(whole, model(TEXT[None])[0], TEXT)
        assert (kl, loss_change) == pytest.approx(expected, rel=1e-8, abs=1e-12)
    assert total["n_heads"] == len(everything)


def test_sizes_and_shares_by_their_definition():
    model = random_model()
    bias = convert_prompt(model, PROMPT)
    heads, layers = bias_by_head(model, PROMPT, TEXT), bias_by_layer(model, PROMPT, TEXT)
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(TEXT[None])
    for row in heads.itertuples():
        of_bias, of_context = (cache[f"blocks.{row.layer}.attn.hook_z_{x}"][0, :, row.head] for x in ("bias", "context"))
        share = sum(float(b.norm() / (b.norm() + c.norm())) for b, c in zip(of_bias, of_context, strict=True)) / 5
        assert row.bias_share == pytest.approx(share, rel=1e-12)
        assert row.b_kv_norm == pytest.approx(float(bias.b_KV[row.layer, row.head].square().sum().sqrt()))
        assert row.b_d_norm == pytest.approx(float(bias.b_D[row.layer, row.head].square().sum().sqrt()))
    for row in layers.itertuples():
        of_bias, of_context = (cache[f"blocks.{row.layer}.attn.hook_z_{x}"][0] for x in ("bias", "context"))
        share = sum(float(b.norm() / (b.norm() + c.norm())) for b, c in zip(of_bias, of_context, strict=True)) / 5
        assert row.bias_share == pytest.approx(share, rel=1e-12)
        squares = heads.loc[heads["layer"] == row.layer, ["b_kv_norm", "b_d_norm"]].pow(2).sum()
        assert row.b_kv_norm**2 == pytest.approx(squares["b_kv_norm"])
        assert row.b_d_norm**2 == pytest.approx(squares["b_d_norm"])


def test_a_bias_of_zeros_has_no_share_and_no_effect():
    model = random_model(kv_shift=None)
    frame = bias_by_head(model, PROMPT, TEXT, bias=convert_prompt(model, PROMPT).zero_like())
    assert (frame[["b_kv_norm", "b_d_norm", "bias_share"]] == 0).all(axis=None)
    assert (frame[EFFECTS].abs() < 17 * 2.3e-16).all(axis=None)  # a sum over the vocabulary


def test_the_size_of_the_batch_changes_nothing_but_rounding():
    model = random_model()
    bias = convert_prompt(model, PROMPT)
    removals = [[(0, 1)], [], [(1, 4), (0, 0)], [(1, 2), (1, 2)], [(0, 3)]]
    frames = [bias_ablation(model, bias, TEXT, removals, batch_size=n) for n in (None, 1, 2, 5)]
    for frame in frames[1:]:
        pd.testing.assert_frame_equal(frame, frames[0], rtol=1e-9, atol=1e-14)
    assert frames[0]["n_heads"].tolist() == [1, 0, 2, 1, 1]
    assert frames[0].loc[1, ["kl", "loss_change"]].tolist() == pytest.approx([0, 0], abs=1e-14)


def test_progress_goes_to_one():
    model, told = random_model(), []
    bias_by_head(model, PROMPT, TEXT, batch_size=4, on_progress=told.append)
    assert told == pytest.approx([0.2, 0.4, 0.5, 0.7, 0.9, 1.0])


def test_nothing_to_remove_gives_an_empty_frame_of_the_same_columns():
    model = random_model()
    bias = convert_prompt(model, PROMPT)
    empty, one = (bias_ablation(model, bias, TEXT, removals) for removals in ([], [[]]))
    assert len(empty) == 0
    pd.testing.assert_series_equal(empty.dtypes, one.dtypes)


def test_one_token_of_text_has_no_loss():
    frame = bias_by_head(random_model(), PROMPT, TEXT[:1])
    assert frame[["loss_change", "zero_loss_change"]].isna().all(axis=None)
    assert frame[["ablation_kl", "zero_kl"]].notna().all(axis=None)


@pytest.mark.parametrize("name", VARIANTS)
def test_an_ablated_head_has_what_the_baseline_has_there(name):
    """Against hooks that replace one head's b_KV, b_D and shift state by the baseline's."""
    model = random_model(**VARIANTS[name])
    whole, baseline = convert_prompt(model, PROMPT), convert_prompt(model, PROMPT, without=[(0, len(PROMPT))])
    frame = bias_by_head(model, PROMPT, TEXT)
    group = model.cfg.n_heads // model.cfg.n_kv_heads
    layer, head = 1, 3

    def exchange(x, hook):
        field = hook.name.rsplit("hook_", 1)[1]
        if field.startswith("last"):
            first = head // group
            rows = slice(first * group, (first + 1) * group) if field == "last_q" else slice(first, first + 1)
            x[:, :, rows] = getattr(baseline, field)[layer][:, rows]
        else:
            x[:, head] = getattr(baseline, {"b_kv": "b_KV", "b_d": "b_D"}[field])[layer, head]
        return x

    shifted = [f"last_{x}" for x in "kvq" if getattr(whole, f"last_{x}").shape[-3]]
    fields = ["b_kv", *(["b_d"] if model.cfg.normalizer == "kernel" else []), *shifted]
    with model.kv_bias(whole):
        before = model(TEXT[None])[0]
        hooks = [(f"blocks.{layer}.attn.hook_{field}", exchange) for field in fields]
        after = model.run_with_hooks(TEXT[None], fwd_hooks=hooks)[0]
    row = frame[(frame["layer"] == layer) & (frame["head"] == head)].iloc[0]
    expected = mean_kl_and_loss_change(before, after, TEXT)
    assert (row["ablation_kl"], row["loss_change"]) == pytest.approx(expected, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("name", ["docs-linear", "docs-gpt2"])
def test_with_bos_kept_no_head_is_worth_much_more_than_the_prompt(name):
    """With BOS taken away too, single heads cost several times what the whole prompt is worth."""
    model = HookedKVTransformer.from_zoo(name)
    prompt = model.to_tokens("Return a list of the names of all widgets. It is sorted by name.")[0]
    text = model.to_tokens(" The names of the widgets are sorted.", prepend_bos=False)[0]
    frame = bias_by_head(model, prompt, text)
    bias = convert_prompt(model, prompt)
    everything = [[(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]]
    worth = baseline_ablation(model, prompt, text, everything, bias=bias)["kl"][0]
    with model.kv_bias(bias):
        with_prompt = model(text[None])[0]
    with model.kv_bias(convert_prompt(model, prompt, without=[(1, len(prompt))])):
        without = model(text[None])[0]
    assert worth == pytest.approx(mean_kl(with_prompt, without), rel=1e-3)
    assert frame["ablation_kl"].max() < worth
    assert frame["zero_kl"].max() > frame["ablation_kl"].max()


def mean_kl(whole, other):
    p, q = whole.detach().double().log_softmax(-1), other.detach().double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())
