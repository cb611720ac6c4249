"""Intervals of shares: Wilson's numbers for independent answers; answers that repeat within a group say nothing new."""

import pandas as pd
import pytest

from kvlens.papers.harness.significance import share_interval


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
