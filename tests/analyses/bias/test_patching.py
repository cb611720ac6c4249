"""Every patch against a slow reference (a bias, a model or a softmax built by hand), and the known ends of the scale."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import SOFTMAX, VARIANTS, pencil_model, tokens
from kvlens.analyses.bias.exchange import HeadExchange
from kvlens.analyses.bias.patching import POINTS as ALL_POINTS
from kvlens.analyses.segments import telling
from small_models import sharp
from stacked_tensors import with_stacked

from kvlens import KVBias, KVLensError, KVShiftConfig, convert_prompt
from kvlens.analyses import activation_patching
from kvlens.memory import NUMBERS_PER_PASS

CLEAN, CORRUPTED, TEXT = tokens(7), tokens(7, seed=5), tokens(4, seed=1)
ANSWER, RIVAL = 3, 11
BIAS_TENSORS = {
    "b_kv": ["b_kv"],
    "b_d": ["b_d"],
    "bias": ["b_kv", "b_d"],
    "shift_state": ["last_k", "last_v", "last_q"],
    "prompt": ["b_kv", "b_d", "last_k", "last_v", "last_q"],
}
LINEAR = [*VARIANTS, "values shifted, relu", "gqa, queries shifted"]
MODELS = [*LINEAR, *SOFTMAX]
POINTS = {
    "rope after": "b_kv b_d bias shift_state prompt z_bias k_shift_coef v_shift_coef",
    "rope before, no shift": "b_kv b_d bias z_bias",
    "gqa decay": "b_kv shift_state prompt z_bias k_shift_coef v_shift_coef",
    "learned, queries shifted": "b_kv b_d bias shift_state prompt z_bias k_shift_coef v_shift_coef q_shift_coef",
    "values shifted, relu": "b_kv shift_state prompt z_bias v_shift_coef",
    "gqa, queries shifted": "b_kv b_d bias shift_state prompt z_bias k_shift_coef v_shift_coef q_shift_coef",
    "softmax, shifted": "bias keys values shift_state prompt z_bias k_shift_coef v_shift_coef q_shift_coef",
}
"""Those of a model; of the other softmax models ``bias keys values z_bias``."""


def patching(model, **changes):
    arguments = dict(prompt=CLEAN, corrupted=CORRUPTED, text=TEXT, answer=ANSWER, rival=RIVAL)
    return activation_patching(model, **{**arguments, **changes})


def metric(logits) -> float:
    return float(logits[0, -1, ANSWER] - logits[0, -1, RIVAL])


def metrics_under(model, bias, n_rows=1, fwd_hooks=()):
    with model.kv_bias(bias):
        logits = model.run_with_hooks(TEXT.expand(n_rows, -1), fwd_hooks=list(fwd_hooks))[:, -1]
    return (logits[:, ANSWER] - logits[:, RIVAL]).tolist()


def mixed_bias(model, clean, corrupted, row):
    """The corrupted bias with one part replaced by the clean one's."""
    mixed = {}
    for name in BIAS_TENSORS[row.point]:
        patched, group = corrupted.stacked(name), 1
        head_axis = -2 if name in ("b_d", "last_k", "last_v", "last_q") else -3
        if name == "last_q":
            group = model.cfg.n_heads // model.cfg.n_kv_heads
        layers = slice(None) if row.layer == -1 else slice(row.layer, row.layer + 1)
        heads = slice(None) if row.head == -1 else slice(row.head * group, (row.head + 1) * group)
        here, there = (x[layers].movedim(head_axis, 0) for x in (patched, clean.stacked(name)))
        here[heads] = there[heads]
        mixed[name] = patched
    return with_stacked(corrupted, **mixed)


def without_shift(model, corrupted, row):
    """The metric of the same weights with the identity as the named coefficients."""
    coefs = [getattr(block.attn, row.point) for layer, block in enumerate(model.blocks) if row.layer in (-1, layer)]
    before = [coef.clone() for coef in coefs]
    for coef in coefs:
        coef[slice(None) if row.head == -1 else row.head] = torch.eye(1, coef.shape[1], dtype=coef.dtype)[0]
    try:
        return metrics_under(model, replace(corrupted, fingerprint=model.fingerprint(), record=None))[0]
    finally:
        for coef, old in zip(coefs, before, strict=True):
            coef.copy_(old)


def slow_metrics(model, clean, corrupted, rows, cache):
    """Of the rows of one point, in one batch where it can be one. ``cache``: of the clean run."""
    rows = list(rows.itertuples())
    if rows[0].point in BIAS_TENSORS:
        mixed = [mixed_bias(model, clean, corrupted, row).repeat(1) for row in rows]
        return metrics_under(model, KVBias.batch(mixed), len(rows))
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
    model = sharp(name)
    return model, patching(model)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LINEAR)
def test_every_patch_against_the_slow_way(name):
    model, frame = patched(name)
    clean, corrupted = convert_prompt(model, CLEAN), convert_prompt(model, CORRUPTED)
    with model.kv_bias(clean):
        _, cache = model.run_with_cache(TEXT[None])
    gap = frame["clean_metric"][0] - frame["corrupted_metric"][0]
    for point, rows in frame.groupby("point"):
        expected = slow_metrics(model, clean, corrupted, rows, cache)
        assert rows["metric"].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-12), point
    recovered = (frame["metric"] - frame["corrupted_metric"]) / gap
    assert frame["recovered"].tolist() == pytest.approx(recovered.tolist(), rel=1e-12)
    moved = (frame["metric"] - frame["corrupted_metric"]).abs() > 1e-9
    assert moved.groupby(frame["point"]).any().all()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_the_rows_are_every_head_then_every_layer_then_everything(name):
    model, frame = patched(name)
    assert frame["point"].unique().tolist() == POINTS.get(name, "bias keys values z_bias").split()
    by_key_value_head = ("shift_state", "k_shift_coef", "v_shift_coef")
    for point, rows in frame.groupby("point", sort=False):
        n_heads = model.cfg.n_kv_heads if point in by_key_value_head else 0 if point == "prompt" else model.cfg.n_heads
        expected = [(layer, head) for layer in range(2) for head in range(n_heads)] + [(0, -1), (1, -1), (-1, -1)]
        assert list(zip(rows["layer"], rows["head"], strict=True)) == expected


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MODELS)
def test_patching_everything_gives_the_clean_run_and_nothing_the_corrupted_one(name):
    model, frame = patched(name)
    clean, corrupted = (metric(model(torch.cat([x, TEXT])[None])) for x in (CLEAN, CORRUPTED))
    np.testing.assert_allclose(frame["clean_metric"], clean, rtol=1e-10)
    np.testing.assert_allclose(frame["corrupted_metric"], corrupted, rtol=1e-10)
    recovered = frame.loc[frame["point"] == ("bias" if model.cfg.kv_shift is None else "prompt"), "recovered"]
    assert recovered.iloc[-1] == pytest.approx(1, abs=1e-10)
    assert not recovered.iloc[:-1].isin([0, 1]).any()
    of_prompt = [point for point in frame["point"].unique() if "coef" not in point]
    itself = patching(model, corrupted=CLEAN, points=of_prompt)
    np.testing.assert_allclose(itself["metric"], clean, rtol=1e-10)
    assert name not in LINEAR or itself["clean_metric"].equals(itself["corrupted_metric"])


def test_where_clean_and_corrupted_agree_nothing_can_be_recovered():
    frame = patching(sharp(), points=["b_kv"], metric=lambda logits: logits.new_ones(len(logits)))
    assert (frame["metric"] == 1).all()
    assert frame["recovered"].isna().all()


def test_the_head_that_carries_everything_recovers_everything():
    model = sharp(kv_shift=None)
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


def rows_of(frame, *points):
    return pd.concat([frame[frame["point"] == point] for point in points], ignore_index=True)


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_the_rows_of_a_pass_and_the_order_of_points_change_only_rounding_and_progress_tells_it(rows, monkeypatch):
    """Values replace b_KV in each row, and leave b_D as it is."""
    found, done = [patched("rope after"), patched("softmax, learned")], []
    monkeypatch.setattr(HeadExchange, "_numbers_per_row", lambda *of: NUMBERS_PER_PASS // rows)
    for (model, whole), points in zip(found, (["v_shift_coef", "shift_state", "z_bias"], ["values"]), strict=True):
        done.clear()
        with telling(done.append):
            frame = patching(model, points=points)
        assert done == sorted(done) and done[-1] == 1
        is_coef = frame["point"].str.endswith("coef")  # they have no batch axis
        together = [len(list(of)) for _, of in itertools.groupby(frame.loc[~is_coef, "layer"].clip(lower=0))]
        assert len(done) == is_coef.sum() + sum(-(-n // rows) for n in together)
        pd.testing.assert_frame_equal(frame, rows_of(whole, *points), rtol=1e-9, atol=1e-12)


def test_without_an_answer_the_metric_is_of_the_next_tokens():
    model = sharp(kv_shift=KVShiftConfig(window=1, keys=False))
    corrupted = convert_prompt(model, CORRUPTED)
    frame = patching(model, answer=None, rival=None, points="v_shift_coef")
    for row in frame.itertuples():

        def replaced(coef, hook, head=row.head):
            coef = coef.clone()
            coef[slice(None) if head == -1 else head] = torch.tensor([1.0, 0.0], dtype=torch.float64)
            return coef

        layers = range(2) if row.layer == -1 else [row.layer]
        hooks = [(f"blocks.{layer}.attn.hook_v_shift_coef", replaced) for layer in layers]
        with model.kv_bias(corrupted):
            logits = model.run_with_hooks(TEXT[None], fwd_hooks=hooks)[0]
        log_p = logits.log_softmax(dim=-1)
        assert row.metric == pytest.approx(float(log_p[torch.arange(3), TEXT[1:]].mean()), rel=1e-11)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LINEAR)
def test_a_point_is_what_its_hooks_see_exact(name):
    """Of every point by the hooks in its table: each sees the clean prompt's tensor, of all layers."""
    model, frame = patched(name)
    with model.kv_bias(convert_prompt(model, CLEAN)):
        _, clean = model.run_with_cache(TEXT[None])
    identity = torch.eye(1, 1 + (model.cfg.kv_shift.window if model.cfg.kv_shift else 0), dtype=torch.float64)
    for point in frame["point"].unique():
        names = {f"blocks.{layer}.attn.{hook}" for layer in range(2) for hook in ALL_POINTS[point].hooks} & set(model.hook_dict)

        def put(x, hook):
            return (identity.expand_as(x) if hook.name.endswith("coef") else clean[hook.name]).clone()

        found = metrics_under(model, convert_prompt(model, CORRUPTED), fwd_hooks=[(name, put) for name in names])[0]
        assert found == pytest.approx(frame.query("point == @point and layer == -1")["metric"].item(), rel=1e-10), point


def test_prompts_of_unequal_length_where_the_bias_is_rebased():
    model = sharp()
    frame = patching(model, corrupted=convert_prompt(model, tokens(4, seed=9)), points=["prompt"])
    assert frame["recovered"].iloc[-1] == pytest.approx(1, abs=1e-12)


# --- softmax models: keys and values of the prompt's own -------------------------------------------------------------


@pytest.mark.parametrize("name", ["softmax, learned", "softmax, rotary, grouped", "softmax, alibi"])
def test_the_last_layers_keys_and_values_are_those_of_transformer_lens(name):
    """No later layer reads the prompt's stream there, so patching hook_k and hook_v is equivalent."""
    model, frame = patched(name)
    recovered = frame.set_index(["point", "layer", "head"])["metric"]
    _, cache = model.run_with_cache(torch.cat([CLEAN, TEXT])[None])
    n_kv = model.cfg.n_kv_heads
    single = range(n_kv) if n_kv == model.cfg.n_heads else ()  # a key-value head is no single query head of a group

    def take(x, hook, head):
        x = x.clone()
        x[:, :7, head] = cache[hook.name][:, :7, head]
        return x

    for point, hooked in {"bias": "kv", "keys": "k", "values": "v"}.items():
        for head in (-1, *single):
            taken = functools.partial(take, head=slice(None) if head == -1 else head)
            hooks = [(f"blocks.1.attn.hook_{x}", taken) for x in hooked]
            expected = metric(model.run_with_hooks(torch.cat([CORRUPTED, TEXT])[None], fwd_hooks=hooks))
            assert recovered[point, 1, head] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["softmax, learned", "softmax, rotary, grouped"])
@pytest.mark.parametrize("point", ["bias", "keys", "values"])
def test_every_head_against_a_softmax_by_hand(name, point):
    """The corrupted run, with one head's output at the text recomputed from the clean prompt's keys or values, or both."""
    model, whole = patched(name)
    frame = whole[whole["point"] == point].set_index(["layer", "head"])["metric"]
    caches = {x: model.run_with_cache(torch.cat([prompt, TEXT])[None])[1] for x, prompt in (("a", CLEAN), ("b", CORRUPTED))}
    key = "hook_k" if model.cfg.positional_embedding_type == "standard" else "hook_rot_k"
    group, scale = model.cfg.n_heads // model.cfg.n_kv_heads, float(model.blocks[0].attn.attn_scale)
    keys_from, values_from = {"bias": "aa", "keys": "ab", "values": "ba"}[point]
    seen = {}

    def watch(x, hook):
        seen[hook.name.rpartition(".")[2]] = x

    for layer in range(2):
        at = f"blocks.{layer}.attn."
        for head in range(model.cfg.n_heads):

            def recomputed(z, hook, head=head, at=at):
                k, v = (seen[x][0, :, head // group].clone() for x in (key, "hook_v"))
                k[:7] = caches[keys_from][at + key][0, :7, head // group]
                v[:7] = caches[values_from][at + "hook_v"][0, :7, head // group]
                q = seen["hook_q" if key == "hook_k" else "hook_rot_q"][0, 7:, head]
                scores = (q @ k.T / scale).masked_fill(~torch.ones(4, 11, dtype=torch.bool).tril(7), -torch.inf)
                z = z.clone()
                z[0, 7:, head] = scores.softmax(dim=-1) @ v
                return z

            names = [key, "hook_v", "hook_q" if key == "hook_k" else "hook_rot_q"]
            hooks = [*((at + name, watch) for name in names), (at + "hook_z", recomputed)]
            logits = model.run_with_hooks(torch.cat([CORRUPTED, TEXT])[None], fwd_hooks=hooks)
            assert frame[layer, head] == pytest.approx(metric(logits), rel=1e-9)


def test_keys_come_with_their_weights_and_values_without():
    """Of multiples of the prompts' biases, where values are patched in every row, and where all keys are."""
    model = sharp("softmax, learned")
    clean, corrupted = (convert_prompt(model, prompt) for prompt in (CLEAN, CORRUPTED))

    def metrics(point, a, b):
        return patching(model, prompt=a * clean, corrupted=b * corrupted, points=point)["metric"].to_numpy()

    np.testing.assert_allclose(metrics("values", 2, 3), metrics("values", 5, 3), rtol=1e-9)
    np.testing.assert_allclose(metrics("keys", 2, 3)[-1], metrics("keys", 2, 7)[-1], rtol=1e-9)
    assert abs(metrics("keys", 2, 3)[-1] - metrics("keys", 5, 3)[-1]) > 1e-3


def test_biases_of_fewer_keys_and_of_features_without_a_prompt():
    model = sharp("softmax, learned")
    for options in (
        dict(method="landmark", n_features=3, key_steps=2, verbose=False, n_continuations=2, continuation_length=3),
        dict(method="random", n_features=8),
    ):
        clean, corrupted = (convert_prompt(model, x, **options) for x in (CLEAN, CORRUPTED))
        frame = patching(model, prompt=clean, corrupted=corrupted)
        assert frame["point"].unique().tolist() == ["bias", "z_bias"]
        assert frame.set_index(["point", "layer", "head"])["recovered"]["bias", -1, -1] == pytest.approx(1, abs=1e-9)
        with model.kv_bias(clean):
            assert frame["clean_metric"].iloc[0] == pytest.approx(metric(model(TEXT[None])), rel=1e-9)
        with pytest.raises(KVLensError, match="only if the two prompts pair token by token"):
            patching(model, prompt=clean, corrupted=corrupted, points=["keys"])
