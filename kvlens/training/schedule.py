"""The learning rate as a function of the progress of a run.

Progress goes from 0 to 1, measured in steps or in seconds of a time budget, whichever is further along. One formula thus serves
both, and a run that ends by its time budget has also finished its cosine.

    lr(p) = peak * p / w                                                                      p < w  (linear warm-up)
    lr(p) = peak * (f + (1 - f) (1 + cos(pi (p - w) / (1 - w))) / 2)                          p >= w, "cosine"
    lr(p) = peak                                                                              p >= w, "constant"

with w the warm-up's share of the run and f the final share of the peak. Step t of n (counted from 0) has p = (t + 1) / n, so
the first step has a positive rate, and the last has the final rate.
"""

import math
from dataclasses import dataclass

from kvlens.errors import KVLensError, nearest

SCHEDULES = ("cosine", "constant")


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of progress.

    Attributes:
        peak: the largest learning rate, positive.
        kind: ``"cosine"`` or ``"constant"``, after the warm-up.
        warmup_fraction: share of the run in which the rate rises linearly, in [0, 1).
        final_fraction: the cosine's last rate as a share of the peak, in [0, 1].

    Raises:
        KVLensError: a value is outside its range.
    """

    peak: float | int
    kind: str = "cosine"
    warmup_fraction: float | int = 0.02
    final_fraction: float | int = 0.1

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            hint = nearest(self.kind, SCHEDULES)
            raise KVLensError(f"Schedule: kind must be one of {list(SCHEDULES)}, got {self.kind!r}{hint}")
        if not (self.peak > 0 and math.isfinite(self.peak)):
            raise KVLensError(f"Schedule: peak (the learning rate) must be positive and finite, got {self.peak}")
        if not 0 <= self.warmup_fraction < 1:
            raise KVLensError(f"Schedule: warmup_fraction must be in [0, 1), got {self.warmup_fraction}")
        if not 0 <= self.final_fraction <= 1:
            raise KVLensError(f"Schedule: final_fraction must be in [0, 1], got {self.final_fraction}")

    def learning_rate(self, progress: float) -> float:
        """Return the rate at ``progress`` in [0, 1]; beyond 1 it is the final rate."""
        progress = min(progress, 1.0)
        if progress < self.warmup_fraction:
            return self.peak * progress / self.warmup_fraction
        if self.kind == "constant":
            return self.peak
        turn = (progress - self.warmup_fraction) / (1 - self.warmup_fraction)
        cosine = (1 + math.cos(math.pi * turn)) / 2
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * cosine)
