"""Ablations in batches are what hooks on one part after the other do."""

import pandas as pd
import pytest
import torch
from analysis_models import GROUPED, VARIANTS, centered, random_model, tokens
from kvlens.analyses.bias.by_head import bias_by_head
from kvlens.analyses.bias.effects import bias_effects
from kvlens.analyses.declaration import Record
from tiny_text_model import tiny_text_model

from kvlens import KVLensError, KVShiftConfig, convert_prompt

PROMPT, TEXT = tokens(7), tokens(5, seed=1)
OTHERS = torch.stack([tokens(7, seed=5), tokens(7, seed=6), tokens(7, seed=8)])
MODELS = {
    **VARIANTS,
    "gqa, kernel": dict(GROUPED, kv_shift=KVShiftConfig(window=1, queries=True)),
}
HOOKS = {"bias": ("b_kv", "b_d"), "shift_state": ("last_k", "last_v", "last_q")}
ROUNDING = dict(rel=1e-8, abs=1e-12)


def donor(references, field, layer, method, reference):
    """The replacement of this tensor, [batch 1, ...]."""
    rows = getattr(references, {"b_kv": "b_KV", "b_d": "b_D"}.get(field, field))[layer]
    return {"zero": rows[:1] * 0, "mean": rows.mean(dim=0, keepdim=True), "resample": rows[reference][None]}[method]


def hooks_of(model, references, row):
    """The ablation of one row of the frame, tensor by tensor."""
    group, hooks = model.cfg.n_heads // model.cfg.n_kv_heads, []
    for part in HOOKS if row.part == "both" else [row.part]:
        for field in HOOKS[part]:
            for layer in range(2) if row.layer == -1 else [row.layer]:

                def replace(x, hook, field=field, layer=layer):
                    other, axis = donor(references, field, layer, row.method, row.reference), 1 if "b_" in field else 2
                    if row.head == -1:
                        return other.expand_as(x)
                    grouped = field in ("last_k", "last_v")
                    first = row.head // group if grouped else row.head // group * group
                    n = 1 if grouped or "b_" in field else group  # the group loses its shift state together
                    at = torch.tensor([row.head]) if "b_" in field else torch.arange(first, first + n)
                    return x.index_copy(axis, at, other.index_select(axis, at))

                hooks.append((f"blocks.{layer}.attn.hook_{field}", replace))
    return hooks


def effects_one_by_one(model, bias, references, row, whole):
    """``whole``: the logits without an ablation."""
    with model.kv_bias(bias):
        ablated = model.run_with_hooks(TEXT[None], fwd_hooks=hooks_of(model, references, row))[0]
    p, q = whole.log_softmax(-1), ablated.log_softmax(-1)
    loss = float((p - q)[torch.arange(4), TEXT[1:]].mean())
    logit = float((ablated - whole)[-1, 3] - (ablated - whole)[-1, 11])
    return float((p.exp() * (p - q)).sum(-1).mean()), loss, logit


@pytest.mark.parametrize(
    ("name", "by"), [each for i, name in enumerate(MODELS) for each in ((name, "head"), (name, ("layer", "model")[i % 2]))]
)
def test_every_ablation_is_what_hooks_do(name, by):
    model = random_model(**MODELS[name])
    bias, references = convert_prompt(model, PROMPT), convert_prompt(model, OTHERS)
    methods = ["zero", "mean", "resample"] if by != "head" else ["resample"]
    frame = bias_effects(model, bias, TEXT, by=by, methods=methods, references=references, answer=3, rival=11)
    n_parts = 1 if model.cfg.kv_shift is None else 3
    units = {"head": 2 * model.cfg.n_heads, "layer": 2, "model": 1}[by]
    assert len(frame) == units * n_parts * (len(methods) + 2)  # three references
    assert len(frame.drop_duplicates(["method", "reference", "part", "layer", "head"])) == len(frame)
    with model.kv_bias(bias):
        whole = model(TEXT[None])[0]
    for row in frame.iloc[:: 5 if by == "head" else 1].itertuples():
        kl, loss, logit = effects_one_by_one(model, bias, references, row, whole)
        assert row.kl == pytest.approx(kl, **ROUNDING)
        assert row.loss_change == pytest.approx(loss, **ROUNDING)
        assert row.logit_change == pytest.approx(logit, **ROUNDING)
    assert (frame["kl"] > 1e-9).all()


def test_order_and_defaults():
    model = random_model()
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
    whole = bias_effects(model, bias, TEXT)
    assert whole["part"].drop_duplicates().tolist() == ["bias", "shift_state", "both"]
    assert whole["method"].unique().tolist() == ["zero"]
    shiftless = random_model(kv_shift=None)
    assert bias_effects(shiftless, convert_prompt(shiftless, PROMPT), TEXT)["part"].unique().tolist() == ["bias"]


@pytest.mark.parametrize(
    ("name", "attention", "references"),
    [(name, attention, (i + j) % 2 == 0) for i, name in enumerate(MODELS) for j, attention in enumerate(["linear", "softmax"])],
)
def test_the_baseline_is_what_bos_alone_leaves(name, attention, references):
    linear = attention == "linear"
    changes = MODELS[name] if linear else dict(attention="softmax", kv_shift=MODELS[name].get("kv_shift"))
    model = random_model(**changes)
    others = convert_prompt(model, OTHERS) if references else None
    methods = ["mean", "resample"] if references else []
    given = dict(by="head", parts=["bias"] if model.cfg.kv_shift is None else ["both"], references=others)
    frame = bias_effects(model, PROMPT, TEXT, methods=[*methods, "baseline"], **given)
    found = frame[frame["method"] == "baseline"]
    assert (found["reference"] == -1).all()
    heads = bias_by_head(model, PROMPT, TEXT)
    assert found["kl"].tolist() == pytest.approx(heads["ablation_kl"].tolist(), **ROUNDING)
    if references:
        alone = bias_effects(model, PROMPT, TEXT, methods=methods, **given)
        rest = frame[frame["method"] != "baseline"]
        assert rest["kl"].tolist() == pytest.approx(alone["kl"].tolist(), **ROUNDING)


def test_the_baseline_of_all_heads_is_the_text_after_bos_and_zero_is_not():
    model = tiny_text_model(dtype=torch.float64)
    prompt, text = model.to_tokens("the widget is")[0], model.to_tokens(" green and", prepend_bos=False)[0]
    effects = bias_effects(model, prompt, text, by="model", methods=["zero", "baseline"]).set_index(["method", "part"])
    part = effects.index.get_level_values("part").unique()[-1]  # all that the prompt left
    whole = model(torch.cat([prompt, text])[None])[0, -len(text) :]
    after_bos = convert_prompt(model, prompt, without=[(1, len(prompt))])
    with model.kv_bias(after_bos):
        alone = model(text[None])[0]
    p, q = (x.log_softmax(dim=-1) for x in (whole, alone))
    assert effects.loc[("baseline", part), "kl"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), **ROUNDING)
    assert effects.loc[("zero", part), "kl"] != pytest.approx(effects.loc[("baseline", part), "kl"], rel=1e-3)


def test_without_an_answer_the_logit_is_the_next_tokens():
    model = random_model()
    bias = convert_prompt(model, PROMPT)
    row = bias_effects(model, bias, TEXT, by="model", parts=["both"]).iloc[0]
    with model.kv_bias(bias):
        whole = model(TEXT[None])[0]
    with model.kv_bias(bias.zero_like()):
        change = centered(model(TEXT[None])[0] - whole)[torch.arange(4), TEXT[1:]].mean()
    assert row["logit_change"] == pytest.approx(float(change), **ROUNDING)
    assert bias_effects(model, bias, TEXT[:1], by="model")[["loss_change", "logit_change"]].isna().all(axis=None)


def test_the_number_is_reported_before_the_first_and_the_batch_size_changes_only_rounding():
    model, told = random_model(), []
    bias = convert_prompt(model, PROMPT)
    tell = dict(on_start=told.append, on_progress=lambda done: told.append(round(done, 3)))
    whole = bias_effects(model, bias, TEXT, parts=["bias"], batch_size=4, **tell)
    assert told == [10, 0.4, 0.8, 1.0]
    for batch_size in (None, 1, 10):
        frame = bias_effects(model, bias, TEXT, parts=["bias"], batch_size=batch_size)
        pd.testing.assert_frame_equal(frame, whole, rtol=1e-9, atol=1e-13)


def test_another_prompt_that_is_the_same_changes_nothing():
    model = random_model()
    bias, same = convert_prompt(model, PROMPT), convert_prompt(model, PROMPT[None].expand(2, -1))
    frame = bias_effects(model, bias, TEXT, methods=["mean", "resample"], references=same)
    assert (frame["kl"] < 17 * 2.3e-16).all()  # a sum over the vocabulary


def test_in_a_batch():
    model = tiny_text_model(dtype=torch.float64)
    fields = {"answer": 3, "rival": 11, "references": ["the gadget", "Return both"]}
    record = Record("a", "the widget is green", " the widget", fields)
    frame = bias_effects.analysis.run(model, record, by="layer", methods="zero,mean,resample", parts="")
    assert dict(frame.dtypes.astype(str)) == bias_effects.analysis.columns.dtypes
    assert len(frame) == 2 * 3 * (1 + 1 + 2)
    with pytest.raises(KVLensError, match="references=, a batch of biases"):
        bias_effects.analysis.run(model, Record("b", "the widget", " is"), by="head", methods="mean", parts="")
