"""The induction head and its landscape: closed forms against loops and simulation, properties, hand-computed values."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ops_cases import laws, normal

from kvlens.ops.induction import induction_head, landscape_loss, naive_induction_head, naive_landscape_loss
from kvlens.ops.kv_shift import kv_shift

BATCH, POS, D = 2, 11, 5
EPS = torch.finfo(torch.float64).eps
seeds = st.integers(0, 10_000)
temperatures = st.floats(0.2, 5)
slopes = st.floats(0, 2)
coefficients = st.floats(-2, 2)


def rounding(x, sigma, slope, dtype=torch.float64):
    """How far two orders of summation may lie apart: an error of a score is a relative error of its weight, twice over."""
    norm2 = float(x.square().sum(-1).max())
    score = (x.shape[-1] + 2) * norm2 / sigma + 3 * slope * x.shape[1]
    return torch.finfo(dtype).eps * (2 * 2 * score + 4 * x.shape[1]) * float(x.abs().max())


def pair(first, second):
    return torch.tensor([first, second], dtype=torch.float64)


def orthonormal(n, seed):
    return torch.linalg.qr(normal(n, n, seed=seed)).Q


# --- IH ---


@laws
@given(seeds, temperatures, slopes)
def test_the_head_equals_the_loop(seed, sigma, slope):
    x = normal(BATCH, POS, D, seed=seed)
    difference = (induction_head(x, sigma, slope) - naive_induction_head(x, sigma, slope)).abs().max()
    assert difference <= rounding(x, sigma, slope)


def test_the_head_in_float32_is_the_head():
    x = normal(BATCH, POS, D, seed=3, dtype=torch.float32)
    difference = (induction_head(x, 0.7, 0.3) - naive_induction_head(x.double(), 0.7, 0.3)).abs().max()
    assert difference <= rounding(x, 0.7, 0.3, torch.float32)


@pytest.mark.parametrize("op", [induction_head, naive_induction_head])
def test_gradcheck(op):
    x = normal(BATCH, 4, 3, seed=5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: op(x, 0.8, 0.4), (x,))


@pytest.mark.parametrize("op", [induction_head, naive_induction_head])
def test_an_answer_from_a_pencil(op):
    # text a, b, a with a = (1, 0), b = (0, 1); sigma = 1/2, slope = log 3. At the second a (L = 2) the predecessors are
    # 0, a, b, so scores are (0, 2, 0) - log 3 * (2, 1, 0) and weights go as 1/9 : e^2/3 : 1
    x = torch.tensor([[[1.0, 0], [0, 1], [1, 0]]], dtype=torch.float64)
    out = op(x, 0.5, math.log(3))[0]
    total = 1 / 9 + math.exp(2) / 3 + 1
    assert out[0].tolist() == [1, 0]
    assert out[1].tolist() == pytest.approx([1 / 4, 3 / 4], abs=4 * EPS)  # b follows nothing like b: 1/3 : 1
    assert out[2].tolist() == pytest.approx([(1 / 9 + 1) / total, math.exp(2) / 3 / total], abs=8 * EPS)


@laws
@given(seeds, st.integers(2, POS))
def test_a_cold_head_copies_what_followed(seed, period):
    # one period of different tokens, then again: from the second token of the repeat on, every query has one match
    tokens = torch.randperm(period, generator=torch.Generator().manual_seed(seed)).repeat(2)
    x = torch.eye(period, dtype=torch.float64)[tokens][None]
    sigma = 1 / 40
    out = induction_head(x, sigma, 0.0)
    wanted = x[:, 1 : period + 1]
    leak = 2 * period * math.exp(-1 / sigma)  # other rows score 0 where the match scores 1 / sigma
    assert (out[:, period:] - wanted).abs().max() <= leak + rounding(x, sigma, 0.0)


@laws
@given(seeds, temperatures, slopes)
def test_it_is_attention_with_shifted_keys_and_unshifted_values(seed, sigma, slope):
    x = normal(BATCH, POS, D, seed=seed)
    keys = kv_shift(x[:, :, None], torch.tensor([[0.0, 1]], dtype=x.dtype))[0][:, :, 0]
    values = kv_shift(x[:, :, None], torch.tensor([[1.0, 0]], dtype=x.dtype))[0][:, :, 0]
    places = torch.arange(POS, dtype=x.dtype)
    scores = x @ keys.mT / sigma - slope * (places[:, None] - places)
    pattern = scores.masked_fill(places > places[:, None], -torch.inf).softmax(-1)
    assert (pattern @ values - induction_head(x, sigma, slope)).abs().max() <= rounding(x, sigma, slope)


@laws
@given(seeds, st.integers(0, POS - 1))
def test_nothing_looks_ahead(seed, L):
    x = normal(BATCH, POS, D, seed=seed).requires_grad_()
    (gradient,) = torch.autograd.grad(induction_head(x, 0.7, 0.2)[:, : L + 1].sum(), x)
    assert not gradient[:, L + 1 :].any()


# --- landscape ---


def simulation_rounding(T, alpha, beta):
    """Sums of T + 1 products for scores, outputs and logits, each of size at most |a| + |b|; then a log of a sum of T."""
    size = 1 + float(alpha.abs().sum() + beta.abs().sum())
    return 8 * (T + 1) * EPS * size**2


@laws
@given(seeds, st.integers(4, 13), st.data(), *[coefficients] * 4)
def test_the_closed_form_is_the_simulation(seed, T, data, a1, a2, b1, b2):
    i = data.draw(st.integers(2, T - 2))
    alpha, beta = pair(a1, a2), pair(b1, b2)
    simulated = naive_landscape_loss(alpha, beta, T, i, orthonormal(T, seed))
    assert abs(landscape_loss(alpha, beta, T) - simulated) <= simulation_rounding(T, alpha, beta)


@laws
@given(st.integers(4, 13), *[coefficients] * 4)
def test_so_are_its_gradients(T, a1, a2, b1, b2):
    alpha, beta = pair(a1, a2).requires_grad_(), pair(b1, b2).requires_grad_()
    closed = torch.autograd.grad(landscape_loss(alpha, beta, T), (alpha, beta))
    simulated = torch.autograd.grad(naive_landscape_loss(alpha, beta, T), (alpha, beta))
    for got, expected in zip(closed, simulated, strict=True):
        assert (got - expected).abs().max() <= simulation_rounding(T, alpha.detach(), beta.detach())


@pytest.mark.parametrize("T", [4, 7])
def test_landscape_gradcheck(T):
    alpha, beta = normal(3, 5, 2, seed=1).requires_grad_(), normal(3, 5, 2, seed=2).requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: landscape_loss(a, b, T), (alpha, beta))


def test_the_landscape_of_a_pencil():
    # T = 4, the induction head alpha = (0, 1), beta = (1, 0): S = 4 + e; logits e/S for the answer, 2/S for x_i, 1/S twice
    S = 4 + math.e
    expected = -math.log(math.exp(math.e / S) / (math.exp(math.e / S) + math.exp(2 / S) + 2 * math.exp(1 / S)))
    assert float(landscape_loss(pair(0.0, 1.0), pair(1.0, 0.0), 4)) == pytest.approx(expected, abs=8 * EPS)
    # nothing in the values: all T tokens alike
    for T in (4, 14, 104):
        assert float(landscape_loss(pair(0.3, 0.7), pair(0.0, 0.0), T)) == pytest.approx(math.log(T), abs=8 * EPS)


def test_a_grid_is_its_points():
    alpha, beta = normal(3, 5, 2, seed=1), normal(3, 5, 2, seed=2)
    points = [[landscape_loss(alpha[r, c], beta[r, c], 9) for c in range(5)] for r in range(3)]
    grid = landscape_loss(alpha, beta, 9)
    assert grid.shape == (3, 5)
    assert (grid - torch.tensor(points, dtype=torch.float64)).abs().max() <= 4 * EPS * grid.max()


def test_the_printed_exponent_would_be_noticed():
    """With e^{alpha_2} in rows i - 1 and T, as printed in the paper, the loss is another one."""
    alpha, beta, T = pair(0.2, 0.8), pair(0.6, 0.4), 4
    e1, e2 = alpha.exp()
    S = 2 * e1 + e2 + T - 2
    logits = torch.stack(
        [
            e2 / S * beta[0] + beta[1] / S,
            *[beta[0] / S + e2 / S * beta[1]] * 2,  # printed; e1 is right
            2 * e1 / S * beta[0] + e2 / S * beta[1],
        ]
    )
    printed = -logits.log_softmax(0)[0]
    assert abs(printed - naive_landscape_loss(alpha, beta, T)) > 0.01
