"""Claims about transformers that learn functions in context, tested on the tables of ``function-classes``."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison

MATCH = 0.05
"""Two methods match if their relative errors differ by at most this much; 1 is the error of always predicting 0."""
DEGRADES = 2.0
"""An error is worse out of distribution if it is more than this many times that in distribution, plus MATCH."""
N_ERRORS = 3.0
"""The margin of a measurement, in standard errors over prompts; one in 370 normal means is outside it."""
LEARNED = 0.5
"""A model whose relative error in distribution is above this has learned too little to test how it generalizes."""
BASELINES = ("least squares", "ridge", "nearest neighbors")
SHIFT_CLAIMS = {
    "scaled_inputs": ("points 3 times as far out as in training: the error grows, least squares' does not", "degrades"),
    "skewed_inputs": ("points with a skewed covariance: the error grows, least squares' does not", "degrades"),
    "orthant": ("examples in one orthant, the question anywhere: close to in distribution", "keeps"),
}


def compare(tables: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> list[Comparison]:
    """Every claim with its number."""
    error, dimensions = tables["error"], settings["task"]["dimensions"]
    why = still_learning(tables["training"])
    return [
        *(unless_it_holds(one, why["linear"]) for one in compare_linear(error[error["functions"] == "linear"], dimensions)),
        *compare_shifts(error[error["functions"] == "linear"]),
        compare_noise(error[error["functions"] == "linear"]),
        *compare_classes(error[(error["functions"] != "linear") & (error["shift"] == "none")], why),
        *compare_orders(tables["equivariance"]),
        *compare_lengths(tables["length"]),
    ]


def still_learning(training: pd.DataFrame) -> dict[str, str | None]:
    """Class of functions -> why a model trained on it may still be learning; None if its curve is flat.

    Args:
        training: held-out rows: functions, positions, seed, step, loss; 1 is the loss of always predicting 0.
    """
    usual = training[training["positions"] == "standard"]
    return {
        str(functions): Goal(chance=1.0).why_not_flat(runs, f"the transformer trained on {functions}")
        for functions, runs in usual.groupby("functions", sort=False)
    }


def unless_it_holds(comparison: Comparison, why: str | None) -> Comparison:
    """A claim that trained models do well can hold before training is finished, but cannot be rejected before."""
    return comparison if comparison.holds else comparison.unless(why)


class Measured(NamedTuple):
    """A relative error, and its margin of three standard errors over the prompts."""

    value: float
    margin: float

    def below(self, bound: float) -> bool | None:
        """Whether it is significantly below ``bound`` (True), above it (False), or neither (None)."""
        if abs(self.value - bound) < self.margin:
            return None
        return self.value <= bound


def worst_of_seeds(error: pd.DataFrame, shift: str, predictor: str) -> dict[int, Measured]:
    """By number of examples: the largest relative error of the seeds, with its margin.

    Trained models count with the worst of their seeds, and the verdicts are about these models: the margin does not include
    the variation between trainings.
    """
    rows = error[(error["shift"] == shift) & (error["predictor"] == predictor)]
    worst = rows.loc[rows.groupby("n_examples")["relative_error"].idxmax()]
    margins = N_ERRORS * worst["standard_error"] / worst["zero_error"]
    return dict(zip(worst["n_examples"], map(Measured, worst["relative_error"], margins), strict=True))


def last(curve: dict[int, Measured]) -> Measured:
    """The error with the largest number of examples."""
    return curve[max(curve)]


def gap_between(ours: dict[int, Measured], theirs: dict[int, Measured]) -> dict[int, Measured]:
    """The gap between two curves; the margins add up, as if the two did not share their prompts."""
    return {n: Measured(abs(ours[n].value - theirs[n].value), ours[n].margin + theirs[n].margin) for n in ours}


def mean_of(curve: dict[int, Measured]) -> Measured:
    """The mean over all numbers of examples; the margin assumes fully correlated errors."""
    return Measured(*(sum(column) / len(curve) for column in zip(*curve.values(), strict=True)))


def compare_linear(error: pd.DataFrame, dimensions: int) -> Iterator[Comparison]:
    """Linear functions, in distribution."""
    ours = worst_of_seeds(error, "none", "transformer")
    gaps = {baseline: gap_between(ours, worst_of_seeds(error, "none", baseline)) for baseline in BASELINES}
    distance = {baseline: mean_of(gap) for baseline, gap in gaps.items()}
    nearest = min(BASELINES, key=lambda baseline: distance[baseline].value)
    first, second = distance["least squares"], min(distance[baseline] for baseline in BASELINES if baseline != "least squares")
    what = "baseline whose error curve is closest to the transformer's, linear functions, mean gap over all n"
    claim = "the error of a transformer trained on linear functions falls with n like that of least squares"
    ahead = Measured(first.value - second.value, first.margin + second.margin).below(0.0)
    yield Comparison(what, claim, nearest, ahead, paper="least squares")
    what = "largest gap between the transformer's relative error and least squares', linear functions, over all n"
    claim = f"a transformer trained on linear functions does as well as least squares on new ones (no gap above {MATCH})"
    verdicts = [gap.below(MATCH) for gap in gaps["least squares"].values()]
    holds = False if False in verdicts else None if None in verdicts else True
    yield Comparison(what, claim, max(gaps["least squares"].values()).value, holds)
    n = min(2 * dimensions, max(ours))
    what = f"relative error of the transformer after {n} examples of a linear function in {dimensions} dimensions"
    claim = f"with more examples than dimensions the error is close to 0 (below {MATCH}), where least squares is exact"
    yield Comparison(what, claim, ours[n].value, ours[n].below(MATCH))


def compare_shifts(error: pd.DataFrame) -> Iterator[Comparison]:
    """Linear functions on other distributions, at the largest number of examples."""
    here = last(worst_of_seeds(error, "none", "transformer"))
    for shift, (claim, kind) in SHIFT_CLAIMS.items():
        there = last(worst_of_seeds(error, shift, "transformer"))
        keeps = Measured(there.value - DEGRADES * here.value, there.margin + DEGRADES * here.margin).below(MATCH)
        holds = None if keeps is None else keeps == (kind == "keeps")
        what = f"relative error of the transformer with all examples, {shift} (in distribution {here.value:.2g})"
        yield Comparison(what, claim, there.value, holds).unless(too_little(here))


def too_little(here: Measured) -> str | None:
    """Why a model with that error in distribution cannot show how it generalizes; None if it can."""
    if here.value <= LEARNED:
        return None
    return f"the transformer's relative error in distribution is {here.value:.2g}; at most {LEARNED:g} is required"


def compare_noise(error: pd.DataFrame) -> Comparison:
    """Linear functions with noise on the answers of the examples: whether some number of examples is harmful."""
    here = last(worst_of_seeds(error, "none", "transformer"))
    curve = worst_of_seeds(error, "noisy", "transformer")
    peak = max(curve, key=lambda n: curve[n].value)
    harmless = curve[peak].below(1 + MATCH)
    falls_again = Measured(last(curve).value - curve[peak].value, last(curve).margin + curve[peak].margin).below(0.0)
    holds = None if harmless is None else not harmless and (peak != max(curve)) and falls_again
    what = f"largest relative error of the transformer over all n, noisy (at n = {peak})"
    claim = (
        "noise on the answers: near n = d the error exceeds that without any example, as least squares' does (double descent)"
    )
    return Comparison(what, claim, curve[peak].value, holds).unless(too_little(here))


def compare_classes(error: pd.DataFrame, why: Mapping[str, str | None]) -> Iterator[Comparison]:
    """The other classes, in distribution, at the largest number of examples; ``why``: of `still_learning`."""
    for functions, rows in error.groupby("functions", sort=False):
        ours = last(worst_of_seeds(rows, "none", "transformer"))
        best = {baseline: last(worst_of_seeds(rows, "none", baseline)) for baseline in BASELINES}
        baseline = min(best, key=lambda name: best[name].value)
        behind = Measured(ours.value - best[baseline].value, ours.margin + best[baseline].margin)
        known = f"best baseline: {baseline}, {best[baseline].value:.2g}"
        what = f"relative error of the transformer with all examples, {functions} ({known})"
        claim = "a transformer trained on a class learns its functions at least as well as methods that do not know the class"
        yield unless_it_holds(Comparison(what, claim, ours.value, behind.below(MATCH)), why.get(str(functions)))


def compare_orders(table: pd.DataFrame) -> Iterator[Comparison]:
    """Which models are equivariant under permutations of their positions."""
    exact = table[table["dtype"] == "float64"]

    def of(attention_dir: str, positions: str) -> pd.DataFrame:
        return exact[(exact["attention_dir"] == attention_dir) & (exact["positions"] == positions)]

    plain = of("bidirectional", "none")
    what = "|T(pi X) - pi T(X)| / |T(X)| without positions and mask, float64, largest of all draws"
    holds = bool((plain["deviation"] <= plain["rounding"]).all())
    claim = "the plain transformer is permutation equivariant"
    yield Comparison(what, claim, float(plain["deviation"].max()), holds, paper=0.0)
    for attention_dir, positions, words in (
        ("bidirectional", "standard", "learned positions"),
        ("bidirectional", "sinusoidal", "sinusoidal positions"),
        ("causal", "none", "a causal mask and no positions"),
    ):
        rows = of(attention_dir, positions)
        what, least = f"the same with {words}, smallest of all draws", float(rows["deviation"].min())
        holds = bool((rows["deviation"] > 1000 * rows["rounding"]).all())
        yield Comparison(what, f"{words} make it depend on the order", least, holds)


def compare_lengths(table: pd.DataFrame) -> Iterator[Comparison]:
    """Prompts longer than in training."""
    learned, sinusoidal = (table[table["positions"] == positions] for positions in ("standard", "sinusoidal"))
    refused = learned.loc[~learned["in_training"], "relative_error"].isna()
    what = "share of prompts longer than in training that learned positions refuse"
    claim = "learned positions end where the table ends"
    yield Comparison(what, claim, float(refused.mean()), bool(refused.all()), paper=1.0)
    inside, beyond = (sinusoidal[sinusoidal["in_training"] == where]["relative_error"].iloc[-1] for where in (True, False))
    what = f"relative error with sinusoidal positions, longest prompt (longest in training {inside:.2g})"
    claim = "sinusoidal positions have no limit: the model reads longer prompts, though less accurately"
    yield Comparison.stated(what, claim, float(beyond))
