"""When is a difference more than the noise of seeds? One judge for every claim of every experiment.

What it is given are single values that chance alone would scatter evenly to both sides of a bound: mostly differences, one for
each seed, of two models that share their batches; the bound is 0. It then asks how often chance would put the mean so far to
one side. Under "the two models are the same" every sign pattern of the differences is equally likely, so the answer is counted,
not looked up (the sign-flip test; it needs neither a normal law nor equal spreads):

    p = share of the 2^n sign patterns whose |mean| is at least the one that was seen

A verdict is given at p <= 0.05, in either direction: True above the bound, False below it, and None ("cannot tell") between.
So identical models are told apart in at most one of twenty cases, whatever the law of the noise. With 6 values, the fewest that
can tell anything (2 / 2^6 = 0.031), the rule reads: all six lie on the same side. Six normal differences do so in 80 % of cases
when their mean is 1.8 times their standard deviation, that is 2.6 times the spread of seeds of one model.

Two sets of values that do not pair (`Judge.larger`) are judged by the same count over all ways to share them out (4 against 4
at least), and shares (`Judge.share_above`) by the exact binomial law.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, Real

MOST_COUNTED = 20_000
"""Beyond so many patterns, as many are drawn instead of counted; with the one that was seen among them p stays a true bound."""


Values = Sequence[float | int] | Real[np.ndarray, " value"]
"""One for each seed, prompt or sequence."""


@dataclass(frozen=True)
class Judge:
    """Two-sided verdicts that chance alone gives in at most a share ``level`` of cases.

    Attributes:
        level: 0.05, one of twenty.
    """

    level: float = 0.05

    def above(self, values: Values, bound: float | int = 0.0) -> bool | None:
        """Whether ``values`` lie above ``bound`` (True), below it (False), or cannot be told from it (None).

        Args:
            values: one for each seed (or prompt, or sequence); for two models their differences, pair by pair.
            bound: what they are held against. 0 asks for a difference, another number for one of that size.
        """
        distance = np.asarray(values, dtype=float) - bound
        if not np.isfinite(distance).all() or self.chance_of_signs(distance) > self.level:
            return None
        return bool(distance.sum() > 0)

    def larger(self, first: Values, second: Values) -> bool | None:
        """Whether ``first`` is larger on average than ``second`` (True), smaller (False), or neither can be told (None).

        For values that do not pair, such as those of two sets of seeds.
        """
        pooled = np.asarray([*first, *second], dtype=float)
        if not np.isfinite(pooled).all() or self.chance_of_shares(pooled, len(first)) > self.level:
            return None
        return bool(np.mean(first) > np.mean(second))

    def share_above(self, count: int, of: int, bound: float = 0.5) -> bool | None:
        """Whether ``count`` hits in ``of`` independent trials speak for a chance above ``bound`` (True), below it, or neither.

        Each direction has half of the level, by the exact binomial law.
        """
        if _binomial_tail(count, of, bound) <= self.level / 2:
            return True
        return False if _binomial_tail(of - count, of, 1 - bound) <= self.level / 2 else None

    def chance_of_signs(self, distance: Float[np.ndarray, " value"]) -> float:
        """The share of sign patterns of ``distance`` that lie at least as far to one side as it does; 1 for no values."""
        n = len(distance)
        if 2**n <= MOST_COUNTED:
            signs = _all_signs(n)
        else:
            signs = np.random.default_rng(0).choice((1.0, -1.0), size=(MOST_COUNTED, n))
            signs[0] = 1.0
        return _share_as_far(signs @ distance, float(distance.sum()), float(np.abs(distance).sum()))

    def chance_of_shares(self, pooled: Float[np.ndarray, " value"], n_first: int) -> float:
        """The share of ways to give ``n_first`` of the values to the first set that part the means at least as far."""
        n = len(pooled)
        centred = pooled - (pooled.mean() if n else 0.0)
        if math.comb(n, n_first) <= MOST_COUNTED:
            chosen = np.array(list(itertools.combinations(range(n), n_first)), dtype=int)
        else:
            generator = np.random.default_rng(0)
            chosen = np.stack([generator.permutation(n)[:n_first] for _ in range(MOST_COUNTED)])
            chosen[0] = np.arange(n_first)
        return _share_as_far(centred[chosen].sum(axis=1), float(centred[:n_first].sum()), float(np.abs(centred).sum()))


JUDGE = Judge()
"""The one that all experiments ask."""


@cache
def _all_signs(n: int) -> Float[np.ndarray, "pattern value"]:
    return np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)


def _share_as_far(sums: Float[np.ndarray, " pattern"], seen: float, scale: float) -> float:
    """The share of ``sums`` at least as far from 0 as ``seen``; equal sums in another order may differ by rounding."""
    return float((np.abs(sums) >= abs(seen) - 1e-12 * scale).mean())


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
