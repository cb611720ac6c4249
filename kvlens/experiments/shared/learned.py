"""Has a model learned what it can? A claim about who is better is tested only where its baseline has.

    gain(t) = (chance - y(t)) / (chance - best)        y: held-out loss or accuracy, mean over seeds

``chance`` is what a model that knows nothing gets: the variance of the labels, the loss of the tokens' frequencies, one over
the number of answers; ``best`` is a perfect model's. Two things are asked, and where one is missing the verdict is "not trained
far enough" (:attr:`~kvlens.experiments.shared.outcome.Comparison.untrained`), whatever the significance test says:

- *learned*: the baseline ends with a gain of at least ``share``;
- *flat*: the second half of the steps brought at most `LATE` of what the baseline has gained in all; of its own curve, and of
  those that end behind it (one that is ahead may still improve, and be farther ahead). Half of the steps would have done nearly
  as well, so twice as many will hardly do better. (The last few steps alone would prove nothing: a learning rate that falls to
  zero makes any curve flat.) A model that has learned all but everything (`DONE`) has no more to gain, however soon its
  training ended.

A curve may be flat before it falls, as that of induction is. Then the baseline has not learned, and nothing is said.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from kvlens.experiments.shared.curves import mean_course

LATE = 1 / 8
"""Of all that a baseline gains, the most that the second half of the steps may bring."""

DONE = 0.98
"""From this gain on there is nothing left to learn."""


@dataclass(frozen=True)
class Goal:
    """What there is to learn.

    Attributes:
        chance: ``y`` of a model that knows nothing.
        best: of a perfect one; where it is not known, as with text, 0.
        share: of the way from the one to the other that counts as having learned.
        y: the column that is measured.
        in_logs: whether curves are flat where their logarithms are; for errors that are compared by their ratio.
    """

    chance: float
    best: float = 0.0
    share: float = 0.5
    y: str = "loss"
    in_logs: bool = False

    def gains(self, runs: pd.DataFrame) -> tuple[float, float]:
        """What the runs of one model have gained after half of their steps, and at their end; means over seeds.

        Args:
            runs: held-out rows: seed, step and `y`. A run that ended early keeps its last value.
        """
        course = mean_course(runs.assign(**{self.y: runs[self.y].astype(float)}), y=self.y)
        early = course.loc[course["step"] <= course["step"].max() / 2, "mean"]
        half, end = (early.iloc[-1] if len(early) else self.chance), course["mean"].iloc[-1]
        return (self.chance - half) / (self.chance - self.best), (self.chance - end) / (self.chance - self.best)

    def why_not_learned(self, runs: pd.DataFrame, name: str) -> str | None:
        """A sentence where the model has not gained `share`; None where it has."""
        _, gain = self.gains(runs)
        if gain >= self.share:
            return None
        went = f"has learned {round(gain, 2) + 0.0:.0%} of what there is" if math.isfinite(gain) else "diverged"
        return f"{name} {went} ({self.y} {self.chance:.3g} is chance, {self.best:.3g} perfect); {self.share:.0%} is asked"

    def why_not_flat(
        self, runs: pd.DataFrame, name: str, of: pd.DataFrame | None = None, rival: pd.DataFrame | None = None
    ) -> str | None:
        """A sentence where the second half of the steps brought more than `LATE` of the gain; None where it did not.

        Args:
            runs: of the model whose curve is asked about.
            name: of that model.
            of: of the model whose gain is the measure; None: the same.
            rival: of the model that it is compared with; nothing is asked of one that is ahead of it.
        """
        goal = Goal(math.log(self.chance), math.log(self.chance) - 1, y=self.y) if self.in_logs else self
        half, end = goal.gains(self._in_logs(runs))
        whole = end if of is None else goal.gains(self._in_logs(of))[1]
        done = not self.in_logs and end >= DONE
        done = done or (rival is not None and end > goal.gains(self._in_logs(rival))[1])
        if done or not math.isfinite(end) or end - half <= LATE * whole:
            return None
        return f"{name} still improves: {(end - half) / whole:.0%} of the gain came in the second half of its steps"

    def _in_logs(self, runs: pd.DataFrame) -> pd.DataFrame:
        return runs.assign(**{self.y: np.log(runs[self.y])}) if self.in_logs else runs

    def why_untrained(self, course: pd.DataFrame, baseline: str) -> str | None:
        """Why nothing can be said about the models of ``course`` against ``baseline``; None where something can.

        Args:
            course: held-out rows of all that are compared: model, seed, step and `y`.
            baseline: the model that must have learned.
        """
        runs = dict(list(course.groupby("model", sort=False)))
        base = runs[baseline]
        found = self.why_not_learned(base, baseline) or self.why_not_flat(base, baseline)
        for name, own in runs.items():
            found = found or self.why_not_flat(own, str(name), of=base, rival=base)
        return found

    def why_not_limited(
        self, course: pd.DataFrame, baseline: str, by: str, easiest: Any, name: Callable[[Any], str]
    ) -> dict[Any, str | None]:
        """The same at each of several difficulties, at which the baseline may be unable to learn: that is the claim.

        So the baseline must have learned at the easiest one, which shows that the number of steps suffices; at every other one
        its curve must be flat, and that of a model that is behind it, too.

        Args:
            course: held-out rows of all that are compared: model, seed, step, ``by`` and `y`.
            baseline: the model that may be limited.
            by: the column of the difficulty.
            easiest: its value where the baseline must have learned.
            name: a difficulty in words.

        Returns:
            Difficulty -> why nothing can be said there; None where something can.
        """
        runs = {key: dict(list(rows.groupby("model"))) for key, rows in course.groupby(by)}
        reference = runs[easiest][baseline]
        found: dict[Any, str | None] = {}
        for key, models in runs.items():
            found[key] = self.why_not_learned(reference, f"{baseline}, {name(easiest)},")
            for model, own in models.items():
                rival = None if model == baseline else models[baseline]
                found[key] = found[key] or self.why_not_flat(own, f"{model}, {name(key)},", of=reference, rival=rival)
        return found
