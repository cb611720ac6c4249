"""Overwriting by hand, and addition: exact where keys and values cannot depend on the first prompt, wrong elsewhere."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import VARIANTS, pencil_model, random_model, tokens
from kvlens.analyses.bias.pairs import CIRCUITS, bias_addition, bias_overwriting, bias_similarity, circuits
from kvlens.analyses.declaration import Record

from kvlens import (
    HookedKVTransformer,
    HookedKVTransformerConfig,
    KVLensError,
    KVShiftConfig,
    carry_bias,
    combine,
    convert_prompt,
)

FIRST, SECOND, TEXT = tokens(7), tokens(4, seed=2), tokens(5, seed=1)
ROUNDING = 1e-14  # sums over at most 11 tokens of products of a few features, 2.2e-16 each
PLAIN = dict(positional_embedding_type="none", kv_shift=None)
ALL_KINDS = {
    **VARIANTS,
    "sinusoidal": dict(positional_embedding_type="sinusoidal"),
    "taylor": dict(feature_map="taylor", kv_shift=None),
    "trained bias": dict(trainable_kv_bias=True),
}


def associative_memory():
    """phi = identity; the first two coordinates of a token's embedding are its key, the last two its value."""
    cfg = HookedKVTransformerConfig(
        n_layers=1,
        n_heads=1,
        d_model=4,
        d_head=2,
        n_ctx=9,
        d_vocab=5,
        attn_only=True,
        normalization_type=None,
        positional_embedding_type="none",
        attention="linear",
        feature_map="identity",
        normalizer="none",
        dtype=torch.float64,
        device="cpu",
    )
    model = HookedKVTransformer(cfg).requires_grad_(False)
    model.W_E.copy_(torch.tensor([[1, 0, 1, 0], [1, 0, -1, 0], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 2, 1]]))
    model.blocks[0].attn.W_K.copy_(torch.eye(4, 2)[None])
    model.blocks[0].attn.W_V.copy_(torch.eye(4).roll(2, 0)[None, :, :2])
    return model


@pytest.mark.parametrize(
    ("second", "written", "survival", "crosstalk"),
    [
        ([0], 1.0, 2.0, 0.0),  # the same again: reinforced
        ([1], -1.0, 0.0, 0.0),  # the same key with the opposite value: erased
        ([1, 1], -2.0, -1.0, 0.0),  # twice: reversed
        ([2], 0.0, 1.0, 1.0),  # the same key with another value: kept, and something else beside it
        ([3], 0.0, 1.0, 0.0),  # another key: untouched
        ([4], 2.0, 3.0, 1.0),
    ],
)
def test_overwriting_by_hand(second, written, survival, crosstalk):
    frame = bias_overwriting(associative_memory(), torch.tensor([0]), torch.tensor(second))
    expected = pd.DataFrame(
        {
            "layer": [0],
            "head": [0],
            "direction": [0],  # one token is one direction
            "strength": [1.0],
            "carried": [1.0],
            "written": [written],
            "survival": [survival],
            "crosstalk": [crosstalk],
        }
    )
    pd.testing.assert_frame_equal(frame, expected, atol=1e-15)


def rotated_back(b_kv, n_tokens, rotary_dim=6, base=10000.0):
    """R_{-M} b_KV pair by pair, (i, i + rotary_dim / 2), with a 2 x 2 matrix each."""
    rotated = b_kv.clone()
    for i in range(rotary_dim // 2):
        angle, j = -n_tokens * base ** (-2 * i / rotary_dim), i + rotary_dim // 2
        rotated[..., i, :] = math.cos(angle) * b_kv[..., i, :] - math.sin(angle) * b_kv[..., j, :]
        rotated[..., j, :] = math.sin(angle) * b_kv[..., i, :] + math.cos(angle) * b_kv[..., j, :]
    return rotated


@pytest.mark.parametrize("name", ALL_KINDS)
def test_the_carried_bias_decays_and_turns(name):
    model = random_model(**ALL_KINDS[name])
    bias = convert_prompt(model, FIRST)
    carried = carry_bias(model, bias, len(SECOND))
    expected = bias.b_KV if model.cfg.decay is None else bias.b_KV * model.cfg.decay_per_head()[:, None, None] ** 4
    if model.cfg.rotates_after:
        expected = rotated_back(expected, 4)
    torch.testing.assert_close(carried.b_KV, expected, rtol=1e-13, atol=1e-13 * float(expected.abs().max()))
    assert torch.equal(carried.b_D, bias.b_D)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_overwriting_by_its_definition(name):
    model = random_model(**ALL_KINDS[name])
    frame = bias_overwriting(model, FIRST, SECOND)
    first = convert_prompt(model, FIRST)
    both = convert_prompt(model, torch.cat([FIRST, SECOND])).b_KV.numpy()
    carried = carry_bias(model, first, len(SECOND)).b_KV.numpy()
    rows = frame.set_index(["layer", "head", "direction"])
    for layer in range(2):
        for head in range(model.cfg.n_heads):
            strengths = np.linalg.svd(first.b_KV[layer, head].numpy(), compute_uv=False)
            u, _, w = np.linalg.svd(carried[layer, head])
            assert len(rows.loc[layer, head]) == np.linalg.matrix_rank(first.b_KV[layer, head].numpy())
            for r in range(len(rows.loc[layer, head])):
                row = rows.loc[layer, head, r]
                read = u[:, r] @ both[layer, head]  # what a query along u_r reads of both prompts
                old = u[:, r] @ carried[layer, head]
                assert row["strength"] == pytest.approx(strengths[r], rel=1e-10)
                assert row["survival"] * strengths[r] == pytest.approx(read @ w[r], rel=1e-8, abs=1e-9)
                assert row["carried"] == pytest.approx(old @ w[r], rel=1e-9)
                beside = np.linalg.norm(read - (read @ w[r]) * w[r])
                assert row["crosstalk"] * strengths[r] == pytest.approx(beside, rel=1e-6, abs=1e-9)
    pd.testing.assert_series_equal(
        frame["survival"], (frame["carried"] + frame["written"]) / frame["strength"], check_names=False
    )


def test_the_strongest_directions_come_first_and_can_be_all():
    model = random_model()
    whole, two = bias_overwriting(model, FIRST, SECOND), bias_overwriting(model, FIRST, SECOND, n_directions=2)
    assert (whole.groupby(["layer", "head"])["strength"].diff().dropna() <= 0).all()
    pd.testing.assert_frame_equal(two, whole[whole["direction"] < 2].reset_index(drop=True))


@pytest.mark.parametrize("name", ALL_KINDS)
def test_the_summary_is_the_weighted_mean_of_the_directions(name):
    model = random_model(**ALL_KINDS[name])
    rows = bias_overwriting(model, FIRST, SECOND)
    rows["weight"] = rows["strength"] * rows["carried"]
    rows["weighted"] = rows["weight"] * rows["survival"]
    sums = rows.groupby(["layer", "head"])[["weight", "weighted"]].sum()
    summary = circuits(model, FIRST, SECOND).set_index(["layer", "head"])["survival"]
    np.testing.assert_allclose(summary, sums["weighted"] / sums["weight"], rtol=1e-9)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_aligned_addition_is_exact_in_the_first_layer(name):
    model = random_model(**ALL_KINDS[name])
    frame = circuits(model, FIRST, SECOND)
    errors = frame[["aligned_error", "aligned_b_d_error"]].fillna(0)
    assert (errors[frame["layer"] == 0] < ROUNDING).all(axis=None)
    assert (frame.loc[frame["layer"] == 1, "aligned_error"] > 1e-3).all()  # here the second prompt would have seen the first
    assert frame["aligned_b_d_error"].isna().all() == (model.cfg.normalizer == "none")


@pytest.mark.parametrize("name", ALL_KINDS)
def test_aligned_addition_is_concatenation_in_one_layer(name):
    model = random_model(**{**ALL_KINDS[name], "n_layers": 1})
    frame = bias_addition(model, FIRST, SECOND, TEXT).set_index("condition")
    assert frame.loc["aligned", "logit_error"] < 1e-13
    assert frame.loc["aligned", "kl"] < 1e-13
    assert (frame.loc[["first", "second"], "logit_error"] > 1e-3).all()


@pytest.mark.parametrize("normalizer", ["kernel", "none"])
def test_plain_addition_is_concatenation_in_one_layer_without_positions(normalizer):
    model = random_model(n_layers=1, normalizer=normalizer, **PLAIN)
    frame = circuits(model, FIRST, SECOND)
    assert (frame[["plain_error", "plain_b_d_error"]].fillna(0) < ROUNDING).all(axis=None)
    assert bias_addition(model, FIRST, SECOND, TEXT)["logit_error"][1] < 1e-13


@pytest.mark.parametrize(
    "changes",
    [
        {"positional_embedding_type": "rotary"},
        {"positional_embedding_type": "sinusoidal"},
        {"decay": "retnet", "normalizer": "none"},
        {"kv_shift": KVShiftConfig()},
        {"trainable_kv_bias": True},
    ],
    ids=str,
)
def test_plain_addition_ignores_positions_decay_shift_and_what_was_trained(changes):
    model = random_model(**{"n_layers": 1, **PLAIN, **changes})
    if model.cfg.trainable_kv_bias:
        model.blocks[0].attn.b_KV.fill_(1.0)
    frame = circuits(model, FIRST, SECOND)
    assert (frame["plain_error"] > 1e-3).all()
    assert (frame["aligned_error"] < ROUNDING).all()


def test_addition_against_the_slow_way():
    model = random_model(kv_shift=None)
    first, second = convert_prompt(model, FIRST), convert_prompt(model, SECOND)
    whole = model(torch.cat([FIRST, SECOND, TEXT])[None])[0, -5:]
    with model.kv_bias(first + second):
        added = model(TEXT[None])[0]
    frame = bias_addition(model, FIRST, SECOND, TEXT).set_index("condition")
    assert frame.index.tolist() == ["whole", "plain", "aligned", "first", "second"]
    p, q = whole.log_softmax(-1), added.log_softmax(-1)
    loss = -q[torch.arange(4), TEXT[1:]].mean()
    expected = [(added - whole).norm() / whole.norm(), (p.exp() * (p - q)).sum(-1).mean(), loss]
    assert frame.loc["plain"].tolist() == pytest.approx([float(x) for x in expected], rel=1e-9)
    assert frame.loc["whole"].tolist() == pytest.approx([0, 0, float(-p[torch.arange(4), TEXT[1:]].mean())], abs=1e-12)
    assert frame["loss"].notna().all()
    assert bias_addition(model, FIRST, SECOND, TEXT[:1])["loss"].isna().all()


def test_conditions_put_together_by_hand():
    model = random_model()  # with a shift state and RoPE, so that it matters whose shift state is taken and what is carried
    first, second = convert_prompt(model, FIRST), convert_prompt(model, SECOND)
    both = convert_prompt(model, torch.cat([FIRST, SECOND]))
    by_hand = {
        "plain": combine(first, second, shift_state="last"),
        "first": replace(both, b_KV=rotated_back(first.b_KV, 4), b_D=first.b_D),
    }
    whole = model(torch.cat([FIRST, SECOND, TEXT])[None])[0, -5:]
    found = bias_addition(model, FIRST, SECOND, TEXT).set_index("condition")["logit_error"]
    for name, bias in by_hand.items():
        with model.kv_bias(bias):
            error = float((model(TEXT[None])[0] - whole).norm() / whole.norm())
        assert found[name] == pytest.approx(error, rel=1e-9)


def test_normalizer_kept_is_the_first_prompts_share_of_b_d():
    model = random_model(kv_shift=None)
    first, both = (convert_prompt(model, x).b_D.sum(-1) for x in (FIRST, torch.cat([FIRST, SECOND])))
    np.testing.assert_allclose(circuits(model, FIRST, SECOND)["normalizer_kept"], (first / both).flatten(), rtol=1e-12)


def test_similarity_against_loops():
    model = random_model()
    biases = [convert_prompt(model, tokens(n, seed=n)) for n in (3, 6, 4)]
    frame = bias_similarity(biases)
    expected = []
    for a, b in ((0, 1), (0, 2), (1, 2)):
        for layer in range(2):
            for head in range(5):
                cosines = [
                    torch.cosine_similarity(*(getattr(biases[i], x)[layer, head].flatten() for i in (a, b)), dim=0)
                    for x in ("b_KV", "b_D")
                ]
                expected.append((a, b, layer, head, *(float(c) for c in cosines)))
    columns = ["prompt_a", "prompt_b", "layer", "head", "b_kv_cosine", "b_d_cosine"]
    pd.testing.assert_frame_equal(frame, pd.DataFrame(expected, columns=columns), rtol=1e-12)


def test_similarity_depends_on_direction_and_not_size():
    bias = convert_prompt(random_model(kv_shift=None), FIRST)
    frame = bias_similarity([bias, 0.25 * bias, -2.0 * bias, bias.zero_like()]).set_index(["prompt_a", "prompt_b"])
    for pair, cosine in {(0, 1): 1.0, (0, 2): -1.0, (1, 2): -1.0}.items():
        np.testing.assert_allclose(frame.loc[pair, ["b_kv_cosine", "b_d_cosine"]], cosine, rtol=1e-14)
    assert frame.loc[(0, 3), ["b_kv_cosine", "b_d_cosine"]].isna().all(axis=None)
    without = bias_similarity(convert_prompt(random_model(normalizer="none"), tokens(6).reshape(2, 3)))
    assert without["b_d_cosine"].isna().all() and without["b_kv_cosine"].notna().all()


def test_a_batch_of_biases_is_a_list_of_them():
    model = random_model()
    batch = convert_prompt(model, tokens(12).reshape(3, 4))
    pd.testing.assert_frame_equal(bias_similarity(batch), bias_similarity([batch.select_prompt(i) for i in range(3)]))


def test_the_batch_script_gives_the_promised_columns():
    record = Record("a", "0 1 1", fields={"second_prompt": "1 0"})
    model = pencil_model()
    CIRCUITS.check_model(model)
    frame = CIRCUITS.run(model, record)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == CIRCUITS.columns.dtypes
    pd.testing.assert_frame_equal(frame, circuits(model, torch.tensor([0, 1, 1]), torch.tensor([1, 0])))
    with pytest.raises(KVLensError, match="second_prompt: this analysis needs a field of this name .* this record has: other"):
        CIRCUITS.run(model, Record("a", "0 1", fields={"other": 1}))
    with pytest.raises(KVLensError, match="prompt: expected token ids .* got 'the widget'"):
        CIRCUITS.run(model, Record("a", "the widget"))


def test_bad_input():
    model = random_model()
    bias = convert_prompt(model, FIRST)
    with pytest.raises(KVLensError, match="at least two biases, got 1"):
        bias_similarity([bias])
    with pytest.raises(KVLensError, match="bias 1: expected the bias of one prompt, got a batch of 2"):
        bias_similarity([bias, convert_prompt(model, tokens(6).reshape(2, 3))])
    with pytest.raises(KVLensError, match="bias 1: weights differs"):
        bias_similarity([bias, convert_prompt(random_model(seed=4), FIRST)])
    with pytest.raises(KVLensError, match="n_directions must be at least 1, got 0"):
        bias_overwriting(model, FIRST, SECOND, n_directions=0)
    with pytest.raises(KVLensError, match="second_prompt: it is empty"):
        circuits(model, FIRST, SECOND[:0])
    with model.kv_bias(bias), pytest.raises(KVLensError, match="a bias is attached"):
        bias_addition(model, FIRST, SECOND, TEXT)
