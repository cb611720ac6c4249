"""The significance test: p-values counted by hand, false positives under many distributions of noise, and power."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.papers.harness.significance import (
    MOST_COUNTED,
    above,
    chance_of_signs,
    chance_of_student,
    detectable,
    interval_of_mean,
    share_above,
    share_interval,
    sides,
    student_tails,
)

N_DRAWS = 4000

NOISE = {
    "normal": lambda g, shape: g.normal(size=shape),
    "heavy tails": lambda g, shape: g.standard_cauchy(size=shape),
    "skewed": lambda g, shape: g.exponential(size=shape),
    "learned or not": lambda g, shape: np.where(g.random(shape) < 0.5, 0.98, 0.3) + 1e-3 * g.normal(size=shape),
    "seldom learned": lambda g, shape: np.where(g.random(shape) < 0.1, 0.98, 0.3) + 1e-3 * g.normal(size=shape),
    "few values": lambda g, shape: g.integers(3, size=shape).astype(float),
    "a coin": lambda g, shape: (g.random(shape) < 0.5).astype(float),
    "constant": lambda g, shape: np.ones(shape),
}


@pytest.mark.parametrize(
    ("values", "bound", "verdict"),
    [
        ([1, 2, 3, 4, 5, 6], 0.0, True),  # 2 of 64 patterns are as far: all plus, all minus; t = 4.6
        ([-1, -2, -3, -4, -5, -6], 0.0, False),
        ([1, 2, 3, 4, 5, 6], 7.0, False),
        ([1, 2, 3, 4, 5, 6], 0.9, True),
        ([1, 1, 1, 1, 1, 1], 0.0, True),  # no spread at all
        ([0, 0, 0, 0, 0, 0], 0.0, None),
        ([0.01, 0.01, 0.01, 0.01, 0.01, 6], 0.0, None),  # all plus, but one seed carries the mean: t = 1
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
    assert above(values, bound) is verdict


def test_the_chance_of_signs_is_the_counted_share():
    assert chance_of_signs(np.array([[1.0, 2.0, 3.0], [1.0, 2.0, -3.0]])).tolist() == [2 / 8, 1.0]
    assert chance_of_signs(np.array([[2.0, 2.0, -1.0]])).tolist() == [4 / 8]  # sums of 5 and 3, to both sides
    assert chance_of_signs(np.array([[0.1, 0.2, 0.3, -0.6]])).tolist() == [1.0]  # the sum is 0 but for rounding


@pytest.mark.parametrize(
    ("degrees", "t"),
    # the 2 % points of any table of Student's t distribution: P(|t| > value) = 0.02
    [(1, 31.821), (2, 6.965), (3, 4.541), (5, 3.365), (8, 2.896), (11, 2.718), (30, 2.457), (120, 2.358)],
)
def test_students_t_distribution_agrees_with_printed_tables(degrees, t):
    angle = math.atan(t / math.sqrt(degrees))
    assert student_tails(np.array([angle]), degrees)[0] == pytest.approx(0.02, rel=2e-3)  # the tables' last digit


def test_the_chance_of_student_by_a_pencil():
    """Values 1 and 3: mean 2, standard error 1, t = 2 with one degree of freedom: 1 - 2/pi atan(2). None for one value."""
    assert chance_of_student(np.array([[1.0, 3.0]]))[0] == pytest.approx(1 - 2 / math.pi * math.atan(2), abs=1e-14)
    assert chance_of_student(np.array([[2.0]]))[0] == 1.0
    assert chance_of_student(np.array([[2.0, 2.0], [0.0, 0.0]])).tolist() == [0.0, 1.0]


# Quarters of whole numbers: sums are exact in any order, so that the properties hold to the last bit.
values_of_seeds = st.lists(st.integers(-40, 40).map(lambda i: i / 4), min_size=6, max_size=18)


@settings(deadline=None)
@given(values_of_seeds, st.randoms(use_true_random=False), st.sampled_from([2.0**-300, 0.25, 2.0**500]))
def test_order_and_unit_make_no_difference_and_the_other_side_turns_the_verdict(values, random, unit):
    verdict = above(values)
    shuffled = random.sample(values, len(values))
    assert above(shuffled) is verdict
    assert above([unit * value for value in values]) is verdict
    assert above([-value for value in values]) is (None if verdict is None else not verdict)
    assert above([value + 8.0 for value in values], 8.0) is verdict


def test_many_cases_at_once_equal_those_cases_one_by_one():
    cases = np.random.default_rng(5).normal(0.6, 1, size=(60, 7))
    one_by_one = [{True: 1, False: -1, None: 0}[above(case)] for case in cases]
    assert sides(cases).tolist() == one_by_one
    assert set(one_by_one) == {0, 1}


def test_shares_by_the_binomial_distribution():
    assert share_above(7, 7) is True  # 1 of 128 in one direction
    assert share_above(0, 7) is False
    assert share_above(6, 6) is None  # 1 of 64 is more than one of a hundred
    assert share_above(102, 128) is True  # KVSA table 4: keys and values that prefer the same token
    assert share_above(0, 0) is None
    assert share_above(9_990, 10_000, 0.999) is None
    assert share_above(9_999, 10_000, 0.999) is True
    assert share_above(9_950, 10_000, 0.999) is False


@pytest.mark.parametrize("name", NOISE)
@pytest.mark.parametrize("n", [6, 7, 8, 12])
def test_sets_of_one_model_are_called_different_in_at_most_one_of_twenty_cases(name, n):
    """The t-test's level is 2 %; no distribution drawn here reaches 3 %, four standard errors away from one of twenty."""
    generator = np.random.default_rng([n, *name.encode()])
    first, second = NOISE[name](generator, (2, N_DRAWS, n))
    assert (sides(first - second) != 0).mean() <= 0.03 + 4 * math.sqrt(0.03 * 0.97 / N_DRAWS) < 0.05


def test_a_difference_of_3_spreads_is_significant_with_six_seeds_in_four_of_five_cases():
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, N_DRAWS, 6))
    assert (sides(first + 3 - second) == 1).mean() >= 0.85
    first, second = generator.normal(size=(2, N_DRAWS, 8))
    assert (sides(first + 2 - second) == 1).mean() >= 0.80


@pytest.mark.parametrize(("n", "at_1_5", "at_1"), [(6, 0.57, 0.26), (8, 0.85, 0.48), (12, 0.99, 0.74)])
def test_the_power_at_one_and_a_half_and_at_one_spread(n, at_1_5, at_1):
    """Shares of 4,000 samples; three standard errors are 0.024 at most."""
    noise = np.random.default_rng(n).normal(size=(N_DRAWS, n))
    assert (sides(noise + 1.5) == 1).mean() == pytest.approx(at_1_5, abs=0.03)
    assert (sides(noise + 1.0) == 1).mean() == pytest.approx(at_1, abs=0.03)


@pytest.mark.parametrize("n", [6, 8, 12, 40])
def test_the_detectable_difference_is_found_in_four_of_five_samples(n):
    """On other samples than those from which it is computed; the standard error of a share of 1,000 is 0.013."""
    spread_of_2 = detectable(np.where(np.arange(n) % 2, 1.0, -1.0) * 2 * math.sqrt((n - 1) / n))
    noise = 2 * np.random.default_rng([n, 1]).normal(size=(1000, n))
    assert (sides(noise + spread_of_2) == 1).mean() == pytest.approx(0.8, abs=0.05)


def test_nothing_is_detectable_with_too_few_values_or_infinite_ones():
    assert detectable([1, 2, 3, 4, 5]) is None
    assert detectable([1, 2, 3, 4, 5, math.inf]) is None
    assert detectable([1] * 6) == 0


def test_the_interval_of_a_mean_by_a_pencil():
    """1, 2, 3: mean 2, standard error 1 / sqrt(3); t with 2 degrees of freedom at 95 % is 4.302653, to six digits."""
    low, high = interval_of_mean([1, 2, 3])
    assert (low, high) == (pytest.approx(2 - 4.302653 / 3**0.5, abs=1e-6), pytest.approx(2 + 4.302653 / 3**0.5, abs=1e-6))
    assert interval_of_mean([1.0]) is None and interval_of_mean([1.0, math.nan]) is None


def test_many_values_are_tested_on_drawn_patterns_with_a_fixed_result():
    values = np.random.default_rng(1).normal(0.5, 1, size=(1, 40))
    assert MOST_COUNTED < 2**40
    assert above(values[0]) is True
    assert chance_of_signs(values)[0] == chance_of_signs(values)[0] >= 1 / (MOST_COUNTED + 1)


def interval(n_right: int, n_groups: int, repeats: int = 1) -> tuple[float, float]:
    """Of one answer in each group, repeated."""
    answers = [(i < n_right, i) for i in range(n_groups) for _ in range(repeats)]
    table = pd.DataFrame(answers, columns=["is_right", "group"])
    return share_interval(table["is_right"], table["group"])


@pytest.mark.parametrize("repeats", [1, 5])
@pytest.mark.parametrize(
    ("n_right", "low", "high"),
    [(8, 0.4902, 0.9433), (10, 0.7225, 1.0), (0, 0.0, 0.2775)],  # by hand; 8 of 10 as in Newcombe's tables
)
def test_repeated_answers_give_wilsons_interval_of_the_groups(n_right, low, high, repeats):
    assert interval(n_right, 10, repeats) == pytest.approx((low, high), abs=1e-4)  # four digits


def test_answers_that_do_not_cluster_all_count():
    """Each group has four right answers of five: the groups do not differ, so the 50 answers count as independent."""
    table = pd.DataFrame({"is_right": [True, True, False, True, True] * 10, "group": [i // 5 for i in range(50)]})
    assert share_interval(table["is_right"], table["group"]) == pytest.approx(interval(40, 50), abs=1e-12)


def test_answers_that_cluster_count_as_fewer():
    """By hand: 3, 3, 1, 1 right of 3: p = 2/3 and Var(p) = 4 (4/3) / 12^2 = 1/27: as 2/9 / (1/27) = 6 answers, 4 right."""
    is_right = [True] * 6 + [True, False, False] * 2
    table = pd.DataFrame({"is_right": is_right, "group": [i // 3 for i in range(12)]})
    assert share_interval(table["is_right"], table["group"]) == pytest.approx(interval(4, 6), abs=1e-12)


@pytest.mark.parametrize("n_groups", range(2, 60))
def test_nothing_and_everything_are_ends_of_their_own_intervals(n_groups):
    """Exactly: for a quarter of these numbers Wilson's end, rounded, is 1e-16 to the wrong side."""
    assert (interval(0, n_groups)[0], interval(n_groups, n_groups)[1]) == (0.0, 1.0)
