"""``direct-conversion``: errors and floors again, by drawn texts and by hand."""

import math

import pandas as pd
import pytest
import torch
from precision import LAW, relative_error

from kvlens.papers.iclca import direct_conversion
from kvlens.papers.iclca.direct_conversion import Moments, best_pair, left_over

TINY = dict(direct_conversion.direct_conversion.scales["tiny"])
(W_K, W_V), TERM, STARTS = direct_conversion._draw(TINY, seed=3)
D = TINY["d_model"]


def products(least, most, n=10_000):
    """S = X^T X of drawn texts, whose numbers of tokens are uniform."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, most + 1, (n, 1), generator=generator)
    x = torch.randn(n, most, D, generator=generator, dtype=torch.float64) * (torch.arange(most) < lengths)[..., None]
    return x.mT @ x


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5)])
def test_errors_are_those_of_drawn_texts(lengths):
    s, moments = products(*lengths), Moments.of(*lengths)
    w_1, w_2 = STARTS[1]
    error = (w_1.T @ s @ w_2 - W_K.T @ s @ W_V - TERM).square().sum((1, 2)) / TERM.square().sum()
    margin = 5 * float(error.std()) / math.sqrt(len(error))
    assert left_over(moments, (W_K, W_V), TERM, (w_1, w_2)) ** 2 == pytest.approx(float(error.mean()), abs=margin)


@pytest.mark.parametrize("lengths", [(3, 3), (1, 5)])
def test_the_floor_is_that_of_least_squares_on_all_entries(lengths):
    """By the moments of S: of all linear maps of its entries, the one nearest to 1."""
    moments = Moments.of(*lengths)
    units = torch.eye(D * D, dtype=torch.float64).unflatten(1, (D, D))
    gram = torch.stack([  # E S_ij S_kl, by E S G S with G = e_j e_k^T
        torch.stack([moments.around(torch.outer(j.sum(0), k.sum(1)))[j.sum(1).argmax(), k.sum(0).argmax()] for k in units])
        for j in units
    ])  # fmt: skip
    mean = moments.mean * torch.eye(D, dtype=torch.float64).flatten()
    left = 1 - mean @ torch.linalg.pinv(gram, hermitian=True) @ mean
    assert float(left) == pytest.approx(moments.floor(D) ** 2, rel=LAW)


def test_each_step_comes_nearer_and_none_below_the_floor():
    moments, errors = Moments.of(1, 5), []
    for n_steps in range(5):
        pair = best_pair(moments, (W_K, W_V), TERM, STARTS[1], {"n_steps": n_steps})
        errors.append(left_over(moments, (W_K, W_V), TERM, pair))
    assert errors == sorted(errors, reverse=True) and errors[-1] > moments.floor(D)


def test_what_needs_no_change_or_allows_none():
    """Without a prompt the weights themselves are right; on empty texts every pair leaves everything."""
    same = best_pair(Moments.of(1, 5), (W_K, W_V), torch.zeros_like(TERM), (W_K, W_V), TINY)
    assert max(relative_error(found, own) for found, own in zip(same, (W_K, W_V), strict=True)) < LAW
    empty = Moments.of(0, 0)
    assert [left_over(empty, (W_K, W_V), TERM, best_pair(empty, (W_K, W_V), TERM, pair, TINY)) for pair in STARTS] == [1.0, 1.0]
    assert empty.floor(D) == 1.0


def test_claims_can_hold_and_fail():
    table = pd.DataFrame(dict(tokens=["1", "9"], left=[0.8, 0.02], floor=[0.3, 0.009]))
    assert [c.holds for c in direct_conversion.compare(table)] == [True, False]
