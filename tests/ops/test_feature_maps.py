"""Feature maps: each against its formula number by number, and those that stand for an exponential against the exponential.

Features for softmax attention against plain exponentials in float64, and at scores where those overflow.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal
from torch import Tensor

from kvlens.ops import feature_maps as maps
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

POS, HEAD, D, M = 5, 3, 7, 11
SCALE = 2.5
EPS = torch.finfo(torch.float64).eps
PROJECTION = normal(HEAD, M, D, seed=8)
WEIGHT = normal(HEAD, D, D, seed=9) / math.sqrt(D)

FAST = {
    "elu_plus_one": maps.elu_plus_one,
    "relu": maps.relu,
    "random": lambda x: maps.random_features(x, PROJECTION, SCALE),
    "taylor": lambda x: maps.taylor(x, SCALE),
    "hedgehog": lambda x: maps.hedgehog(x, WEIGHT),
}


def by_the_formula(name, x, head):
    """phi of one vector (a list of numbers), in Python's own arithmetic."""
    scaled = [c / math.sqrt(SCALE) for c in x]
    if name == "elu_plus_one":
        return [c + 1 if c > 0 else math.exp(c) for c in x]
    if name == "relu":
        return [max(c, 0) + 1e-3 for c in x]
    if name == "random":
        half = sum(c * c for c in scaled) / 2
        rows = PROJECTION[head].tolist()
        return [math.exp(sum(a * b for a, b in zip(w, scaled, strict=True)) - half) / math.sqrt(M) for w in rows]
    if name == "taylor":
        return [1.0, *scaled, *(a * b / math.sqrt(2) for a in scaled for b in scaled)]
    wx = [sum(a * b for a, b in zip(row, x, strict=True)) for row in WEIGHT[head].tolist()]
    exponentials = [math.exp(2 * c) for c in wx] + [math.exp(-2 * c) for c in wx]
    return [e / sum(exponentials) for e in exponentials]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_the_formula(name, dtype):
    x = normal(2, POS, HEAD, D, seed=1, dtype=dtype)
    got = FAST[name](x)
    assert got.dtype == dtype
    assert got.shape[:-1] == (2, POS, HEAD)
    expected = torch.tensor(
        [[[by_the_formula(name, x[b, i, h].tolist(), h) for h in range(HEAD)] for i in range(POS)] for b in range(2)],
        dtype=torch.float64,
    )
    # an exponent of size s is off by s * D * eps, which is the relative error of its exponential; sizes stay below 20 here
    assert ((got - expected).abs() <= 20 * D * torch.finfo(dtype).eps * expected.abs().clamp(min=1e-3)).all()


@pytest.mark.parametrize("name", FAST)
def test_gradcheck(name):
    x = normal(2, HEAD, D, seed=2)
    x = torch.where(x.abs() < 1e-3, 0.1, x).requires_grad_()  # away from relu's corner
    assert torch.autograd.gradcheck(FAST[name], (x,))


def test_gradcheck_of_learned_and_fixed_projections():
    x = normal(2, HEAD, D, seed=2).requires_grad_()
    weight = WEIGHT.clone().requires_grad_()
    assert torch.autograd.gradcheck(maps.hedgehog, (x, weight), fast_mode=True)


def test_elu_plus_one_has_every_kind_of_derivative():
    x = torch.tensor([-30.0, -1, -0.1, 0.2, 5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(maps.elu_plus_one, x, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(maps.elu_plus_one, x)
    jacobian = torch.func.jacrev(maps.elu_plus_one)(x.detach())
    assert torch.equal(jacobian.diag(), x.detach().clamp(max=0).exp())


def test_answers_by_hand():
    x = torch.tensor([[-1.0, 0, 2]], dtype=torch.float64)
    assert maps.elu_plus_one(x)[0].tolist() == pytest.approx([math.exp(-1), 1, 3], rel=EPS)
    assert maps.relu(x)[0].tolist() == pytest.approx([0.001, 0.001, 2.001], rel=EPS)
    # x' = x / 2: [1, -1/2, 0, 1, and the nine products over sqrt 2]
    r = math.sqrt(2)
    expected = [1, -0.5, 0, 1, 0.25 / r, 0, -0.5 / r, 0, 0, 0, -0.5 / r, 0, 1 / r]
    assert maps.taylor(x, 4.0)[0].tolist() == pytest.approx(expected, rel=2 * EPS)
    # w = (1, 0, 0) and (0, 0, 1): exponents -1/2 - 5/8 and 1 - 5/8
    w = torch.tensor([[[1.0, 0, 0], [0, 0, 1]]], dtype=torch.float64)
    expected = [math.exp(-1.125) / r, math.exp(0.375) / r]
    assert maps.random_features(x, w, 4.0)[0].tolist() == pytest.approx(expected, rel=4 * EPS)
    # W = identity, x = (log 2) / 2: softmax of (log 2, -log 2) is (2, 1/2) over 5/2
    x = torch.full((1, 1), math.log(2) / 2, dtype=torch.float64)
    assert maps.hedgehog(x, torch.ones(1, 1, 1, dtype=torch.float64))[0].tolist() == pytest.approx([0.8, 0.2], rel=4 * EPS)


@laws
@given(st.integers(0, 10_000), st.floats(0.1, 10), st.floats(0.1, 3))
def test_taylor_is_the_exponential_to_second_order(seed, scale, size):
    q, k = size * normal(1, D, seed=seed), size * normal(1, D, seed=seed + 1)
    s = float((q * k).sum() / scale)
    got = float((maps.taylor(q, scale) * maps.taylor(k, scale)).sum())
    magnitude = float((1 + (q * k).abs().sum() / scale) ** 2)
    assert abs(got - (1 + s + s * s / 2)) <= (D * D + 10) * EPS * magnitude
    assert got > 0


@laws
@given(st.integers(0, 10_000), st.floats(0.1, 20))
def test_positive_maps_are_never_negative_and_stay_finite(seed, size):
    x = size * normal(4, HEAD, D, seed=seed)
    for name in ("elu_plus_one", "relu", "random", "hedgehog"):
        phi = FAST[name](x)
        assert phi.isfinite().all()
        assert (phi >= 0).all()  # 0 by underflow only
    assert ((FAST["hedgehog"](x).sum(-1) - 1).abs() <= 2 * D * EPS).all()


@pytest.mark.parametrize("kind", ["iid", "orthogonal"])
def test_random_features_are_unbiased(kind):
    m = 20_000
    projection = maps.draw_projections(HEAD, m, D, kind, torch.Generator().manual_seed(0)).double()
    q, k = 0.4 * normal(POS, HEAD, D, seed=3), 0.4 * normal(POS, HEAD, D, seed=4)
    got = (maps.random_features(q, projection, SCALE) * maps.random_features(k, projection, SCALE)).sum(-1)
    expected = ((q * k).sum(-1) / SCALE).exp()
    # for independent rows a feature's product has mean e^s and second moment exp(2 |q' + k'|^2 - |q'|^2 - |k'|^2); orthogonal
    # rows have no larger variance (Choromanski et al. 2021, th. 2). 15 estimates, five standard errors each
    q, k = q / math.sqrt(SCALE), k / math.sqrt(SCALE)
    second = (2 * (q + k).square().sum(-1) - q.square().sum(-1) - k.square().sum(-1)).exp()
    standard_error = ((second - expected.square()) / m).sqrt()
    assert ((got - expected).abs() < 5 * standard_error).all()
    assert (standard_error < 0.1 * expected).all()  # otherwise the line above would prove nothing


def test_a_prompt_and_its_continuation_share_one_scale():
    x = normal(6, HEAD, D, seed=5) * torch.linspace(0.1, 4, 6, dtype=torch.float64)[:, None, None]
    for name in FAST:
        together = FAST[name](x)
        apart = torch.cat([FAST[name](x[:2]), FAST[name](x[2:])])
        # the same numbers, if the sums over D come in another order for another batch
        assert ((together - apart).abs() <= 20 * D * EPS * together.abs().clamp(min=1e-300)).all(), name


@pytest.mark.parametrize("m", [14, 11, 3])
def test_orthogonal_blocks_are_orthogonal(m):
    projection = maps.draw_projections(HEAD, m, D, "orthogonal", torch.Generator().manual_seed(1))
    assert (projection.shape, projection.dtype) == ((HEAD, m, D), torch.float32)
    rows = projection.double()
    unit = rows / rows.norm(dim=-1, keepdim=True)
    for first in range(0, m, D):
        block = unit[:, first : first + D]
        gram = block @ block.transpose(1, 2) - torch.eye(block.shape[1], dtype=torch.float64)
        # entries were rounded to float32 once: a product of two unit rows moves by no more than 2 * eps / 2
        assert gram.abs().max() <= 2 * torch.finfo(torch.float32).eps
    if m == 14:  # and blocks are drawn apart
        assert (unit[:, :D] @ unit[:, D:].transpose(1, 2)).abs().max() > 0.1


@pytest.mark.parametrize("kind", ["iid", "orthogonal"])
def test_each_row_is_normal(kind):
    n = 30_000
    rows = maps.draw_projections(1, n, D, kind, torch.Generator().manual_seed(2))[0].double()
    # five standard errors for independent rows: mean 0 +- 1, second moment 1 +- sqrt 2, fourth 3 +- sqrt 96, and |row|^2 is
    # chi^2 with D degrees of freedom
    assert (rows.mean(0).abs() < 5 / math.sqrt(n)).all()
    assert ((rows.square().mean(0) - 1).abs() < 5 * math.sqrt(2 / n)).all()
    assert ((rows.pow(4).mean(0) - 3).abs() < 5 * math.sqrt(96 / n)).all()
    lengths = rows.square().sum(1)
    assert abs(lengths.mean() - D) < 5 * math.sqrt(2 * D / n)
    assert abs(lengths.var() - 2 * D) < 5 * math.sqrt((12 * D * (D + 4) - 4 * D * D) / n)  # fourth central moment of chi^2


def test_draws_repeat_with_their_seed_and_leave_the_global_generator():
    state = torch.random.get_rng_state()
    draws = [maps.draw_projections(2, 5, 3, "orthogonal", torch.Generator().manual_seed(s)) for s in (6, 6, 7)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(torch.random.get_rng_state(), state)


BATCH, N_POS, N_HEADS, KV, R, WIDTH = 2, 5, 6, 3, 7, 11
ROUNDED = torch.finfo(torch.float64).eps
RULES = {
    "plain": ScoreRule(math.sqrt(WIDTH)),
    "capped": ScoreRule(math.sqrt(WIDTH), soft_cap=1.5),
    "alibi": ScoreRule(2.0, slopes=torch.tensor([0.5, 0.25, 0.4, 0.1, 0.3, 0.2], dtype=torch.float64)),
    "local": ScoreRule(math.sqrt(WIDTH), window=6),
}


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, distances from 1 (all different), positions that differ between rows."""
    distance = torch.stack([torch.randperm(R, generator=torch.Generator().manual_seed(g)) + 1 for g in range(KV)])
    positions = torch.stack([torch.arange(N_POS), torch.arange(N_POS) + 3])
    return (
        normal(BATCH, N_POS, N_HEADS, WIDTH, seed=1),
        normal(BATCH, KV, R, WIDTH, seed=2),
        distance.expand(BATCH, KV, R),
        positions,
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_virtual_keys_score_as_the_model_does(rule):
    q, keys, distance, positions = case()
    expected = naive_virtual_key_features(q, keys, rule, distance, positions)
    phi = scaled_exp(virtual_key_scores(q, keys, rule, distance, positions))
    torch.testing.assert_close(phi.features * phi.log_scale.exp()[..., None], expected, rtol=50 * ROUNDED, atol=0)
    if rule.window is not None:
        assert bool((expected == 0).any())
        assert bool((expected > 0).any())


def test_unused_keys_set_no_scale():
    q, keys, _, _ = case()
    keys = keys.clone()
    keys[:, :, 0] *= 1e4  # scores of thousands, in a key that has no weight
    used = torch.ones(1, N_HEADS, R, dtype=torch.bool)
    used[:, :, 0] = False
    scores = virtual_key_scores(q, keys, RULES["plain"])
    phi, alone = scaled_exp(scores, used), scaled_exp(scores[..., 1:])
    assert torch.equal(phi.log_scale, alone.log_scale)
    assert torch.equal(phi.features[..., 1:], alone.features)
    nothing = scaled_exp(virtual_key_scores(q, keys, RULES["plain"]), torch.zeros(1, N_HEADS, R, dtype=torch.bool))
    assert not nothing.features.any()
    assert bool((nothing.log_scale == -torch.inf).all())


def test_random_features_are_those_of_one_vector_and_unbiased():
    x, w = normal(1, 1, 2, WIDTH, seed=3), normal(2, 13, WIDTH, seed=4)
    for head in range(2):
        expected = naive_random_features(x[0, 0, head], w[head], 3.0)
        torch.testing.assert_close(random_log_features(x, w, 3.0).exp()[0, 0, head], expected, rtol=50 * ROUNDED, atol=0)
    q, k = 0.5 * normal(1, 1, 1, WIDTH, seed=5), 0.5 * normal(1, 1, 1, WIDTH, seed=6)
    many = normal(1, 400_000, WIDTH, seed=7)
    terms = (random_log_features(q, many, 3.0) + random_log_features(k, many, 3.0)).exp().flatten() * many.shape[1]
    error = terms.std() / math.sqrt(len(terms))
    assert abs(float(terms.mean() - torch.exp((q * k).sum() / 3.0))) < 4 * float(error)


def test_learned_features_are_exponentials_of_lines():
    x = torch.tensor([[[[2.0, 3.0]]]], dtype=torch.float64)
    weight, offset = torch.tensor([[[1.0, 0.5], [-1.0, 0.0]]], dtype=x.dtype), torch.tensor([[0.25, 1.0]], dtype=x.dtype)
    assert learned_log_features(x, weight, offset).flatten().tolist() == [3.75, -1.0]


def test_taylor_features_multiply_to_the_polynomial():
    q, k = normal(1, 1, 1, WIDTH, seed=8), normal(1, 1, 1, WIDTH, seed=9)
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
    own, values = normal(BATCH, 4, KV, WIDTH, seed=10, dtype=dtype), normal(BATCH, 4, KV, WIDTH, seed=11, dtype=dtype)
    b_kv, b_d = normal(1, KV, R, WIDTH, seed=12, dtype=dtype), normal(1, KV, R, seed=13, dtype=dtype).abs()
    phi = scaled_exp(virtual_key_scores(q, keys.to(dtype), rule))
    z, log_n = context(q, own, values, rule.scale)
    return q, keys.to(dtype), own, values, phi, z, log_n, b_kv, b_d


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
def test_keys_that_are_the_context_split_in_two_give_the_whole_at_any_score(scale):
    q, keys, own, values, phi, z, log_n, _, _ = biased(scale)
    b_kv = normal(BATCH, KV, R, WIDTH, seed=14)
    mass = ScaledMass(torch.full_like(log_n, 2.0), log_n - math.log(2.0))  # a part of it in the mass, the rest in the scale
    merged = join_bias(z, mass, phi, b_kv, torch.ones(BATCH, KV, R, dtype=torch.float64))
    all_keys = torch.cat([keys.transpose(1, 2), own], dim=1)
    whole, log_whole = context(q, all_keys, torch.cat([b_kv.transpose(1, 2), values], dim=1), math.sqrt(WIDTH))
    size = float(all_keys.abs().max() * q.abs().max())  # a score's rounding error is about eps * d * this, absolute
    bound = 4 * ROUNDED * WIDTH * size + 50 * ROUNDED
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
    own, values = normal(1, 3, KV, WIDTH, seed=10), normal(1, 3, KV, WIDTH, seed=11)
    b_kv, b_d = normal(1, KV, R, WIDTH, seed=12).requires_grad_(), normal(1, KV, R, seed=13).abs().requires_grad_()

    def attend(q: Tensor, keys: Tensor, b_kv: Tensor, b_d: Tensor) -> tuple[Tensor, ...]:
        z, log_n = context(q, own, values, math.sqrt(WIDTH))
        return tuple(
            join_bias(z, ScaledMass.of_log(log_n), scaled_exp(virtual_key_scores(q, keys, RULES["capped"])), b_kv, b_d)
        )

    assert torch.autograd.gradcheck(attend, (q, keys, b_kv, b_d), fast_mode=True)
