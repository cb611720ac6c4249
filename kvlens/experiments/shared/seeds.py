"""Summaries of training runs by seed, and how they are printed.

Runs with the same seed use the same batches, so two models are compared seed by seed. Whether the differences are significant
is tested by :data:`kvlens.experiments.shared.significance.SIGNIFICANCE`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlens.experiments.shared.curves import last_heldout


def mean_and_spread(values: Sequence[float]) -> str:
    """``"+0.123 ± 0.004 (3 seeds)"``: mean and standard deviation of single values."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"not finite for {lost} of {len(values)} seeds"
    series = pd.Series(values, dtype=float)
    spread = "" if len(series) < 2 else f" ± {series.std():.3f}"
    return f"{series.mean():+.3f}{spread} ({len(series)} seed{'s' * (len(series) > 1)})"


def final_losses(course: pd.DataFrame, by: Sequence[str] = ("model", "seed")) -> pd.DataFrame:
    """One row per run: ``by``, the columns that identify it, and ``heldout_loss``, that of its last evaluation."""
    last = last_heldout(course.sort_values("step", kind="stable"), by)
    return last[[*by, "loss"]].rename(columns={"loss": "heldout_loss"})


def differences_by_seed(runs: pd.DataFrame, of: str, minus: str, column: str) -> list[float]:
    """``column`` of model ``of`` minus that of model ``minus``, by rising seed, for the seeds that both have.

    Args:
        runs: columns ``model``, ``seed`` and ``column``. Several rows of a run (at several widths, say) are averaged first.
        of, minus: labels in ``model``.
        column: what is compared.
    """
    chosen = runs[runs["model"].isin([of, minus])]
    by_model: Mapping[Any, pd.Series] = {name: rows.groupby("seed")[column].mean() for name, rows in chosen.groupby("model")}
    ours, theirs = by_model[of].align(by_model[minus], join="inner")
    return (ours - theirs).sort_index().tolist()


def tokens_seen(settings: Mapping[str, Any]) -> int:
    """Tokens of one training run, from an experiment's settings."""
    return int(settings["training"]["steps"] * settings["training"]["batch_size"] * settings["task"]["length"])
