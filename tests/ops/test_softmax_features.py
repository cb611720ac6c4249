"""Features for softmax attention against plain exponentials in float64, and at scores where those overflow."""

import math

import pytest
import torch
from ops_cases import normal
from torch import Tensor

from kvlens.ops.softmax_attention import ScaledFeatures, ScaledMass, join_bias, naive_softmax_attention
from kvlens.ops.softmax_features import (
    ScoreRule,
    learned_log_features,
    naive_random_features,
    naive_virtual_key_features,
    random_log_features,
    scaled_exp,
    taylor_features,
    virtual_key_scores,
)

BATCH, POS, HEAD, KV, R, D = 2, 5, 6, 3, 7, 11
EPS = torch.finfo(torch.float64).eps
RULES = {
    "plain": ScoreRule(math.sqrt(D)),
    "capped": ScoreRule(math.sqrt(D), soft_cap=1.5),
    "alibi": ScoreRule(2.0, slopes=torch.tensor([0.5, 0.25, 0.4, 0.1, 0.3, 0.2], dtype=torch.float64)),
    "local": ScoreRule(math.sqrt(D), window=6),
}


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, distances from 1 (all different), positions that differ between rows."""
    distance = torch.stack([torch.randperm(R, generator=torch.Generator().manual_seed(g)) + 1 for g in range(KV)])
    positions = torch.stack([torch.arange(POS), torch.arange(POS) + 3])
    return normal(BATCH, POS, HEAD, D, seed=1), normal(BATCH, KV, R, D, seed=2), distance.expand(BATCH, KV, R), positions


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_virtual_keys_score_as_the_model_does(rule):
    q, keys, distance, positions = case()
    expected = naive_virtual_key_features(q, keys, rule, distance, positions)
    phi = scaled_exp(virtual_key_scores(q, keys, rule, distance, positions))
    torch.testing.assert_close(phi.features * phi.log_scale.exp()[..., None], expected, rtol=50 * EPS, atol=0)
    if rule.window is not None:
        assert bool((expected == 0).any())
        assert bool((expected > 0).any())


def test_unused_keys_set_no_scale():
    q, keys, _, _ = case()
    keys = keys.clone()
    keys[:, :, 0] *= 1e4  # scores of thousands, in a key that has no weight
    used = torch.ones(1, HEAD, R, dtype=torch.bool)
    used[:, :, 0] = False
    scores = virtual_key_scores(q, keys, RULES["plain"])
    phi, alone = scaled_exp(scores, used), scaled_exp(scores[..., 1:])
    assert torch.equal(phi.log_scale, alone.log_scale)
    assert torch.equal(phi.features[..., 1:], alone.features)
    nothing = scaled_exp(virtual_key_scores(q, keys, RULES["plain"]), torch.zeros(1, HEAD, R, dtype=torch.bool))
    assert not nothing.features.any()
    assert bool((nothing.log_scale == -torch.inf).all())


def test_random_features_are_those_of_one_vector_and_unbiased():
    x, w = normal(1, 1, 2, D, seed=3), normal(2, 13, D, seed=4)
    for head in range(2):
        expected = naive_random_features(x[0, 0, head], w[head], 3.0)
        torch.testing.assert_close(random_log_features(x, w, 3.0).exp()[0, 0, head], expected, rtol=50 * EPS, atol=0)
    q, k = 0.5 * normal(1, 1, 1, D, seed=5), 0.5 * normal(1, 1, 1, D, seed=6)
    many = normal(1, 400_000, D, seed=7)
    terms = (random_log_features(q, many, 3.0) + random_log_features(k, many, 3.0)).exp().flatten() * many.shape[1]
    error = terms.std() / math.sqrt(len(terms))
    assert abs(float(terms.mean() - torch.exp((q * k).sum() / 3.0))) < 4 * float(error)


def test_learned_features_are_exponentials_of_lines():
    x = torch.tensor([[[[2.0, 3.0]]]], dtype=torch.float64)
    weight, offset = torch.tensor([[[1.0, 0.5], [-1.0, 0.0]]], dtype=x.dtype), torch.tensor([[0.25, 1.0]], dtype=x.dtype)
    assert learned_log_features(x, weight, offset).flatten().tolist() == [3.75, -1.0]


def test_taylor_features_multiply_to_the_polynomial():
    q, k = normal(1, 1, 1, D, seed=8), normal(1, 1, 1, D, seed=9)
    a, b = taylor_features(q, 2.0), taylor_features(k, 2.0)
    s = float((q * k).sum()) / 2.0
    product = float((a.features * b.features).sum() * (a.log_scale + b.log_scale).exp())
    assert product == pytest.approx(1 + s + s * s / 2, rel=1e-12)
    assert float(a.features.norm()) == pytest.approx(1.0, rel=1e-12)


def context(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The context's attention and log-normalizer: every query sees every key, [batch, key, kv_head, d]."""
    read = naive_softmax_attention(q, keys, values, scale, causal=False, log_normalizer=True)
    return read.z, read.log_normalizer


def biased(scale: float = 1.0, dtype: torch.dtype = torch.float64):
    """(phi, z_ctx, log_n, b_kv, b_d and what they came from), scores of size ``scale``."""
    q, keys, _, _ = case()
    q, rule = (q * scale).to(dtype), RULES["plain"]
    own, values = normal(BATCH, 4, KV, D, seed=10, dtype=dtype), normal(BATCH, 4, KV, D, seed=11, dtype=dtype)
    b_kv, b_d = normal(1, KV, R, D, seed=12, dtype=dtype), normal(1, KV, R, seed=13, dtype=dtype).abs()
    phi = scaled_exp(virtual_key_scores(q, keys.to(dtype), rule))
    z, log_n = context(q, own, values, rule.scale)
    return q, keys.to(dtype), own, values, phi, z, log_n, b_kv, b_d


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_keys_that_are_the_context_split_in_two_give_the_whole_at_any_score(scale):
    q, keys, own, values, phi, z, log_n, _, _ = biased(scale)
    b_kv = normal(BATCH, KV, R, D, seed=14)
    mass = ScaledMass(torch.full_like(log_n, 2.0), log_n - math.log(2.0))  # a part of it in the mass, the rest in the scale
    merged = join_bias(z, mass, phi, b_kv, torch.ones(BATCH, KV, R, dtype=torch.float64))
    all_keys = torch.cat([keys.transpose(1, 2), own], dim=1)
    whole, log_whole = context(q, all_keys, torch.cat([b_kv.transpose(1, 2), values], dim=1), math.sqrt(D))
    size = float(all_keys.abs().max() * q.abs().max())  # a score's rounding error is about eps * d * this, absolute
    bound = 4 * EPS * D * size + 50 * EPS
    torch.testing.assert_close(merged.z_context + merged.z_bias, whole, rtol=0, atol=bound * float(b_kv.abs().max()))
    torch.testing.assert_close(merged.log_normalizer, log_whole, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", ["none", "tiny", "huge", "negative", "only b_KV"])
def test_nothing_overflows_and_nothing_is_nan(dtype, weights):
    *_, phi, z, log_n, b_kv, b_d = biased(1e3, dtype)
    factor = {"none": 0.0, "tiny": 1e-30, "huge": 1e30, "negative": -1.0, "only b_KV": 1.0}[weights]
    b_kv = (b_kv * factor).requires_grad_()
    b_d = (b_d * (0.0 if weights == "only b_KV" else factor)).requires_grad_()
    for shift in (-1e3, 0.0, 1e3):
        merged = join_bias(z, ScaledMass.of_log(log_n), ScaledFeatures(phi.features, phi.log_scale + shift), b_kv, b_d)
        assert all(bool(part.isfinite().all()) for part in merged[:2])
        assert weights == "negative" or not bool(merged.log_normalizer.isnan().any())
        if weights in ("only b_KV", "negative"):  # no normalizer is left: finite, and that is all
            continue
        gradients = torch.autograd.grad(merged.z_bias.sum() + merged.z_context.sum(), (b_kv, b_d))
        assert not any(bool(g.isnan().any()) for g in gradients)
        if weights == "none":
            torch.testing.assert_close(merged.z_context, z, rtol=10 * torch.finfo(dtype).eps, atol=0)
            assert not merged.z_bias.any()


def test_gradients_of_merging():
    q, keys, _, _ = case()
    q, keys = q[:1, :2].clone().requires_grad_(), keys[:1].clone().requires_grad_()
    own, values = normal(1, 3, KV, D, seed=10), normal(1, 3, KV, D, seed=11)
    b_kv, b_d = normal(1, KV, R, D, seed=12).requires_grad_(), normal(1, KV, R, seed=13).abs().requires_grad_()

    def attend(q: Tensor, keys: Tensor, b_kv: Tensor, b_d: Tensor) -> tuple[Tensor, ...]:
        z, log_n = context(q, own, values, math.sqrt(D))
        return tuple(
            join_bias(z, ScaledMass.of_log(log_n), scaled_exp(virtual_key_scores(q, keys, RULES["capped"])), b_kv, b_d)
        )

    assert torch.autograd.gradcheck(attend, (q, keys, b_kv, b_d), fast_mode=True)
