"""Is a difference between models more than the noise of seeds? One test for all claims, and `Comparison`, what it says of one.

The test takes single values that chance alone would scatter symmetrically around a bound: usually differences, one for each
seed, of two models that share their batches, with bound 0. The verdict is True (significantly above the bound) or False
(significantly below) where both tests below are significant, and None (inconclusive) otherwise.

*Sign-flip test.* If the two models are equal, every sign pattern of the differences is equally likely, whatever the
distribution of the noise, so the p-value is counted exactly:

    p = share of the 2^n sign patterns whose |mean| is at least the observed one         significant at p <= 0.05

*Student's t-test.* t = mean / (standard deviation / sqrt(n)), with n - 1 degrees of freedom; significant at p <= 0.02. It takes
the sizes into account: six differences whose mean is carried by one of them are not six seeds' worth of evidence.

At least 6 values are needed for any verdict (2 / 2^6 = 0.031); all six must then lie on the same side and not too far apart.
The sign-flip test alone would call identical models different in 3.1 % of cases with 6 values and in nearly 5 % with more;
together the two tests do so in 1.5 to 2 % (normal noise), and in at most 5 % for any distribution. With six normal differences
the power is 87 % when their mean is 2.1 times their standard deviation, which is 3 times the spread of one model's seeds.

Beside an inconclusive verdict stands what the test could have found (`detectable`): the smallest distance of
the mean from the bound that is significant in 80 % of samples of as many normal values with this standard deviation.

The verdict depends neither on the order of the values nor on their unit. Proportions (`share_above`) are
tested with the exact binomial distribution.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int, Real

LEVEL, MOST = 0.02, 0.05
"""The significance levels: of the t-test and of the binomial test, and of the sign-flip test."""

MOST_COUNTED = 20_000
"""Above this number of patterns, a sample of this size is drawn; it includes the observed one, so that p stays valid."""

POWER, N_SAMPLES = 0.8, 2000
"""The share of samples in which a detectable difference is significant, and the samples from which it is computed."""

Z = 1.96
"""Standard deviations on either side of the mean that hold 95 % of a normal distribution."""

Measurements = Sequence[float | int] | Real[np.ndarray, " value"]
"""One for each seed, prompt or sequence."""


def above(values: Measurements, bound: float | int = 0.0) -> bool | None:
    """Whether ``values`` lie significantly above ``bound`` (True), below it (False), or neither (None: inconclusive).

    Args:
        values: one for each seed (or prompt, or sequence); for two models their differences, pair by pair.
        bound: 0 tests for a difference, another number for a difference of at least that size.
    """
    (side,) = sides(np.asarray(values, dtype=float)[None] - bound)
    return None if side == 0 else bool(side > 0)


def detectable(values: Measurements) -> float | None:
    """The smallest distance of the mean from its bound that would be significant in `POWER` of the cases.

    Args:
        values: their number and standard deviation count.

    Returns:
        In the unit of the values; None where no distance is significant (fewer than 6 values, or one that is not finite).
    """
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return None
    spreads = _detectable_spreads(len(sample))
    return None if spreads is None else spreads * float(sample.std(ddof=1))


def sides(distances: Float[np.ndarray, "case value"]) -> Int[np.ndarray, " case"]:
    """Return, for many cases at once, the side of 0 on which the values of each lie significantly: 1, -1, or 0 for neither."""
    finite = np.isfinite(distances).all(axis=1)
    # flip to a positive sum, sort, scale the largest to 1: the result then depends on neither order, side nor unit
    distances = np.where(finite[:, None], distances, 0.0)
    largest = np.abs(distances).max(axis=1, keepdims=True, initial=0.0)
    distances = distances / np.where(largest > 0, largest, 1.0)
    side = np.sign(distances.sum(axis=1)).astype(int)
    distances = np.sort(distances * side[:, None], axis=1)
    candidates = np.flatnonzero(chance_of_student(distances) <= LEVEL)
    significant = np.zeros(len(distances), dtype=bool)
    significant[candidates] = chance_of_signs(distances[candidates]) <= MOST
    return side * significant


def share_above(count: int, of: int, bound: float = 0.5) -> bool | None:
    """Whether ``count`` successes in ``of`` independent trials are significantly more than a chance of ``bound`` gives.

    True: more; False: fewer; None: neither. Each direction has half of the level, by the exact binomial distribution.
    """
    if binomial_tail(count, of, bound) <= LEVEL / 2:
        return True
    return False if binomial_tail(of - count, of, 1 - bound) <= LEVEL / 2 else None


def chance_of_signs(distances: Float[np.ndarray, "case value"]) -> Float[np.ndarray, " case"]:
    """p-value of each case's sign-flip test: the share of sign patterns whose |mean| is at least as large; 1 for no values."""
    n = distances.shape[1]
    sizes = np.sort(np.abs(distances), axis=1)
    observed = np.abs(distances.sum(axis=1)) - 1e-12 * sizes.sum(axis=1)  # equal sums in another order may differ by rounding
    signs = _all_signs(n) if 2**n <= MOST_COUNTED else _drawn_signs(n)
    n_as_far = np.array([(np.abs(signs @ row) >= least).sum() for row, least in zip(sizes, observed, strict=True)], dtype=int)
    return n_as_far / len(signs) if 2**n <= MOST_COUNTED else (n_as_far + 1) / (len(signs) + 1)


def chance_of_student(distances: Float[np.ndarray, "case value"]) -> Float[np.ndarray, " case"]:
    """p-value of the two-sided t-test of each case; 1 for fewer than two values, and where all are 0."""
    n = distances.shape[1]
    if n < 2:
        return np.ones(len(distances))
    spread = distances.std(axis=1, ddof=1) / math.sqrt(n)
    # arctan2: where all values are equal, t is infinite and p is 0
    angle = np.arctan2(np.abs(distances.mean(axis=1)), spread * math.sqrt(n - 1))
    return np.where((distances == 0).all(axis=1), 1.0, student_tails(angle, n - 1))


def interval_of_mean(values: Measurements) -> tuple[float, float] | None:
    """The mean's 95 % interval, mean -+ t standard errors; None for fewer than two values, or one that is not finite."""
    sample = np.asarray(values, dtype=float)
    if len(sample) < 2 or not np.isfinite(sample).all():
        return None
    half = _quantile(len(sample) - 1, 0.95) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return float(sample.mean()) - half, float(sample.mean()) + half


@cache
def _quantile(degrees: int, share: float) -> float:
    """The t for which P(|t| < it) is ``share``, by bisection on its angle."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(np.array([middle]), degrees)[0] > 1 - share else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


def student_tails(angle: Float[np.ndarray, " case"], degrees: int) -> Float[np.ndarray, " case"]:
    """P(|t| >= tan(angle) sqrt(degrees)) of Student's t distribution, in closed form (Abramowitz, Stegun 26.7.3, 26.7.4)."""
    cosine, odd = np.cos(angle), degrees % 2
    term = cosine if odd else np.ones_like(angle)
    total = np.zeros_like(angle)
    for k in range(1 + odd, degrees, 2):  # cos + 2/3 cos^3 + 2/3 4/5 cos^5 ..., or 1 + 1/2 cos^2 + 1/2 3/4 cos^4 ...
        total = total + term
        term = term * cosine**2 * k / (k + 1)
    inside = 2 / math.pi * (angle + np.sin(angle) * total) if odd else np.sin(angle) * total
    return np.clip(1 - inside, 0.0, 1.0)


@cache
def _detectable_spreads(n: int) -> float | None:
    """`detectable` of ``n`` values with standard deviation 1, by bisection on fixed samples.

    Where sign patterns are too many to be counted, the t-test decides alone: on normal values it is the stricter one.
    """
    generator, low, high = np.random.default_rng(n), 0.0, 64.0
    if 2**n <= MOST_COUNTED:
        noise = generator.normal(size=(N_SAMPLES, n))
    else:
        mean, spread = generator.normal(size=N_SAMPLES) / math.sqrt(n), np.sqrt(generator.chisquare(n - 1, N_SAMPLES) / (n - 1))

    def power(distance: float) -> float:
        if 2**n <= MOST_COUNTED:
            return float((sides(noise + distance) == 1).mean())
        chance = student_tails(np.arctan2(np.abs(mean + distance) * math.sqrt(n), spread * math.sqrt(n - 1)), n - 1)
        return float(((chance <= LEVEL) & (mean + distance > 0)).mean())

    if power(high) < POWER:
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high


@cache
def _all_signs(n: int) -> Float[np.ndarray, "pattern value"]:
    return np.array(list(itertools.product((1.0, -1.0), repeat=n))).reshape(2**n, n)


@cache
def _drawn_signs(n: int) -> Float[np.ndarray, "pattern value"]:
    return np.random.default_rng(0).choice((1.0, -1.0), size=(MOST_COUNTED, n))


def binomial_tail(count: int, of: int, chance: float) -> float:
    """P(at least ``count`` successes in ``of`` trials), summed from the logarithms of its terms, so that none underflows."""
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


def share_interval(is_right: pd.Series, group: pd.Series) -> tuple[float, float]:
    """The lower and upper end of the 95 % interval of the share of True in ``is_right``, for answers that come in groups.

    Wilson's interval for a share p of n independent answers,

        (p + z^2 / 2n  +-  z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n),        z = 1.96,

    stays inside 0..1 and has a width even at p = 0 and p = 1. Answers of one group (a sequence, a story) are alike, so n is not
    their number, but the number of independent answers whose share would vary as much: n = p (1 - p) / Var(p), with the
    variance between groups (Kish 1965).

    Args:
        is_right: one value for each answer.
        group: the group of each answer, with the same index. n is at least the number of groups and at most that of answers;
            where all answers are equal and so have no variance, it is the number of groups.
    """
    sums = is_right.astype(float).groupby(group).agg(["sum", "size"])
    n_answers, n_groups, share = len(is_right), len(sums), float(is_right.mean())
    apart = ((sums["sum"] - share * sums["size"]) ** 2).sum()
    variance = apart * n_groups / max(1, n_groups - 1) / n_answers**2
    n: float = n_groups
    if 0 < share < 1:
        n = n_answers if variance == 0 else min(n_answers, max(n_groups, share * (1 - share) / variance))
    center, half = share + Z**2 / (2 * n), Z * math.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    low, high = (center - half) / (1 + Z**2 / n), (center + half) / (1 + Z**2 / n)
    return max(0.0, min(low, share)), min(1.0, max(high, share))  # 0 and 1 are ends of their own intervals: not after rounding


class Sample(NamedTuple):
    """The values that a claim was tested on: one for each seed, prompt or context.

    Attributes:
        n: how many.
        mean, low, high: their mean and its 95 % interval (None for fewer than two values, or one that is not finite).
        bound: what the mean is compared with.
        detectable: where the test is inconclusive, the smallest distance from ``bound`` that it finds in 80 % of cases, for
            values that scatter like these; None elsewhere, and where it finds none (fewer than 6 values).
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    bound: float
    detectable: float | None


Number = float | int | str | None


def _above_by_interval(figures: Sequence[float], bound: float) -> bool | None:
    """The t-test of values of which only number, mean and the ends of its 95 % interval are known."""
    n, mean, low, high = int(figures[0]), *figures[1:]
    error = (high - low) / 2 / _quantile(n - 1, 0.95)
    chance = student_tails(np.array([math.atan2(abs(mean - bound), error * math.sqrt(n - 1))]), n - 1)[0]
    return None if n < FEWEST or chance > LEVEL else mean > bound


def _above_by_margin(figures: Sequence[float], bound: float) -> bool | None:
    value, margin = figures
    return None if abs(value - bound) < margin else value > bound


FEWEST = 6
"""With fewer values no pattern of signs is significant."""

RULES: dict[str, Callable[[Sequence[float], float], bool | None]] = {
    "values": lambda figures, bound: above(figures, bound),
    "interval": _above_by_interval,
    "share": lambda figures, bound: share_above(int(figures[0]), int(figures[1]), bound),
    "margin": _above_by_margin,
    "chance": lambda figures, bound: None if figures[1] > LEVEL else figures[0] > bound,
    "number": lambda figures, bound: figures[0] > bound,
}
"""Rule -> whether its figures lie significantly above a bound: `above` of all values; the t-test of (their number, mean, low,
high); the binomial test of (successes, trials); (value, margin); (value, its p), as of a permutation test; an exact number."""


@dataclass(frozen=True)
class Evidence:
    """The figures that a verdict is computed from.

    Attributes:
        rule: one of `RULES`.
        figures: what the rule takes.
        bound: what they are compared with.
        below: whether the claim is that they lie below it. A number without noise may also lie at it.
    """

    rule: str
    figures: tuple[float, ...]
    bound: float = 0.0
    below: bool = False

    @cached_property
    def holds(self) -> bool | None:
        """Whether the claim holds; None where the figures are inconclusive."""
        if self.rule == "number" and self.figures[0] == self.bound:
            return True
        if not all(math.isfinite(figure) for figure in self.figures) and self.rule != "values":
            return False
        side = RULES[self.rule](self.figures, self.bound)
        return None if side is None else bool(side) is not self.below

    @property
    def sample(self) -> Sample | None:
        """The values that the test was about; None for the other rules."""
        if self.rule == "interval":
            n, (mean, low, high) = int(self.figures[0]), self.figures[1:]
            spreads = _detectable_spreads(n) if n >= FEWEST and self.holds is None else None
            spread = (high - low) / 2 / _quantile(n - 1, 0.95) * math.sqrt(n)
            return Sample(n, mean, low, high, self.bound, None if spreads is None else spreads * spread)
        if self.rule != "values":
            return None
        n, (first, last) = len(self.figures), interval_of_mean(self.figures) or (None, None)
        found = (detectable(self.figures) if self.holds is None else None) or None
        return Sample(n, float(np.mean(self.figures)) if n else math.nan, first, last, self.bound, found)


@dataclass(frozen=True)
class Comparison:
    """One number of the paper next to ours.

    Attributes:
        what: what is measured, with its unit.
        claim: what the paper says, in words.
        ours: what we measured.
        evidence: what the verdict is computed from; None for numbers that are only shown side by side, because no claim can be
            tested with them or their noise is unknown, and for claims about something that did not happen here.
        paper: the paper's number; None if it shows a curve or states a fact without one.
        untrained: why the models have not learned enough for a test (:mod:`kvlens.papers.harness.learned`); ``holds`` is
            None then. None if they have, or if nothing is trained.
    """

    what: str
    claim: str
    ours: Number
    evidence: Evidence | None
    paper: Number = None
    untrained: str | None = None

    @property
    def tested(self) -> bool:
        """Whether there is evidence for or against the claim."""
        return self.evidence is not None

    @property
    def holds(self) -> bool | None:
        """Whether our numbers support the claim; None where they are inconclusive, or there is no test."""
        return None if self.evidence is None or self.untrained is not None else self.evidence.holds

    @property
    def sample(self) -> Sample | None:
        """The values that the claim was tested on; None if it was tested in another way."""
        return None if self.evidence is None else self.evidence.sample

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        if not self.tested:
            return "not tested"
        if self.untrained is not None:
            return "not trained far enough"
        return {True: "holds", False: "does not hold", None: "inconclusive"}[self.holds]

    def unless(self, untrained: str | None) -> "Comparison":
        """The same comparison, without its verdict if ``untrained`` gives a reason why the models have not learned enough."""
        return self if untrained is None or not self.tested else replace(self, untrained=untrained)

    def as_json(self) -> dict[str, object]:
        """The entry in ``summary.json``: the evidence, and what follows from it."""
        found = dict(holds=self.holds, judged=self.tested, verdict=self.verdict, sample=self.sample and self.sample._asdict())
        return vars(self) | {"evidence": self.evidence and asdict(self.evidence)} | found

    @classmethod
    def from_json(cls, entry: Mapping[str, object]) -> "Comparison":
        """Read an entry back; what follows from the evidence is computed again."""
        given: dict[str, Any] = {field.name: entry.get(field.name) for field in fields(cls)}
        if given["evidence"] is not None:
            given["evidence"] = Evidence(**{**given["evidence"], "figures": tuple(given["evidence"]["figures"])})
        return cls(**given)

    @classmethod
    def tested_on(
        cls,
        what: str,
        claim: str,
        values: Measurements,
        bound: float | int = 0.0,
        *,
        below: bool = False,
        ours: Number = None,
        paper: Number = None,
    ) -> "Comparison":
        """A claim that the values lie above ``bound`` (``below``: below it), by the significance test; ``ours``: their mean."""
        figures = tuple(np.asarray(values, dtype=float).tolist())
        mean = float(np.mean(figures)) if figures else math.nan
        return cls(what, claim, mean if ours is None else ours, Evidence("values", figures, float(bound), below), paper)

    @classmethod
    def of_share(
        cls, what: str, claim: str, is_right: Sequence[bool] | pd.Series, bound: float, *, below: bool = False
    ) -> "Comparison":
        """A claim that the share of True lies above ``bound`` (``below``: below it), by the binomial test."""
        right, of = int(np.count_nonzero(is_right)), len(is_right)
        return cls(what, claim, right / of, Evidence("share", (right, of), bound, below))

    @classmethod
    def at_most(
        cls, what: str, claim: str, ours: float, bound: float | int, *, shown: Number = None, paper: Number = None
    ) -> "Comparison":
        """A claim about a number without noise: that it is at most ``bound``; ``shown`` stands for it, if given."""
        evidence = Evidence("number", (float(ours),), float(bound), below=True)
        return cls(what, claim, ours if shown is None else shown, evidence, paper)

    @classmethod
    def at_least(
        cls, what: str, claim: str, ours: float, bound: float | int, *, shown: Number = None, paper: Number = None
    ) -> "Comparison":
        """A claim about a number without noise: that it is at least ``bound``; ``shown`` stands for it, if given."""
        return cls(what, claim, ours if shown is None else shown, Evidence("number", (float(ours),), float(bound)), paper)

    @classmethod
    def stated(cls, what: str, claim: str, ours: Number, *, paper: Number = None) -> "Comparison":
        """Numbers side by side, without a verdict."""
        return cls(what, claim, ours, None, paper)
