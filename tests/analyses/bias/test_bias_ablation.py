"""Sizes by their definition, effects by intervention: patched models confirm every table that takes parts of a bias away."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import PENCIL_PROMPT, PENCIL_TEXT, SOFTMAX, VARIANTS, bernoulli_kl, centered, pencil_model, tokens
from kvlens.analyses.attribution.terms import PositionExchange, Terms
from kvlens.analyses.bias.exchange import HeadExchange, LayerExchange, in_one_space, zeros_of
from kvlens.analyses.segments import telling
from precision import LAW, relative_error
from small_models import sharp
from stacked_tensors import with_stacked

from kvlens import HookedKVTransformer, KVShiftConfig, combine, convert_prompt, counterfactuals
from kvlens.analyses import (
    baseline_ablation,
    bias_ablation,
    bias_by_head,
    bias_by_layer,
    bias_effects,
    bias_singular_values,
)
from kvlens.memory import NUMBERS_PER_PASS

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
OTHERS = torch.stack([tokens(7, seed=5), tokens(7, seed=6), tokens(7, seed=8)])
LINEAR = [*VARIANTS, "gqa, queries shifted"]
MODELS = [*LINEAR, *SOFTMAX]
EFFECTS = ["ablation_kl", "loss_change", "zero_kl", "zero_loss_change"]
HOOKS = {"bias": ("b_kv", "b_d"), "shift_state": ("last_k", "last_v", "last_q")}
ROUNDING = dict(rel=1e-8, abs=1e-12)


def read(model, bias, hooks=(), text=TEXT):
    """Logits [pos, d_vocab] on the text with a bias attached."""
    with torch.no_grad(), model.kv_bias(bias):
        return model.run_with_hooks(text[None], fwd_hooks=list(hooks))[0]


def effects(whole, ablated, text=TEXT):
    """The divergence, the change of the loss, and that of the last logit of token 3, less token 11's."""
    p, q = whole.double().log_softmax(-1), ablated.double().log_softmax(-1)
    loss_change = float((p - q)[torch.arange(len(text) - 1), text[1:]].mean())
    change = (ablated - whole)[-1]
    return float((p.exp() * (p - q)).sum(-1).mean()), loss_change, float(change[3] - change[11])


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


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_removing_heads_is_selecting_the_rest(name):
    model = sharp(name)
    bias, n_heads = convert_prompt(model, PROMPT), model.cfg.n_heads
    pairs = [(layer, head) for layer in range(2) for head in range(n_heads)]
    removals = [*([pair] for pair in pairs), pairs[:n_heads], pairs[n_heads:], pairs]
    frame, whole = bias_ablation(model, bias, TEXT, removals), read(model, bias)
    for removed, row in zip(removals, frame.itertuples(), strict=True):
        rest = bias.select(heads=[pair for pair in pairs if pair not in removed])
        assert (row.kl, row.loss_change) == pytest.approx(effects(whole, read(model, rest))[:2], **ROUNDING)
        assert row.n_heads == len(removed) and row.kl > 1e-9
    heads, layers = bias_by_head(model, PROMPT, TEXT, bias=bias), bias_by_layer(model, PROMPT, TEXT, bias=bias)
    assert list(zip(heads["layer"], heads["head"], strict=True)) == pairs
    for by_unit, rows in ((heads, frame[: len(pairs)]), (layers, frame[len(pairs) : -1])):
        np.testing.assert_allclose(by_unit[EFFECTS[2:]], rows[["kl", "loss_change"]], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("name", ["softmax, learned", "softmax, rotary, grouped"])
def test_removing_a_query_head_of_a_softmax_model_is_blinding_it_to_the_prompt(name):
    """By hand, without a bias: the text's queries of that head see no key of the prompt in front of it."""
    model = sharp(name)
    pairs = [(layer, head) for layer in range(2) for head in range(model.cfg.n_heads)]
    whole, n = torch.cat([PROMPT, TEXT])[None], len(PROMPT)
    seeing, kl = model(whole)[0, n:], []
    for layer, head in pairs:

        def blind(scores, hook, head=head):
            scores[:, head, n:, :n] = -torch.inf

        hooks = [(f"blocks.{layer}.attn.hook_attn_scores", blind)]
        kl.append(effects(seeing, model.run_with_hooks(whole, fwd_hooks=hooks)[0, n:])[0])
    assert bias_ablation(model, PROMPT, TEXT, [[pair] for pair in pairs])["kl"].tolist() == pytest.approx(kl, rel=1e-8)
    assert bias_effects(model, PROMPT, TEXT, parts=["bias"])["kl"].tolist() == pytest.approx(kl, rel=1e-8)


def test_sizes_and_shares_by_their_definition():
    model = sharp()
    bias = convert_prompt(model, PROMPT)
    b_kv, b_d = bias.stacked("b_kv"), bias.stacked("b_d")
    with model.kv_bias(bias):
        _, cache = model.run_with_cache(TEXT[None])
    for frame in (bias_by_head(model, PROMPT, TEXT), bias_by_layer(model, PROMPT, TEXT)):
        for row in frame.itertuples():
            heads = getattr(row, "head", slice(None))
            parts = (cache[f"blocks.{row.layer}.attn.hook_z_{x}"][0, :, heads].flatten(1) for x in ("bias", "context"))
            of_bias, of_context = (z.norm(dim=-1) for z in parts)
            assert row.bias_share == pytest.approx(float((of_bias / (of_bias + of_context)).mean()), rel=1e-12)
            assert row.b_kv_norm == pytest.approx(float(b_kv[row.layer, heads].square().sum().sqrt()))
            assert row.b_d_norm == pytest.approx(float(b_d[row.layer, heads].square().sum().sqrt()))


def test_sizes_are_of_what_the_stored_numbers_stand_for():
    """exp(log_scale) times them: the same bias with its scale stored elsewhere has the same sizes, and none overflows."""
    model = sharp("softmax, rotary, grouped")
    bias = convert_prompt(model, PROMPT, method="random", n_features=8)
    b_kv, b_d, log_scale = (bias.stacked(name) for name in ("b_kv", "b_d", "log_scale"))
    assert log_scale.unique().numel() > 1
    moved = torch.linspace(-3.0, 5.0, log_scale.numel(), dtype=b_kv.dtype).view_as(log_scale)
    smaller = moved.exp()[:, :, None]
    same = with_stacked(bias, b_kv=b_kv / smaller[..., None], b_d=b_d / smaller, log_scale=log_scale + moved)
    first, second = (bias_by_head(model, PROMPT, TEXT, bias=each) for each in (bias, same))
    np.testing.assert_allclose(second[["b_kv_norm", "b_d_norm"]], first[["b_kv_norm", "b_d_norm"]], rtol=1e-12)
    whole = (b_kv * log_scale.exp()[..., None, None]).repeat_interleave(2, dim=1).norm(dim=(-2, -1))
    np.testing.assert_allclose(first["b_kv_norm"], whole.flatten(), rtol=1e-12)
    values = bias_singular_values(model, bias).groupby(["layer", "head"])["singular_value"]
    np.testing.assert_allclose(values.agg(lambda sigma: (sigma**2).sum() ** 0.5), whole.flatten(), rtol=1e-12)
    by_layer = bias_by_layer(model, PROMPT, TEXT, bias=bias)["b_kv_norm"]
    np.testing.assert_allclose(by_layer, whole.norm(dim=1), rtol=1e-12)
    enormous = bias_singular_values(model, with_stacked(bias, log_scale=log_scale + 1e4))
    assert np.isfinite(enormous[["singular_value", "energy_share"]]).all(axis=None)


def test_what_changes_nothing():
    model = sharp(kv_shift=None)
    bias, rounding = convert_prompt(model, PROMPT), 17 * 2.3e-16  # a sum over the vocabulary
    zeros = bias_by_head(model, PROMPT, TEXT, bias=bias.zero_like())
    assert (zeros[["b_kv_norm", "b_d_norm", "bias_share"]] == 0).all(axis=None)
    assert (zeros[EFFECTS].abs() < rounding).all(axis=None)
    same = convert_prompt(model, PROMPT[None].expand(2, -1))
    assert (bias_effects(model, bias, TEXT, methods=["mean", "resample"], references=same)["kl"] < rounding).all()
    nothing, one_twice, no_row = (bias_ablation(model, bias, TEXT, x) for x in ([[]], [[(1, 2), (1, 2)]], []))
    assert nothing.iloc[0].tolist() == pytest.approx([0, 0, 0, 0], abs=1e-14) and one_twice["n_heads"].tolist() == [1]
    assert len(no_row) == 0
    pd.testing.assert_series_equal(no_row.dtypes, nothing.dtypes)


def test_one_token_of_text_has_no_loss():
    frame = bias_by_head(sharp(), PROMPT, TEXT[:1])
    assert frame[["loss_change", "zero_loss_change"]].isna().all(axis=None)
    assert frame[["ablation_kl", "zero_kl"]].notna().all(axis=None)
    assert bias_effects(sharp(), PROMPT, TEXT[:1], by="model")[["loss_change", "logit_change"]].isna().all(axis=None)


@pytest.mark.parametrize("name", ["softmax, rotary, grouped", "softmax, shifted, grouped", "gqa, queries shifted", "gqa decay"])
def test_a_row_is_read_from_its_first_layer_on_as_by_a_whole_pass(name):
    """The slow form: one pass of all rows, from the tokens on."""
    model = sharp(name)
    own, *donors = in_one_space(*(convert_prompt(model, prompt) for prompt in (PROMPT, *OTHERS[:2])))
    exchange = HeadExchange(own, *donors)
    one, two = exchange.of(0, 1), exchange.of(1, 2)
    sets = [*([part] for part in range(len(exchange.parts))), one + two, exchange.of(1), exchange.of(), [], two]
    chosen, donor = exchange.rows(sets), torch.arange(len(sets)) % 2
    fast = torch.cat(list(exchange.logits(model, TEXT, chosen, donor)))
    with model.kv_bias(exchange.biases(chosen, donor=donor)):
        slow = model(TEXT.expand(len(chosen), -1))
    assert relative_error(fast, slow) < LAW
    assert relative_error(fast[-2], read(model, own)) < LAW  # of no parts


def test_layers_below_a_head_are_not_run_again_and_rows_share_the_other_layers():
    model, n_rows, n_biases = sharp("softmax, rotary, grouped"), [0, 0], []
    n_heads = model.cfg.n_heads

    def count(resid, hook):
        n_rows[hook.layer()] += len(resid)
        if len(resid) > 2:
            n_biases.append([len(block.attn.layer_bias.part.b_kv) for block in model.blocks])

    bias = convert_prompt(model, PROMPT)
    exchange = HeadExchange(bias, zeros_of(bias))
    chosen = exchange.rows([exchange.of(layer, head) for layer in range(2) for head in range(n_heads)])
    with model.hooks(fwd_hooks=[(f"blocks.{layer}.hook_resid_pre", count) for layer in range(2)]):
        list(exchange.logits(model, TEXT, chosen))
    assert n_rows == [1 + n_heads, 1 + 2 * n_heads]  # the whole prompt's pass, and each head's layers
    assert n_biases == [[n_heads, 1], [n_heads, 1], [1, n_heads]]


def test_the_rows_of_a_pass_change_only_rounding(monkeypatch):
    model, told = sharp(), []
    bias = convert_prompt(model, PROMPT)
    whole = bias_effects(model, bias, TEXT, parts=["bias"])
    for rows in (1, 4):
        monkeypatch.setattr(HeadExchange, "_numbers_per_row", lambda *of: NUMBERS_PER_PASS // rows)  # noqa: B023
        pd.testing.assert_frame_equal(bias_effects(model, bias, TEXT, parts=["bias"]), whole, rtol=1e-9, atol=1e-13)
    with telling(told.append):
        bias_by_head(model, PROMPT, TEXT)
    assert told == pytest.approx([0.2, 0.4, 0.5, 0.7, 0.9, 1.0])


# --- replaced by what another prompt leaves, or BOS alone -------------------------------------------------------------


@pytest.mark.parametrize("name", ["docs-linear", "docs-gpt2"])
def test_with_bos_kept_no_head_is_worth_much_more_than_the_prompt(name):
    """With BOS taken away too, single heads cost several times what the whole prompt is worth."""
    model = HookedKVTransformer.from_zoo(name, dtype=torch.float64)
    prompt = model.to_tokens("Return a list of the names of all widgets. It is sorted by name.")[0]
    text = model.to_tokens(" The names of the widgets are sorted.", prepend_bos=False)[0]
    bias, after_bos = convert_prompt(model, prompt), convert_prompt(model, prompt, without=[(1, len(prompt))])
    frame = bias_by_head(model, prompt, text, bias=bias)
    everything = [(layer, head) for layer in range(model.cfg.n_layers) for head in range(model.cfg.n_heads)]
    worth = baseline_ablation(model, prompt, text, [everything], bias=bias)["kl"][0]
    assert worth == pytest.approx(effects(read(model, bias, text=text), read(model, after_bos, text=text), text)[0], **ROUNDING)
    assert frame["ablation_kl"].max() < worth
    assert frame["zero_kl"].max() > frame["ablation_kl"].max()
    whole = bias_effects(model, prompt, text, by="model", methods=["zero", "baseline"])
    of_all_parts = whole.groupby("method")["kl"].last()
    assert of_all_parts["baseline"] == pytest.approx(worth, **ROUNDING)
    assert of_all_parts["zero"] != pytest.approx(worth, rel=0.01)  # not by rounding alone


def donor(references, baseline, field, layer, method, reference):
    """The replacement of this tensor, [batch 1, ...]."""
    if method == "baseline":
        return baseline.layers[layer].tensors()[field]
    rows = references.layers[layer].tensors()[field]
    return {"zero": rows[:1] * 0, "mean": rows.mean(dim=0, keepdim=True), "resample": rows[reference][None]}[method]


def hooks_of(model, references, baseline, row):
    """The ablation of one row of the frame, tensor by tensor."""
    group, hooks = model.cfg.n_heads // model.cfg.n_kv_heads, []
    for part in HOOKS if row.part == "both" else [row.part]:
        for field in HOOKS[part]:
            for layer in range(2) if row.layer == -1 else [row.layer]:

                def replaced(x, hook, field=field, layer=layer):
                    other = donor(references, baseline, field, layer, row.method, row.reference)
                    axis = 1 if "b_" in field else 2
                    if row.head == -1:
                        return other.expand_as(x)
                    grouped = field in ("last_k", "last_v")
                    first = row.head // group if grouped else row.head // group * group
                    n = 1 if grouped or "b_" in field else group  # the group loses its shift state together
                    at = torch.tensor([row.head]) if "b_" in field else torch.arange(first, first + n)
                    return x.index_copy(axis, at, other.index_select(axis, at))

                hooks.append((f"blocks.{layer}.attn.hook_{field}", replaced))
    return hooks


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("name", "by"), [each for i, name in enumerate(LINEAR) for each in ((name, "head"), (name, ("layer", "model")[i % 2]))]
)
def test_every_ablation_is_what_hooks_do(name, by):
    model = sharp(name)
    bias, references = convert_prompt(model, PROMPT), convert_prompt(model, OTHERS)
    baseline = convert_prompt(model, PROMPT, without=[(0, len(PROMPT))])
    methods = ["zero", "mean", "resample", "baseline"] if by != "head" else ["resample", "baseline"]
    frame = bias_effects(model, PROMPT, TEXT, by=by, methods=methods, references=references, answer=3, rival=11)
    n_parts = 1 if model.cfg.kv_shift is None else 3
    units = {"head": 2 * model.cfg.n_heads, "layer": 2, "model": 1}[by]
    assert len(frame) == units * n_parts * (len(methods) + 2)  # three references
    assert len(frame.drop_duplicates(["method", "reference", "part", "layer", "head"])) == len(frame)
    whole = read(model, bias)
    for row in frame.iloc[:: 5 if by == "head" else 1].itertuples():
        expected = effects(whole, read(model, bias, hooks_of(model, references, baseline, row)))
        assert (row.kl, row.loss_change, row.logit_change) == pytest.approx(expected, **ROUNDING)
    assert (frame["kl"] > 1e-9).all()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SOFTMAX)
def test_other_prompts_instead_of_a_layer_of_a_sharp(name):
    """Each against a bias put together by sums: the rest of this prompt, and that layer of the others."""
    model = sharp(name)
    bias, others = convert_prompt(model, PROMPT), convert_prompt(model, OTHERS[:2])
    given = dict(methods=["resample", "mean"], parts=["bias"], references=others)
    frame, whole = bias_effects(model, bias, TEXT, by="layer", **given), read(model, bias)
    kl = frame.set_index(["method", "reference", "layer"])["kl"]
    for layer, rest in ((0, [1]), (1, [0])):
        for i in range(2):
            taken = others.select_prompt(i).select(layers=[layer])
            mixed = combine(bias.select(layers=rest), taken, shift_state="first")
            assert kl["resample", i, layer] == pytest.approx(effects(whole, read(model, mixed))[0], rel=1e-8)
    everything = bias_effects(model, bias, TEXT, by="model", **given)
    assert everything["kl"].gt(0).all() and len(everything) == 3
    itself = bias_effects(model, bias, TEXT, by="model", **{**given, "references": convert_prompt(model, PROMPT[None])})
    np.testing.assert_allclose(itself["kl"], 0, atol=1e-12)


def test_order_and_defaults():
    model = sharp()
    bias, references = convert_prompt(model, PROMPT), convert_prompt(model, OTHERS[:2])
    frame = bias_effects(model, bias, TEXT, by="layer", methods=["resample", "zero"], parts=["both"], references=references)
    expected = pd.DataFrame(
        {
            "method": ["resample"] * 4 + ["zero"] * 2,
            "reference": [0, 0, 1, 1, -1, -1],
            "part": ["both"] * 6,
            "layer": [0, 1] * 3,
            "head": [-1] * 6,
        }
    ).astype({"method": "str", "part": "str"})
    pd.testing.assert_frame_equal(frame[list(expected)], expected)
    for shift, parts in ((KVShiftConfig(), ["bias", "shift_state", "both"]), (None, ["bias"])):
        whole = bias_effects(sharp(kv_shift=shift), PROMPT, TEXT)
        assert whole["part"].drop_duplicates().tolist() == parts and whole["method"].unique().tolist() == ["zero"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "references"), [(name, i % 3 != 1) for i, name in enumerate(MODELS)], ids=MODELS)
def test_the_baseline_is_that_of_bias_by_head_with_and_without_references(name, references):
    model = sharp(name)
    others = convert_prompt(model, OTHERS) if references else None
    methods = ["mean", "resample"] if references else []
    given = dict(by="head", parts=["bias"] if model.cfg.kv_shift is None else ["both"], references=others)
    frame = bias_effects(model, PROMPT, TEXT, methods=[*methods, "baseline"], **given)
    found = frame[frame["method"] == "baseline"]
    assert (found["reference"] == -1).all()
    assert found["kl"].tolist() == pytest.approx(bias_by_head(model, PROMPT, TEXT)["ablation_kl"].tolist(), **ROUNDING)
    if references:
        alone = bias_effects(model, PROMPT, TEXT, methods=methods, **given)
        assert frame.loc[frame["method"] != "baseline", "kl"].tolist() == pytest.approx(alone["kl"].tolist(), **ROUNDING)


def test_without_an_answer_the_logit_is_the_next_tokens():
    model = sharp()
    bias = convert_prompt(model, PROMPT)
    row = bias_effects(model, bias, TEXT, by="model", parts=["both"]).iloc[0]
    change = centered(read(model, bias.zero_like()) - read(model, bias))[torch.arange(4), TEXT[1:]].mean()
    assert row["logit_change"] == pytest.approx(float(change), **ROUNDING)


@pytest.mark.parametrize("name", ["gqa, queries shifted", "softmax, shifted, grouped"])
def test_a_layer_is_all_of_its_heads_and_all_of_its_positions_and_keeping_it_is_exchanging_the_others(name):
    """What different exchanges of the same parts give, and what keeping is."""
    model = sharp(name)
    other = counterfactuals(model, PROMPT, [[(1, 4)]])
    own, donor = convert_prompt(model, PROMPT), convert_prompt(model, other).select_prompt(0)
    layers, heads = LayerExchange(own, donor), HeadExchange(*in_one_space(own, donor))
    positions = PositionExchange(Terms.of_prompt(model, PROMPT), other).in_layer(1)
    first, second = layers.rows([[0]]), heads.rows([heads.of(1)])
    every = torch.ones(1, len(positions.parts), dtype=torch.bool)
    read = []
    for biases in (
        layers.biases(~first),
        layers.biases(first, keep=True),
        heads.biases(second),
        heads.biases(~second, keep=True),
        positions.biases(every),
        own.repeat(1),
    ):
        with model.kv_bias(biases):
            read.append(model(TEXT[None]))
    assert all(relative_error(read[0], same) < LAW for same in read[1:-1])
    assert relative_error(read[0], read[-1]) > 1e-3
