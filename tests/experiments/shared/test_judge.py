"""The judge: answers counted by hand, at most one of twenty null cases told apart under any law of noise, and its power."""

import math

import numpy as np
import pytest

from kvlens.experiments.shared.judge import JUDGE, MOST_COUNTED

N_DRAWS = 2000
BOUND = 0.05 + 4 * math.sqrt(0.05 * 0.95 / N_DRAWS)  # four standard errors of a share of 0.05

LAWS = {
    "normal": lambda g, shape: g.normal(size=shape),
    "heavy tails": lambda g, shape: g.standard_cauchy(size=shape),
    "skewed": lambda g, shape: g.exponential(size=shape),
    "learned or not": lambda g, shape: np.where(g.random(shape) < 0.4, 0.99, 0.3) + 1e-3 * g.normal(size=shape),
    "few values": lambda g, shape: g.integers(3, size=shape).astype(float),
    "constant": lambda g, shape: np.ones(shape),
}


@pytest.mark.parametrize(
    ("values", "bound", "verdict"),
    [
        ([1, 2, 3, 4, 5, 6], 0.0, True),  # 2 of 64 patterns are as far: all plus, all minus
        ([-1, -2, -3, -4, -5, -6], 0.0, False),
        ([1, 2, 3, 4, 5, 6], 7.0, False),
        ([1, 2, 3, 4, 5, 6], 0.9, True),
        ([1, 2, 3, 4, 5, -0.1], 0.0, None),  # 4 of 64
        ([1, 2, 3, 4, 5, 0], 0.0, None),  # a tie counts for either side: 4 of 64
        ([1, 2, 3, 4, 5], 0.0, None),  # 2 of 32 is more than one of twenty
        ([5, 6, 7, 8, 9, 10, 11, -1], 0.0, True),  # of 256: all plus, and the smallest turned; twice for both sides
        ([1.0], 0.0, None),
        ([], 0.0, None),
        ([1, 2, 3, 4, 5, math.inf], 0.0, None),
        ([1, 2, 3, 4, 5, math.nan], 0.0, None),
    ],
)
def test_values_against_a_bound(values, bound, verdict):
    assert JUDGE.above(values, bound) is verdict


def test_the_chance_of_signs_is_the_counted_share():
    assert JUDGE.chance_of_signs(np.array([1.0, 2.0, 3.0])) == 2 / 8
    assert JUDGE.chance_of_signs(np.array([1.0, 2.0, -3.0])) == 1.0
    assert JUDGE.chance_of_signs(np.array([2.0, 2.0, -1.0])) == 4 / 8  # sums of 5 and 3, to both sides
    assert JUDGE.chance_of_signs(np.array([0.1, 0.2, 0.3, -0.6])) == 1.0  # the sum is 0 but for rounding


def test_two_sets_that_do_not_pair():
    assert JUDGE.larger([5, 6, 7, 8], [1, 2, 3, 4]) is True  # 2 of 70
    assert JUDGE.larger([1, 2, 3, 4], [5, 6, 7, 8]) is False
    assert JUDGE.larger([5, 6, 7], [1, 2, 3]) is None  # 2 of 20
    assert JUDGE.larger([4, 6, 7, 8], [1, 2, 3, 5]) is None  # 4 of 70 lie as far
    assert JUDGE.larger([], [1.0]) is None
    assert JUDGE.chance_of_shares(np.array([5.0, 6.0, 1.0, 2.0]), 2) == 2 / 6


def test_shares_by_the_binomial_law():
    assert JUDGE.share_above(6, 6) is True  # 1 of 64 in one direction
    assert JUDGE.share_above(0, 6) is False
    assert JUDGE.share_above(5, 5) is None  # 1 of 32 is more than one of forty
    assert JUDGE.share_above(102, 128) is True  # KVSA table 4: keys and values that lean the same way
    assert JUDGE.share_above(0, 0) is None
    assert JUDGE.share_above(9_990, 10_000, 0.999) is None
    assert JUDGE.share_above(9_999, 10_000, 0.999) is True
    assert JUDGE.share_above(9_950, 10_000, 0.999) is False


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("n", [4, 6, 8, 16])
def test_sets_of_one_model_are_told_apart_in_at_most_one_of_twenty_cases(law, n):
    generator = np.random.default_rng([n, len(law)])
    draws = LAWS[law](generator, (N_DRAWS if n < 16 else 100, 2, n))
    bound = BOUND if n < 16 else 0.05 + 4 * math.sqrt(0.05 * 0.95 / 100)
    assert np.mean([JUDGE.above(a - b) is not None for a, b in draws]) <= bound
    if n <= 6:
        assert np.mean([JUDGE.larger(a, b) is not None for a, b in draws]) <= bound


def test_a_difference_of_2_6_spreads_is_told_by_six_seeds_in_four_of_five_cases():
    generator = np.random.default_rng(0)
    draws = generator.normal(size=(N_DRAWS, 2, 6))
    verdicts = [JUDGE.above(a + 2.6 - b) for a, b in draws]
    assert np.mean([verdict is True for verdict in verdicts]) >= 0.8
    assert np.mean([JUDGE.above(a + 1.9 - b) is True for a, b in generator.normal(size=(N_DRAWS, 2, 8))]) >= 0.8
    assert np.mean([JUDGE.larger(a + 2.2, b) is True for a, b in generator.normal(size=(500, 2, 6))]) >= 0.8


def test_many_values_are_judged_by_drawn_patterns_and_always_alike():
    values = np.random.default_rng(1).normal(0.5, 1, size=40)
    assert MOST_COUNTED < 2**40
    assert JUDGE.above(values) is True
    assert JUDGE.chance_of_signs(values) == JUDGE.chance_of_signs(values) >= 1 / MOST_COUNTED
