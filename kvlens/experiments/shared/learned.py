"""Has a model finished learning? A claim that one model is better is tested only if the baseline has.

    gain(t) = (chance - y(t)) / (chance - best)        y: held-out loss or accuracy, mean over seeds

``chance`` is the score of an untrained guess: the variance of the labels, the loss of the token frequencies, or one over the
number of answers; ``best`` is that of a perfect model. If one of two conditions fails, the verdict is "not trained far
enough" (:attr:`~kvlens.experiments.shared.outcome.Comparison.untrained`), whatever the significance test says:

- *learned*: the baseline ends with a gain of at least ``share``;
- *flat*: the second half of the steps contributed at most `LATE` of the model's own total gain. This is required of the
  baseline and of models that end behind it (a model that is ahead may still improve). Then half of the steps would have been
  nearly as good, so twice as many would hardly be better. (The last few steps alone would prove nothing, because a learning
  rate that decays to zero makes any curve flat.) A model that has learned nearly everything (`DONE`) has nothing left to gain,
  however early its training ended; and a late gain of at most ``1 - DONE`` is none, since a model that has learned next to
  nothing has only noise to divide it by.

A curve may be flat before it falls, as it is for induction. Then the baseline has not learned, and there is no verdict.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvlens.experiments.shared.curves import mean_course

LATE = 1 / 8
"""The largest share of the baseline's gain that the second half of the steps may contribute."""

DONE = 0.98
"""From this gain on, a model counts as having learned everything."""


@dataclass(frozen=True)
class Goal:
    """The scale on which learning is measured.

    Attributes:
        chance: ``y`` without having learned anything.
        best: ``y`` of a perfect model; 0 if that is unknown, as for text.
        share: the share of the distance from ``chance`` to ``best`` that counts as having learned.
        y: the column that is measured.
    """

    chance: float
    best: float = 0.0
    share: float = 0.5
    y: str = "loss"

    def gains(self, runs: pd.DataFrame) -> tuple[float, float]:
        """The gain of one model after half of the steps and at the end; means over seeds.

        Args:
            runs: held-out rows: seed, step and `y`. A run that ended early keeps its last value.
        """
        course = mean_course(runs.assign(**{self.y: runs[self.y].astype(float)}), y=self.y)
        early = course.loc[course["step"] <= course["step"].max() / 2, "mean"]
        half, end = (early.iloc[-1] if len(early) else self.chance), course["mean"].iloc[-1]
        return (self.chance - half) / (self.chance - self.best), (self.chance - end) / (self.chance - self.best)

    def why_not_learned(self, runs: pd.DataFrame, name: str) -> str | None:
        """The reason why the model has not learned enough (a gain below `share`), or None."""
        _, gain = self.gains(runs)
        if gain >= self.share:
            return None
        went = f"has learned {round(gain, 2) + 0.0:.0%} of what there is" if math.isfinite(gain) else "diverged"
        return f"{name} {went} ({self.y} {self.chance:.3g} is chance, {self.best:.3g} perfect); {self.share:.0%} is required"

    def why_not_flat(self, runs: pd.DataFrame, name: str, rival: pd.DataFrame | None = None) -> str | None:
        """The reason why the curve is not flat (the second half of the steps added more than `LATE` of its gain), or None.

        Args:
            runs: of the model whose curve is tested.
            name: of that model.
            rival: of the model that it is compared with; a model that is ahead of it need not be flat.
        """
        half, end = self.gains(runs)
        done = end >= DONE or (rival is not None and end > self.gains(rival)[1])
        if done or not math.isfinite(end) or end - half <= max(LATE * end, 1 - DONE):
            return None
        late = "all" if end <= end - half else f"{(end - half) / end:.0%}"
        return f"{name} still improves: {late} of the gain came in the second half of its steps"

    def why_untrained(self, course: pd.DataFrame, baseline: str) -> str | None:
        """The reason why the models of ``course`` cannot be compared with ``baseline`` yet, or None.

        Args:
            course: held-out rows of all that are compared: model, seed, step and `y`.
            baseline: the model that must have learned.
        """
        runs = dict(list(course.groupby("model", sort=False)))
        base = runs[baseline]
        found = self.why_not_learned(base, baseline) or self.why_not_flat(base, baseline)
        for name, own in runs.items():
            found = found or self.why_not_flat(own, str(name), rival=base)
        return found

    def why_not_limited(
        self, course: pd.DataFrame, baseline: str, by: str, easiest: Any, name: Callable[[Any], str]
    ) -> dict[Any, str | None]:
        """The same at each of several difficulties, for claims that the baseline cannot learn the harder ones.

        The baseline must have learned at the easiest difficulty. At the others, its curve must be flat, and so must that of a
        model that is behind it.

        Args:
            course: held-out rows of all that are compared: model, seed, step, ``by`` and `y`.
            baseline: the model that may be limited.
            by: the column of the difficulty.
            easiest: its value where the baseline must have learned.
            name: a difficulty in words.

        Returns:
            Difficulty -> the reason why there is no verdict, or None.
        """
        runs = {key: dict(list(rows.groupby("model"))) for key, rows in course.groupby(by)}
        reference = runs[easiest][baseline]
        found: dict[Any, str | None] = {}
        for key, models in runs.items():
            found[key] = self.why_not_learned(reference, f"{baseline}, {name(easiest)},")
            for model, own in models.items():
                rival = None if model == baseline else models[baseline]
                found[key] = found[key] or self.why_not_flat(own, f"{model}, {name(key)},", rival=rival)
        return found
