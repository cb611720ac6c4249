"""Overwriting by hand, and addition: exact where keys and values cannot depend on the first prompt, wrong elsewhere."""

import math

import numpy as np
import pytest
import torch
from analysis_models import SOFTMAX, VARIANTS, tokens
from small_models import sharp

from kvlens import KVShiftConfig, carry_bias, convert_prompt
from kvlens.analyses import bias_interactions

FIRST, SECOND = tokens(7), tokens(4, seed=2)
ROUNDING = 1e-14  # sums over at most 11 tokens of products of a few features, 2.2e-16 each
PLAIN = dict(positional_embedding_type="none", kv_shift=None)
LINEAR = [*VARIANTS, "sinusoidal", "taylor", "trained bias"]


def associative_memory():
    """phi = identity; the first two coordinates of a token's embedding are its key, the last two its value."""
    sizes = dict(n_layers=1, n_heads=1, d_model=4, d_head=2, d_vocab=5, attn_only=True, d_mlp=None, normalization_type=None)
    model = sharp(feature_map="identity", normalizer="none", **sizes, **PLAIN)
    for name, parameter in model.named_parameters():
        if ".b_" in name:
            parameter.zero_()
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
    frame = bias_interactions(associative_memory(), torch.tensor([0]), torch.tensor(second))
    assert frame["survival"].tolist() == pytest.approx([survival], abs=1e-15)


def rotated_back(b_kv, n_tokens, rotary_dim=6, base=10000.0):
    """R_{-M} b_KV pair by pair, (i, i + rotary_dim / 2), with a 2 x 2 matrix each."""
    rotated = b_kv.clone()
    for i in range(rotary_dim // 2):
        angle, j = -n_tokens * base ** (-2 * i / rotary_dim), i + rotary_dim // 2
        rotated[..., i, :] = math.cos(angle) * b_kv[..., i, :] - math.sin(angle) * b_kv[..., j, :]
        rotated[..., j, :] = math.sin(angle) * b_kv[..., i, :] + math.cos(angle) * b_kv[..., j, :]
    return rotated


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LINEAR)
def test_every_column_by_its_definition(name):
    """Of sums put together by hand: C decays and turns, and what is newly written is converted after the first shift state."""
    model = sharp(name)
    first, second = convert_prompt(model, FIRST), convert_prompt(model, SECOND)
    both = convert_prompt(model, torch.cat([FIRST, SECOND]))
    b_kv, whole = first.stacked("b_kv"), both.stacked("b_kv")
    carried = b_kv if model.cfg.decay is None else b_kv * model.cfg.decay_per_head()[:, None, None] ** 4
    carried = rotated_back(carried, 4) if model.cfg.rotates_after else carried
    of_carry = carry_bias(model, first, len(SECOND))
    torch.testing.assert_close(of_carry.stacked("b_kv"), carried, rtol=1e-13, atol=1e-13 * float(carried.abs().max()))
    assert torch.equal(of_carry.stacked("b_d"), first.stacked("b_d"))
    frame = bias_interactions(model, FIRST, SECOND)

    after = convert_prompt(model, SECOND, initial=first.select())
    for column, added in {"plain": b_kv + second.stacked("b_kv"), "aligned": carried + after.stacked("b_kv")}.items():
        expected = (added - whole).norm(dim=(-2, -1)) / whole.norm(dim=(-2, -1))
        np.testing.assert_allclose(frame[f"{column}_error"], expected.flatten(), rtol=1e-9, atol=ROUNDING)
    kept = (first.stacked("b_d").sum(-1) / both.stacked("b_d").sum(-1)).flatten()
    np.testing.assert_allclose(frame["normalizer_kept"], kept, rtol=1e-12)  # NaN for NaN under normalizer "none"
    for column, numbers in (("b_kv_cosine", "b_kv"), ("b_d_cosine", "b_d")):
        a, b = (bias.stacked(numbers).flatten(0, 1).flatten(1) for bias in (first, second))
        np.testing.assert_allclose(frame[column], (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1)), rtol=1e-12)
    for place, found in frame.set_index(["layer", "head"])["survival"].items():  # the weighted mean over the directions
        strengths = np.linalg.svd(b_kv[place].numpy(), compute_uv=False)
        u, s, w = np.linalg.svd(carried[place].numpy(), full_matrices=False)
        left = np.einsum("fr,fd,rd->r", u, whole[place].numpy(), w)  # u_r^T b_12 w_r; over the strength, of each direction
        assert found == pytest.approx((s * left).sum() / (s * strengths).sum(), rel=1e-9)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", [*LINEAR, *SOFTMAX])
def test_aligned_addition_is_exact_in_the_first_layer(name):
    linear = name in LINEAR
    model = sharp(name)
    frame = bias_interactions(model, FIRST, SECOND)
    errors = frame[["aligned_error", "aligned_b_d_error"]].fillna(0)
    assert (errors[frame["layer"] == 0] < (ROUNDING if linear else 1e-12)).all(axis=None)
    later = frame.loc[frame["layer"] == 1, "aligned_error"]  # here the second prompt would have seen the first
    assert (later > (1e-3 if linear else 1e-6)).all()  # far above rounding; softmax heads see less of it
    assert frame["aligned_b_d_error"].isna().all() == (model.cfg.normalizer == "none" and linear)
    assert linear or frame["normalizer_kept"].between(0, 1).all()


@pytest.mark.parametrize(
    ("changes", "rounding"), [(dict(normalizer=x), ROUNDING) for x in ("kernel", "none")] + [(dict(attention="softmax"), 1e-12)]
)
def test_plain_addition_is_concatenation_in_one_layer_without_positions(changes, rounding):
    frame = bias_interactions(sharp(n_layers=1, **PLAIN, **changes), FIRST, SECOND)
    assert (frame[["plain_error", "plain_b_d_error"]].fillna(0) < rounding).all(axis=None)


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
    model = sharp(**{"n_layers": 1, **PLAIN, **changes})
    if model.cfg.trainable_kv_bias:
        model.blocks[0].attn.b_KV.fill_(1.0)
    frame = bias_interactions(model, FIRST, SECOND)
    assert (frame["plain_error"] > 1e-3).all()  # far above rounding
    assert (frame["aligned_error"] < ROUNDING).all()


def size(x):
    return np.sqrt((x * x).sum(axis=tuple(range(2, x.ndim))))


def cosine(a, b):
    return (a * b).sum(axis=tuple(range(2, a.ndim))) / (size(a) * size(b))


def test_every_column_of_a_softmax_model_by_hand():
    """Queries, keys and values out of TransformerLens' cache of the concatenation, and exponentials as they stand."""
    model = sharp("softmax, learned")
    scale = float(model.blocks[0].attn.attn_scale)
    both, alone, first = (model.run_with_cache(x[None])[1] for x in (torch.cat([FIRST, SECOND]), SECOND, FIRST))
    # aligned: the second prompt at its position, seeing only its own tokens
    heads = [(f"blocks.{i}.attn.hook_attn_scores", lambda s, hook: s.index_fill(-1, torch.arange(7), -1e9)) for i in range(2)]
    with model.hooks(fwd_hooks=heads):
        aligned = model.run_with_cache(torch.cat([FIRST, SECOND])[None])[1]

    def read(cache, places):
        kv, d = [], []
        for layer in range(2):
            q = both["q", layer][0, 7:]
            e = (torch.einsum("ihd,rhd->hir", q, cache["k", layer][0, places]) / scale).exp()
            kv.append(torch.einsum("hir,rhd->hid", e, cache["v", layer][0, places]))
            d.append(e.sum(-1))
        return torch.stack(kv).detach().numpy(), torch.stack(d).detach().numpy()

    a, b, ab = read(first, slice(7)), read(alone, slice(4)), read(both, slice(11))
    n = read(aligned, slice(7, 11))
    n = tuple(x + y for x, y in zip(read(both, slice(7)), n, strict=True))
    plain = tuple(x + y for x, y in zip(a, b, strict=True))
    (a, a_d), (b, b_d), (plain, plain_d), (n, n_d), (ab, ab_d) = (
        (kv / ab[1][..., None], d / ab[1]) for kv, d in (a, b, plain, n, ab)
    )
    expected = {
        "b_kv_cosine": cosine(a, b),
        "b_d_cosine": cosine(a_d, b_d),
        "survival": (a * ab).sum(axis=(2, 3)) / (a * a).sum(axis=(2, 3)),
        "normalizer_kept": a_d.mean(axis=2),
        "plain_error": size(plain - ab) / size(ab),
        "plain_b_d_error": size(plain_d - ab_d) / size(ab_d),
        "aligned_error": size(n - ab) / size(ab),
        "aligned_b_d_error": size(n_d - ab_d) / size(ab_d),
    }
    frame = bias_interactions(model, FIRST, SECOND)
    for name, values in expected.items():
        np.testing.assert_allclose(frame[name], values.flatten(), rtol=1e-9, atol=1e-13, err_msg=name)


def test_scores_beyond_every_exponential_compare_all_the_same():
    model = sharp(attention="softmax", kv_shift=None, positional_embedding_type="none")
    for block in model.blocks:
        block.attn.W_K.data.mul_(300)
    frame = bias_interactions(model, FIRST, SECOND)
    assert frame[["survival", "normalizer_kept", "plain_b_d_error", "aligned_error"]].notna().all(axis=None)
