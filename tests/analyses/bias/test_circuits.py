"""Overwriting by hand, and addition: exact where keys and values cannot depend on the first prompt, wrong elsewhere."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from analysis_models import VARIANTS, pencil_model, random_model, tokens
from kvlens.analyses.bias.pairs import circuits
from kvlens.analyses.declaration import Record

from kvlens import (
    HookedKVTransformer,
    HookedKVTransformerConfig,
    KVLensError,
    KVShiftConfig,
    carry_bias,
    convert_prompt,
)

FIRST, SECOND = tokens(7), tokens(4, seed=2)
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
    ("second", "survival"),
    [
        ([0], 2.0),  # the same again: reinforced
        ([1], 0.0),  # the same key with the opposite value: erased
        ([1, 1], -1.0),  # twice: reversed
        ([2], 1.0),  # the same key with another value: kept
        ([3], 1.0),  # another key: untouched
        ([4], 3.0),
    ],
)
def test_survival_by_hand(second, survival):
    frame = circuits(associative_memory(), torch.tensor([0]), torch.tensor(second))
    assert frame["survival"].tolist() == pytest.approx([survival], abs=1e-15)


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
def test_survival_is_the_weighted_mean_over_the_directions(name):
    model = random_model(**ALL_KINDS[name])
    first = convert_prompt(model, FIRST)
    both = convert_prompt(model, torch.cat([FIRST, SECOND])).b_KV.numpy()
    carried = carry_bias(model, first, len(SECOND)).b_KV.numpy()
    survival = circuits(model, FIRST, SECOND).set_index(["layer", "head"])["survival"]
    for place, found in survival.items():
        strengths = np.linalg.svd(first.b_KV[place].numpy(), compute_uv=False)
        u, s, w = np.linalg.svd(carried[place], full_matrices=False)
        kept = np.einsum("fr,fd,rd->r", u, both[place], w)  # u_r^T b_12 w_r; over the strength, of each direction
        assert found == pytest.approx((s * kept).sum() / (s * strengths).sum(), rel=1e-9)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_similarity_is_the_cosine(name):
    model = random_model(**ALL_KINDS[name])
    biases, frame = [convert_prompt(model, x) for x in (FIRST, SECOND)], circuits(model, FIRST, SECOND)
    for column, numbers in (("b_kv_cosine", "b_KV"), ("b_d_cosine", "b_D")):
        a, b = (getattr(bias, numbers).flatten(0, 1).flatten(1).numpy() for bias in biases)
        with np.errstate(invalid="ignore"):  # 0 / 0 under normalizer "none"
            expected = [x @ y / (np.linalg.norm(x) * np.linalg.norm(y)) for x, y in zip(a, b, strict=True)]
        np.testing.assert_allclose(frame[column], expected, rtol=1e-12)


@pytest.mark.parametrize("name", ALL_KINDS)
def test_aligned_addition_is_exact_in_the_first_layer(name):
    model = random_model(**ALL_KINDS[name])
    frame = circuits(model, FIRST, SECOND)
    errors = frame[["aligned_error", "aligned_b_d_error"]].fillna(0)
    assert (errors[frame["layer"] == 0] < ROUNDING).all(axis=None)
    assert (frame.loc[frame["layer"] == 1, "aligned_error"] > 1e-3).all()  # here the second prompt would have seen the first
    assert frame["aligned_b_d_error"].isna().all() == (model.cfg.normalizer == "none")


@pytest.mark.parametrize("normalizer", ["kernel", "none"])
def test_plain_addition_is_concatenation_in_one_layer_without_positions(normalizer):
    model = random_model(n_layers=1, normalizer=normalizer, **PLAIN)
    frame = circuits(model, FIRST, SECOND)
    assert (frame[["plain_error", "plain_b_d_error"]].fillna(0) < ROUNDING).all(axis=None)


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


def test_sums_put_together_by_hand():
    model = random_model()  # with a shift state and RoPE, so that it matters whose shift state is taken and what is carried
    first, second = convert_prompt(model, FIRST), convert_prompt(model, SECOND)
    after = convert_prompt(model, SECOND, initial=replace(first, b_KV=0 * first.b_KV, b_D=0 * first.b_D))
    both = convert_prompt(model, torch.cat([FIRST, SECOND])).b_KV
    sums = {"plain": first.b_KV + second.b_KV, "aligned": rotated_back(first.b_KV, 4) + after.b_KV}
    frame = circuits(model, FIRST, SECOND)
    for name, added in sums.items():
        expected = (added - both).norm(dim=(-2, -1)) / both.norm(dim=(-2, -1))
        np.testing.assert_allclose(frame[f"{name}_error"], expected.flatten(), rtol=1e-9, atol=ROUNDING)


def test_normalizer_kept_is_the_first_prompts_share_of_b_d():
    model = random_model(kv_shift=None)
    first, both = (convert_prompt(model, x).b_D.sum(-1) for x in (FIRST, torch.cat([FIRST, SECOND])))
    np.testing.assert_allclose(circuits(model, FIRST, SECOND)["normalizer_kept"], (first / both).flatten(), rtol=1e-12)


def test_the_batch_script_gives_the_promised_columns():
    record = Record("a", "0 1 1", fields={"second_prompt": "1 0"})
    model = pencil_model()
    circuits.analysis.check_model(model)
    frame = circuits.analysis.run(model, record)
    assert {name: str(dtype) for name, dtype in frame.dtypes.items()} == circuits.analysis.columns.dtypes
    pd.testing.assert_frame_equal(frame, circuits(model, torch.tensor([0, 1, 1]), torch.tensor([1, 0])))
    with pytest.raises(KVLensError, match="second_prompt: this analysis needs a field of this name .* this record has: other"):
        circuits.analysis.run(model, Record("a", "0 1", fields={"other": 1}))
    with pytest.raises(KVLensError, match="prompt: expected token ids .* got 'the widget'"):
        circuits.analysis.run(model, Record("a", "the widget"))
