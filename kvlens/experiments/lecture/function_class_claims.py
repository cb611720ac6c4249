"""What is said about transformers that learn functions in context, against the tables of ``function-classes``."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from kvlens.experiments.shared.outcome import Comparison

MATCH = 0.05
"""Two methods match where their relative errors differ by at most so much; 1 is the error of always saying 0."""
DEGRADES = 2.0
"""An error is called worse out of distribution where it is more than so many times that in distribution, plus MATCH."""
LEARNED = 0.5
"""A model whose relative error in distribution stays above this has learned too little to say how it carries over."""
JUDGES = ("least squares", "ridge", "nearest neighbours")
SHIFT_CLAIMS = {
    "scaled_inputs": ("points 3 times as far out as in training: the error grows, least squares' does not", "degrades"),
    "skewed_inputs": ("points with a skewed covariance: the error grows, least squares' does not", "degrades"),
    "orthant": ("examples in one orthant, the question anywhere: close to in distribution", "keeps"),
}


def compare(tables: Mapping[str, pd.DataFrame], settings: Mapping[str, Any]) -> list[Comparison]:
    """Every claim beside its number; trained models count with the worst of their seeds."""
    error, dimensions = tables["error"], settings["task"]["dimensions"]
    return [
        *compare_linear(error[error["functions"] == "linear"], dimensions),
        *compare_shifts(error[error["functions"] == "linear"]),
        compare_noise(error[error["functions"] == "linear"]),
        *compare_classes(error[(error["functions"] != "linear") & (error["shift"] == "none")]),
        *compare_orders(tables["equivariance"]),
        *compare_lengths(tables["length"]),
    ]


def worst_of_seeds(error: pd.DataFrame, shift: str, predictor: str, column: str = "relative_error") -> pd.Series:
    """``column`` against n_examples: at each the largest of the seeds."""
    rows = error[(error["shift"] == shift) & (error["predictor"] == predictor)]
    return rows.groupby("n_examples")[column].max()


def compare_linear(error: pd.DataFrame, dimensions: int) -> Iterator[Comparison]:
    """Linear functions, in distribution."""
    ours = worst_of_seeds(error, "none", "transformer")
    gaps = {judge: (ours - worst_of_seeds(error, "none", judge)).abs() for judge in JUDGES}
    gap, nearest = float(gaps["least squares"].max()), min(JUDGES, key=lambda judge: gaps[judge].mean())
    yield Comparison(
        "judge whose error curve lies nearest to the transformer's, linear functions, mean gap over all n",
        "least squares",
        nearest,
        "the error of a transformer trained on linear functions falls with n as that of least squares",
        nearest == "least squares",
    )
    yield Comparison(
        "largest gap between the transformer's relative error and least squares', linear functions, over all n",
        None,
        gap,
        "a transformer trained on linear functions does as well as least squares on new ones",
        gap <= MATCH,
    )
    n = min(2 * dimensions, int(ours.index.max()))
    yield Comparison(
        f"relative error of the transformer after {n} examples of a linear function in {dimensions} dimensions",
        None,
        float(ours[n]),
        "with more examples than dimensions the error is close to 0, where least squares is exact",
        bool(ours[n] <= MATCH),
    )


def compare_shifts(error: pd.DataFrame) -> Iterator[Comparison]:
    """Linear functions on other distributions, at the largest number of examples."""
    here = float(worst_of_seeds(error, "none", "transformer").iloc[-1])
    for shift, (claim, kind) in SHIFT_CLAIMS.items():
        there = float(worst_of_seeds(error, shift, "transformer").iloc[-1])
        bound = DEGRADES * here + MATCH
        yield Comparison(
            f"relative error of the transformer with all examples, {shift} (in distribution {here:.2g})",
            None,
            there,
            claim,
            None if here > LEARNED else there > bound if kind == "degrades" else there <= bound,
        )


def compare_noise(error: pd.DataFrame) -> Comparison:
    """Linear functions with noise on the answers of the examples: is there a number of examples that harms?"""
    here = float(worst_of_seeds(error, "none", "transformer").iloc[-1])
    curve = worst_of_seeds(error, "noisy", "transformer")
    return Comparison(
        f"largest relative error of the transformer over all n, noisy (at n = {curve.idxmax()})",
        None,
        float(curve.max()),
        "noise on the answers: near n = d the error exceeds that without any example, as least squares' does (double descent)",
        None if here > LEARNED else bool(curve.max() > 1 + MATCH and curve.iloc[-1] < curve.max()),
    )


def compare_classes(error: pd.DataFrame) -> Iterator[Comparison]:
    """The other classes, in distribution, at the largest number of examples."""
    for functions, rows in error.groupby("functions", sort=False):
        ours = float(worst_of_seeds(rows, "none", "transformer").iloc[-1])
        best = {judge: float(worst_of_seeds(rows, "none", judge).iloc[-1]) for judge in JUDGES}
        judge = min(best, key=lambda name: best[name])
        yield Comparison(
            f"relative error of the transformer with all examples, {functions} (best judge: {judge}, {best[judge]:.2g})",
            None,
            ours,
            "a transformer trained on a class learns its functions at least as well as methods that do not know the class",
            ours <= best[judge] + MATCH,
        )


def compare_orders(table: pd.DataFrame) -> Iterator[Comparison]:
    """Which models commute with permutations of their positions."""
    exact = table[table["dtype"] == "float64"]

    def of(attention_dir: str, positions: str) -> pd.DataFrame:
        return exact[(exact["attention_dir"] == attention_dir) & (exact["positions"] == positions)]

    plain = of("bidirectional", "none")
    yield Comparison(
        "|T(pi X) - pi T(X)| / |T(X)| without positions and mask, float64, largest of all draws",
        0.0,
        float(plain["deviation"].max()),
        "the plain transformer is permutation equivariant",
        bool((plain["deviation"] <= plain["rounding"]).all()),
    )
    for attention_dir, positions, words in (
        ("bidirectional", "standard", "learned positions"),
        ("bidirectional", "sinusoidal", "sinusoidal positions"),
        ("causal", "none", "a causal mask and no positions"),
    ):
        rows = of(attention_dir, positions)
        yield Comparison(
            f"the same with {words}, smallest of all draws",
            None,
            float(rows["deviation"].min()),
            f"{words} let it tell orders apart",
            bool((rows["deviation"] > 1000 * rows["rounding"]).all()),
        )


def compare_lengths(table: pd.DataFrame) -> Iterator[Comparison]:
    """Prompts longer than in training."""
    learned, sinusoidal = (table[table["positions"] == positions] for positions in ("standard", "sinusoidal"))
    refused = learned.loc[~learned["in_training"], "relative_error"].isna()
    yield Comparison(
        "share of longer prompts than in training that learned positions refuse",
        1.0,
        float(refused.mean()),
        "learned positions end where the table ends",
        bool(refused.all()),
    )
    inside, beyond = (sinusoidal[sinusoidal["in_training"] == where]["relative_error"].iloc[-1] for where in (True, False))
    yield Comparison(
        f"relative error with sinusoidal positions, longest prompt (longest in training {inside:.2g})",
        None,
        float(beyond),
        "sinusoidal positions have no end: the model reads longer prompts, if not as well",
        bool(pd.notna(beyond)),
    )
