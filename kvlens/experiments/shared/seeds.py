"""Summaries of training runs by seed, and how they are printed.

Runs with the same seed use the same batches, so two models are compared seed by seed. Whether the differences are significant
is tested by :data:`kvlens.experiments.shared.significance.SIGNIFICANCE`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlens.experiments.shared.curves import of_heldout


def mean_and_spread(values: Sequence[float]) -> str:
    """``"+0.123 ± 0.004 (3 seeds)"``: mean and standard deviation of single values."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"not finite for {lost} of {len(values)} seeds"
    series = pd.Series(values, dtype=float)
    spread = "" if len(series) < 2 else f" ± {series.std():.3f}"
    return f"{series.mean():+.3f}{spread} ({len(series)} seed{'s' * (len(series) > 1)})"


def final_losses(course: pd.DataFrame, by: Sequence[str] = ("model", "seed"), last_share: float = 0.1) -> pd.DataFrame:
    """Final losses of every run.

    Args:
        course: rows of :func:`kvlens.experiments.shared.curves.train_and_compare`, of runs of equal length.
        by: the columns that identify a run.
        last_share: share of the steps over which training losses are averaged, because a single batch is noisy.

    Returns:
        One row per run: ``by``, ``heldout_loss`` at the last evaluation, ``train_loss`` over the last steps (NaN for a run that
        logged none of them).
    """
    keys = list(by)
    heldout = of_heldout(course).sort_values("step", kind="stable").groupby(keys, sort=False)["loss"].last()
    late = course[(course["split"] == "train") & (course["step"] > (1 - last_share) * course["step"].max())]
    ends = pd.DataFrame({"heldout_loss": heldout, "train_loss": late.groupby(keys, sort=False)["loss"].mean()})
    return ends.reindex(heldout.index).reset_index()


def differences_by_seed(runs: pd.DataFrame, of: str, minus: str, column: str) -> list[float]:
    """``column`` of model ``of`` minus that of model ``minus``, seed by seed, by rising seed.

    Args:
        runs: columns ``model``, ``seed`` and ``column``. Several rows of a run (at several widths, say) are averaged first.
        of, minus: labels in ``model``.
        column: what is compared.
    """
    chosen = runs[runs["model"].isin([of, minus])]
    by_model: Mapping[Any, pd.Series] = {name: rows.groupby("seed")[column].mean() for name, rows in chosen.groupby("model")}
    return (by_model[of] - by_model[minus]).sort_index().tolist()


def tokens_seen(settings: Mapping[str, Any]) -> int:
    """Tokens of one training run, from an experiment's settings."""
    return int(settings["training"]["steps"] * settings["training"]["batch_size"] * settings["task"]["length"])
