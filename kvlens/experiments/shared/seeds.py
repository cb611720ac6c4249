"""Is a difference between two models larger than the spread of seeds?

Runs of one seed share their batches, so two models are compared seed by seed: what is asked is whether the differences, one a
seed, keep their sign. The rule, the same one in every experiment that uses this module: a difference counts when the mean over
seeds lies more than twice the standard deviation (of single differences) from 0. With three seeds that is Student's t = 3.5,
which chance alone gives in either direction one time in 27.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvlens.experiments.shared.curves import of_heldout

N_DEVIATIONS = 2.0


def counts_as_positive(differences: Sequence[float]) -> bool | None:
    """Whether ``differences``, one a seed, are positive (True), negative (False), or not told apart from 0 (None).

    A run that diverged to an infinite loss leaves no difference to speak of: None.
    """
    if not all(math.isfinite(difference) for difference in differences):
        return None
    values = pd.Series(differences, dtype=float)
    mean, spread = values.mean(), values.std()
    if not abs(mean) > N_DEVIATIONS * spread:  # also where a single seed leaves the spread unknown
        return None
    return bool(mean > 0)


def mean_and_spread(values: Sequence[float]) -> str:
    """``"+0.123 ± 0.004 (3 seeds)"``: mean and standard deviation of single values."""
    lost = sum(not math.isfinite(value) for value in values)
    if lost:
        return f"not finite for {lost} of {len(values)} seeds"
    series = pd.Series(values, dtype=float)
    spread = "" if len(series) < 2 else f" ± {series.std():.3f}"
    return f"{series.mean():+.3f}{spread} ({len(series)} seed{'s' * (len(series) > 1)})"


def final_losses(course: pd.DataFrame, by: Sequence[str] = ("model", "seed"), last_share: float = 0.1) -> pd.DataFrame:
    """Where every run ended.

    Args:
        course: rows of :func:`kvlens.experiments.shared.curves.train_and_compare`, of runs of equal length.
        by: the columns that tell runs apart.
        last_share: share of the steps whose training losses are averaged (one batch alone is noisy).

    Returns:
        One row a run: ``by``, ``heldout_loss`` at the last evaluation, ``train_loss`` over the last steps (NaN for a run that
        logged none of them).
    """
    keys = list(by)
    heldout = of_heldout(course).sort_values("step", kind="stable").groupby(keys, sort=False)["loss"].last()
    late = course[(course["split"] == "train") & (course["step"] > (1 - last_share) * course["step"].max())]
    ends = pd.DataFrame({"heldout_loss": heldout, "train_loss": late.groupby(keys, sort=False)["loss"].mean()})
    return ends.reindex(heldout.index).reset_index()


def differences_by_seed(finals: pd.DataFrame, of: str, minus: str, column: str) -> list[float]:
    """``column`` of model ``of`` minus that of model ``minus``, seed by seed, by rising seed."""
    by_model: Mapping[Any, pd.Series] = {
        name: rows.set_index("seed")[column] for name, rows in finals[finals["model"].isin([of, minus])].groupby("model")
    }
    return (by_model[of] - by_model[minus]).sort_index().tolist()


def tokens_seen(settings: Mapping[str, Any]) -> int:
    """Tokens of one training run, from an experiment's settings."""
    return int(settings["training"]["steps"] * settings["training"]["batch_size"] * settings["task"]["length"])
