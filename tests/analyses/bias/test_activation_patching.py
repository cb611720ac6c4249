"""Every patch against a slow reference (a KVBias or a model built by hand), and the known ends of the scale."""

import copy
import functools
from dataclasses import replace

import pandas as pd
import pytest
import torch
from analysis_models import VARIANTS, centered, pencil_model, random_model, tokens
from kvlens.analyses.bias.patching import activation_patching
from kvlens.analyses.declaration import Record

from kvlens import KVLensError, KVShiftConfig, convert_prompt

CLEAN, CORRUPTED, TEXT = tokens(7), tokens(7, seed=5), tokens(4, seed=1)
ANSWER, RIVAL = 3, 11
BIAS_TENSORS = {
    "b_kv": ["b_KV"],
    "b_d": ["b_D"],
    "bias": ["b_KV", "b_D"],
    "shift_state": ["last_k", "last_v", "last_q"],
    "prompt": ["b_KV", "b_D", "last_k", "last_v", "last_q"],
}
MODELS = {
    **VARIANTS,
    "values shifted, no normalizer": dict(normalizer="none", kv_shift=KVShiftConfig(window=1, keys=False)),
    "gqa, queries shifted": dict(n_heads=6, d_model=36, n_key_value_heads=3, kv_shift=KVShiftConfig(queries=True)),
}


def patching(model, **changes):
    arguments = dict(prompt=CLEAN, corrupted=CORRUPTED, text=TEXT, answer=ANSWER, rival=RIVAL)
    return activation_patching(model, **{**arguments, **changes})


def metrics_under(model, bias, n_rows=1, fwd_hooks=()):
    with model.kv_bias(bias):
        logits = model.run_with_hooks(TEXT.expand(n_rows, -1), fwd_hooks=list(fwd_hooks))[:, -1]
    return (logits[:, ANSWER] - logits[:, RIVAL]).tolist()


def mixed_bias(model, clean, corrupted, row):
    """The corrupted bias with one part replaced by the clean one's."""
    mixed = {}
    for name in BIAS_TENSORS[row.point]:
        patched, group = getattr(corrupted, name).clone(), 1
        head_axis = -2 if name in ("b_D", "last_k", "last_v", "last_q") else -3
        if name == "last_q":
            group = model.cfg.n_heads // model.cfg.n_kv_heads
        layers = slice(None) if row.layer == -1 else slice(row.layer, row.layer + 1)
        heads = slice(None) if row.head == -1 else slice(row.head * group, (row.head + 1) * group)
        here, there = (x[layers].movedim(head_axis, 0) for x in (patched, getattr(clean, name)))
        here[heads] = there[heads]
        mixed[name] = patched
    return replace(corrupted, **mixed)


def without_shift(model, corrupted, row):
    """The metric of the same weights with the identity as the named coefficients."""
    coefs = [getattr(block.attn, row.point) for layer, block in enumerate(model.blocks) if row.layer in (-1, layer)]
    before = [coef.clone() for coef in coefs]
    for coef in coefs:
        coef[slice(None) if row.head == -1 else row.head] = torch.eye(1, coef.shape[1], dtype=coef.dtype)[0]
    try:
        return metrics_under(model, replace(corrupted, fingerprint=model.fingerprint()))[0]
    finally:
        for coef, old in zip(coefs, before, strict=True):
            coef.copy_(old)


def slow_metrics(model, clean, corrupted, rows, cache):
    """Of the rows of one point, in one batch where it can be one. ``cache``: of the clean run."""
    rows = list(rows.itertuples())
    if rows[0].point in BIAS_TENSORS:
        mixed = [mixed_bias(model, clean, corrupted, row) for row in rows]
        together = {x: torch.stack([getattr(bias, x) for bias in mixed], dim=1) for x in BIAS_TENSORS["prompt"]}
        return metrics_under(model, replace(corrupted, **together), len(rows))
    if rows[0].point == "z_bias":

        def put_back(z, hook):
            z = z.clone()
            for i, row in enumerate(rows):
                if row.layer in (-1, hook.layer()):
                    heads = slice(None) if row.head == -1 else row.head
                    z[i, :, heads] = cache[hook.name][0, :, heads]
            return z

        return metrics_under(
            model, corrupted, len(rows), [(f"blocks.{layer}.attn.hook_z_bias", put_back) for layer in range(2)]
        )
    return [without_shift(model, corrupted, row) for row in rows]


@functools.cache
def patched(name):
    """A model that must not be changed, and the result of patching it."""
    model = random_model(**MODELS[name])
    return model, patching(model)


@pytest.mark.parametrize("name", MODELS)
def test_every_patch_against_the_slow_way(name):
    model, frame = patched(name)
    clean, corrupted = convert_prompt(model, CLEAN), convert_prompt(model, CORRUPTED)
    with model.kv_bias(clean):
        _, cache = model.run_with_cache(TEXT[None])
    assert frame["clean_metric"].unique() == pytest.approx(metrics_under(model, clean), rel=1e-12)
    assert frame["corrupted_metric"].unique() == pytest.approx(metrics_under(model, corrupted), rel=1e-12)
    gap = frame["clean_metric"][0] - frame["corrupted_metric"][0]
    for point, rows in frame.groupby("point"):
        expected = slow_metrics(model, clean, corrupted, rows, cache)
        assert rows["metric"].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12), point
    assert frame["recovered"].tolist() == pytest.approx(
        ((frame["metric"] - frame["corrupted_metric"]) / gap).tolist(), rel=1e-12
    )
    moved = (frame["metric"] - frame["corrupted_metric"]).abs() > 1e-9
    assert moved.groupby(frame["point"]).any().all()


@pytest.mark.parametrize("name", MODELS)
def test_the_rows_are_every_head_then_every_layer_then_everything(name):
    model, frame = patched(name)
    cfg = model.cfg
    by_key_value_head = ("shift_state", "k_shift_coef", "v_shift_coef")
    for point, rows in frame.groupby("point", sort=False):
        n_heads = cfg.n_kv_heads if point in by_key_value_head else 0 if point == "prompt" else cfg.n_heads
        expected = [(layer, head) for layer in range(2) for head in range(n_heads)] + [(0, -1), (1, -1), (-1, -1)]
        assert list(zip(rows["layer"], rows["head"], strict=True)) == expected
    shift = [] if cfg.kv_shift is None else [x for x, on in zip("kvq", ("keys", "values", "queries"), strict=True)
                                             if getattr(cfg.kv_shift, on)]  # fmt: skip
    kernel = cfg.normalizer == "kernel"
    assert frame["point"].unique().tolist() == [
        "b_kv",
        *(["b_d", "bias"] if kernel else []),
        *(["shift_state", "prompt"] if shift else []),
        "z_bias",
        *(f"{x}_shift_coef" for x in shift),
    ]


@pytest.mark.parametrize("name", MODELS)
def test_patching_everything_gives_the_clean_run(name):
    model, frame = patched(name)
    frame = frame[frame["point"] == ("bias" if model.cfg.kv_shift is None else "prompt")]
    assert frame.iloc[-1][["layer", "head"]].tolist() == [-1, -1]
    assert frame["recovered"].iloc[-1] == pytest.approx(1, abs=1e-12)
    assert not frame["recovered"].iloc[:-1].isin([0, 1]).any()


def test_patching_a_prompt_with_itself_changes_nothing():
    model = random_model(kv_shift=KVShiftConfig(window=2, queries=True))
    own = {x: torch.stack([getattr(block.attn, f"{x}_shift_coef") for block in model.blocks]) for x in "kvq"}
    frame = patching(model, corrupted=CLEAN, coefficients=own)
    assert frame["metric"].to_numpy() == pytest.approx(frame["clean_metric"].to_numpy(), rel=1e-13)
    assert frame["clean_metric"].equals(frame["corrupted_metric"])
    coefs = patching(model, coefficients=own, points=[f"{x}_shift_coef" for x in "kvq"])
    assert coefs["recovered"].to_numpy() == pytest.approx(0, abs=1e-12)


def test_where_clean_and_corrupted_agree_nothing_can_be_recovered():
    frame = patching(random_model(), points=["b_kv"], metric=lambda logits: logits.new_ones(len(logits)))
    assert (frame["metric"] == 1).all()
    assert frame["recovered"].isna().all()


def test_the_head_that_carries_everything_recovers_everything():
    model = random_model(kv_shift=None)
    model.blocks[0].attn.W_O.zero_()
    model.blocks[1].attn.W_O[[0, 1, 2, 4]] = 0
    frame = patching(model, points=["bias", "z_bias"]).set_index(["point", "layer", "head"])["recovered"]
    assert frame.loc["bias", 1, 3] == pytest.approx(1, abs=1e-12)
    others = frame.loc["bias"].drop([(1, 3), (1, -1), (-1, -1)])
    assert others.tolist() == pytest.approx([0] * len(others), abs=1e-12)
    assert frame.loc["z_bias", 1, 3] != pytest.approx(1)  # the text's own share still has the corrupted normalizer


def test_by_hand():
    # the text 1 has the residual 1 + 1 (1 + b), a tenth of it is the answer's logit; b = 4 for the prompt 2, 1 for 1
    frame = activation_patching(
        pencil_model(), torch.tensor([1]), torch.tensor([0]), torch.tensor([0]), answer=0, rival=1, points=["b_kv", "z_bias"]
    )
    expected = pd.DataFrame(
        {
            "point": ["b_kv"] * 3 + ["z_bias"] * 3,
            "layer": [0, 0, -1] * 2,
            "head": [0, -1, -1] * 2,
            "metric": [0.6] * 6,
            "clean_metric": [0.6] * 6,
            "corrupted_metric": [0.3] * 6,
            "recovered": [1.0] * 6,
        }
    )
    pd.testing.assert_frame_equal(frame, expected, rtol=1e-13)


def test_the_size_of_the_batch_changes_nothing_but_rounding_and_progress_tells_it():
    model, points = random_model(), ["bias", "shift_state", "z_bias", "v_shift_coef"]
    frames = {}
    for size in (None, 1, 5, 1000):
        started, done = [], []
        frames[size] = patching(model, points=points, batch_size=size, on_start=started.append, on_progress=done.append)
        assert started == [len(frames[size])]
        assert done == sorted(done) and done[-1] == 1
        n_coef = int(frames[size]["point"].str.endswith("coef").sum())
        n_other = len(frames[size]) - n_coef
        assert len(done) == n_coef + -(-n_other // (size or 1000))  # coefficients have no batch axis
        pd.testing.assert_frame_equal(frames[size], frames[None], rtol=1e-9, atol=1e-12)


def test_other_coefficients_and_metrics():
    model = random_model(kv_shift=KVShiftConfig(window=1, keys=False))
    corrupted = convert_prompt(model, CORRUPTED)
    frame = patching(
        model, answer=None, rival=None, points="v_shift_coef", coefficients={"v": torch.tensor([0.25, 0.5])}
    )  # the metric is now the mean centered logit of the next tokens
    for row in frame.itertuples():

        def replaced(coef, hook, head=row.head):
            coef = coef.clone()
            coef[slice(None) if head == -1 else head] = torch.tensor([0.25, 0.5], dtype=torch.float64)
            return coef

        layers = range(2) if row.layer == -1 else [row.layer]
        hooks = [(f"blocks.{layer}.attn.hook_v_shift_coef", replaced) for layer in layers]
        with model.kv_bias(corrupted):
            logits = model.run_with_hooks(TEXT[None], fwd_hooks=hooks)[0]
        assert row.metric == pytest.approx(float(centered(logits)[torch.arange(3), TEXT[1:]].mean()), rel=1e-11)


def test_prompts_of_unequal_length_where_the_bias_is_rebased():
    model = random_model()
    frame = patching(model, corrupted=convert_prompt(model, tokens(4, seed=9)), points=["prompt"])
    assert frame["recovered"].iloc[-1] == pytest.approx(1, abs=1e-12)


def test_the_model_is_left_as_it_was():
    model = random_model()
    own = convert_prompt(model, tokens(3, seed=2))
    clean, corrupted = convert_prompt(model, CLEAN), convert_prompt(model, CORRUPTED)
    before = copy.deepcopy(clean.b_KV), copy.deepcopy(corrupted.b_KV)
    with model.kv_bias(own):
        patching(model, prompt=clean, corrupted=corrupted)
        assert model.attached_kv_bias is own
    assert torch.equal(clean.b_KV, before[0]) and torch.equal(corrupted.b_KV, before[1])
    assert not any(point.fwd_hooks for point in model.hook_dict.values())


def test_the_batch_script_gives_the_promised_columns():
    model = pencil_model()
    record = Record("a", "1", "0", {"corrupted": "0", "answer": 0, "rival": 1})
    frame = activation_patching.analysis.run(model, record, points="b_kv,z_bias")
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == activation_patching.analysis.columns.dtypes
    assert frame["recovered"].tolist() == pytest.approx([1] * 6)
    assert len(activation_patching.analysis.run(model, record, points="")) == 6
    with pytest.raises(KVLensError, match="corrupted: this analysis needs a field of this name"):
        activation_patching.analysis.run(model, replace(record, fields={}), points="")
    with pytest.raises(KVLensError, match="needs a text"):
        activation_patching.analysis.run(model, replace(record, text=None), points="")
