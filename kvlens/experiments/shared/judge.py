"""When is a difference more than the noise of seeds? One judge for every claim of every experiment.

What it is given are single values that chance alone would scatter evenly to both sides of a bound: mostly differences, one for
each seed, of two models that share their batches; the bound is 0. A verdict is given, True above the bound or False below it,
where both of two tests find chance unlikely; None ("cannot tell") stands for everything else.

*Counting.* Under "the two models are the same" every sign pattern of the differences is equally likely, whatever the law of the
noise, so the answer is counted, not looked up (the sign-flip test):

    p = share of the 2^n sign patterns whose |mean| is at least the one that was seen        told at p <= 0.05

*Student's law.* t = mean / (standard deviation / sqrt(n)), with n - 1 degrees of freedom; told at p <= 0.02. Here the sizes
count: six differences of which one carries the mean do not speak for six seeds.

With 6 values, the fewest that can tell anything (2 / 2^6 = 0.031), all six must lie on the same side, and near enough to each
other. Counting alone would part identical models in 3.1 % of cases and with more values in nearly 5 %; together they do so in
1.5 to 2 % (normal noise) and in at most 5 % under any law. Six normal differences are told in 87 % of cases when their mean
is 2.1 times their standard deviation, that is 3 times the spread of seeds of one model.

The verdict knows neither the order of the values nor their unit. Shares (`Judge.share_above`) are judged by the exact binomial
law.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Int, Real

MOST_COUNTED = 20_000
"""Beyond so many patterns, as many are drawn instead of counted; with the one that was seen among them p stays a true bound."""

Values = Sequence[float | int] | Real[np.ndarray, " value"]
"""One for each seed, prompt or sequence."""


@dataclass(frozen=True)
class Judge:
    """Two-sided verdicts that chance alone gives in at most a share ``level`` of cases, and ``most`` whatever its law.

    Attributes:
        level: 0.02, one of fifty: of Student's law, and of the binomial one.
        most: 0.05, one of twenty: of counting.
    """

    level: float = 0.02
    most: float = 0.05

    def above(self, values: Values, bound: float | int = 0.0) -> bool | None:
        """Whether ``values`` lie above ``bound`` (True), below it (False), or cannot be told from it (None).

        Args:
            values: one for each seed (or prompt, or sequence); for two models their differences, pair by pair.
            bound: what they are held against. 0 asks for a difference, another number for one of that size.
        """
        (side,) = self.sides(np.asarray(values, dtype=float)[None] - bound)
        return None if side == 0 else bool(side > 0)

    def sides(self, distances: Float[np.ndarray, "case value"]) -> Int[np.ndarray, " case"]:
        """Of many cases at once, on which side of 0 the values of each are told to lie: 1, -1, or 0 for neither."""
        finite = np.isfinite(distances).all(axis=1)
        # the larger sum to the right, values in order, the largest 1: then order, side and unit make no difference
        distances = np.where(finite[:, None], distances, 0.0)
        largest = np.abs(distances).max(axis=1, keepdims=True, initial=0.0)
        distances = distances / np.where(largest > 0, largest, 1.0)
        side = np.sign(distances.sum(axis=1)).astype(int)
        distances = np.sort(distances * side[:, None], axis=1)
        candidates = np.flatnonzero(chance_of_student(distances) <= self.level)
        told = np.zeros(len(distances), dtype=bool)
        told[candidates] = chance_of_signs(distances[candidates]) <= self.most
        return side * told

    def share_above(self, count: int, of: int, bound: float = 0.5) -> bool | None:
        """Whether ``count`` hits in ``of`` independent trials speak for a chance above ``bound`` (True), below it, or neither.

        Each direction has half of the level, by the exact binomial law.
        """
        if _binomial_tail(count, of, bound) <= self.level / 2:
            return True
        return False if _binomial_tail(of - count, of, 1 - bound) <= self.level / 2 else None


JUDGE = Judge()
"""The one that all experiments ask."""


def chance_of_signs(distances: Float[np.ndarray, "case value"]) -> Float[np.ndarray, " case"]:
    """The share of sign patterns of each case's values that lie at least as far to one side as they do; 1 for no values."""
    n = distances.shape[1]
    sizes = np.sort(np.abs(distances), axis=1)
    seen = np.abs(distances.sum(axis=1)) - 1e-12 * sizes.sum(axis=1)  # equal sums in another order may differ by rounding
    signs = _all_signs(n) if 2**n <= MOST_COUNTED else _drawn_signs(n)
    n_as_far = np.array([(np.abs(signs @ row) >= least).sum() for row, least in zip(sizes, seen, strict=True)], dtype=int)
    return n_as_far / len(signs) if 2**n <= MOST_COUNTED else (n_as_far + 1) / (len(signs) + 1)


def chance_of_student(distances: Float[np.ndarray, "case value"]) -> Float[np.ndarray, " case"]:
    """How often |t| of normal values around 0 is at least that of each case; 1 for fewer than two values, and for zeros."""
    n = distances.shape[1]
    if n < 2:
        return np.ones(len(distances))
    spread = distances.std(axis=1, ddof=1) / math.sqrt(n)
    # arctan2: no spread at all is an infinite t, and p 0
    angle = np.arctan2(np.abs(distances.mean(axis=1)), spread * math.sqrt(n - 1))
    return np.where((distances == 0).all(axis=1), 1.0, student_tails(angle, n - 1))


def student_tails(angle: Float[np.ndarray, " case"], degrees: int) -> Float[np.ndarray, " case"]:
    """P(|t| >= tan(angle) sqrt(degrees)) under Student's law, in closed form (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    cosine, odd = np.cos(angle), degrees % 2
    term = cosine if odd else np.ones_like(angle)
    total = np.zeros_like(angle)
    for k in range(1 + odd, degrees, 2):  # cos + 2/3 cos^3 + 2/3 4/5 cos^5 ..., or 1 + 1/2 cos^2 + 1/2 3/4 cos^4 ...
        total = total + term
        term = term * cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + np.sin(angle) * total) if odd else np.sin(angle) * total
    return np.clip(1 - inside, 0.0, 1.0)


@cache
def _all_signs(n: int) -> Float[np.ndarray, "pattern value"]:
    return np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)


@cache
def _drawn_signs(n: int) -> Float[np.ndarray, "pattern value"]:
    return np.random.default_rng(0).choice((1.0, -1.0), size=(MOST_COUNTED, n))


def _binomial_tail(count: int, of: int, chance: float) -> float:
    """How likely ``count`` hits or more are in ``of`` trials; the terms from their logarithms, so that none underflows."""
    if count <= 0:
        return 1.0
    if not 0 < chance < 1:
        return float(chance >= 1)
    log_terms = (
        math.lgamma(of + 1)
        - math.lgamma(k + 1)
        - math.lgamma(of - k + 1)
        + k * math.log(chance)
        + (of - k) * math.log1p(-chance)
        for k in range(count, of + 1)
    )
    return math.fsum(math.exp(term) for term in log_terms)
