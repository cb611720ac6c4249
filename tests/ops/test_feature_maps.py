"""Feature maps: each against its formula number by number, and those that stand for an exponential against the exponential."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal

from kvlens.ops import feature_maps as maps

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
