"""The settings of a training run, except model and task, and the learning rate as a function of its progress.

Progress p goes from 0 to 1, measured in steps or in seconds of a time budget, whichever is further along. One formula thus
serves both, and a run that ends by its time budget has also finished its cosine.

    lr(p) = peak * p / w                                                                      p < w  (linear warm-up)
    lr(p) = peak * (f + (1 - f) (1 + cos(pi (p - w) / (1 - w))) / 2)                          p >= w, "cosine"
    lr(p) = peak                                                                              p >= w, "constant"

with w the warm-up's share of the run and f the final share of the peak. Step t of n (counted from 0) has p = (t + 1) / n, so
the first step has a positive rate, and the last has the final rate.
"""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from torch import nn

from kvlens.checks import Count, Seed, Within, checked
from kvlens.errors import KVLensError, nearest
from kvlens.tasks import Task
from kvlens.tasks.checks import require_batch


@checked
@dataclass(frozen=True)
class TrainSettings:
    """Settings of :func:`kvlens.training.train`. With model, task and machine they determine every metric of a run.

    Attributes:
        steps: the maximum number of updates.
        batch_size: sequences per update, over all processes.
        learning_rate: the peak learning rate.
        schedule: "cosine" or "constant", after a linear warm-up over ``warmup_fraction`` of the run; the cosine ends at
            ``final_fraction`` of the peak.
        weight_decay: weight decay of AdamW, applied to `decayed_parameters` only.
        betas: betas of AdamW.
        max_grad_norm: gradients with a larger norm are scaled down to this norm.
        eval_every: steps between evaluations; there is always one at the end.
        eval_sequences: held-out sequences per evaluation, the same ones each time.
        stop_at_accuracy: stop at the first evaluation that reaches this accuracy.
        patience: stop after this many consecutive evaluations without a lower loss.
        max_minutes: time budget, evaluations included. The schedule then follows time or steps, whichever is further along, so
            such a run depends on the machine's speed.
        log_every: steps between rows of the "train" split in the metrics.
        checkpoint_every: steps between checkpoints, if the run has a folder; None writes one at every evaluation.
        watch: part of a parameter name; matching parameters are recorded at every evaluation (e.g. "shift_coef").
        precision: "float32", or "bfloat16" for the forward pass under autocast (weights stay float32).
        seed: seed of the batches. The seed of the initial weights is ``cfg.seed``.

    Raises:
        KVLensError: a value is outside its range.
    """

    steps: Count = 1000
    batch_size: Count = 32
    learning_rate: Annotated[float | int, Within(above=0)] = 1e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_fraction: Annotated[float | int, Within(0, below=1)] = 0.02
    final_fraction: Annotated[float | int, Within(0, 1)] = 0.1
    weight_decay: Annotated[float | int, Within(0)] = 0.01
    betas: tuple[Annotated[float | int, Within(0, below=1)], Annotated[float | int, Within(0, below=1)]] = (0.9, 0.99)
    max_grad_norm: Annotated[float | int, Within(above=0, most=math.inf)] = 1.0
    eval_every: Count = 100
    eval_sequences: Count = 128
    stop_at_accuracy: Annotated[float | int, Within(above=0, most=1)] | None = None
    patience: Count | None = None
    max_minutes: Annotated[float | int, Within(above=0, most=math.inf)] | None = None
    log_every: Count = 1
    checkpoint_every: Count | None = None
    watch: str | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    seed: Seed = 0

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "TrainSettings":
        """Make settings from values by name; unknown names are refused."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise KVLensError(f"train: unknown setting {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return cls(**settings)

    def check_batches(self, task: Task) -> None:
        """Raise KVLensError if a batch of ``task`` would not fit into memory."""
        require_batch(task, "batch_size", self.batch_size)
        require_batch(task, "eval_sequences", self.eval_sequences)

    def check_model(self, model: nn.Module) -> None:
        """Raise KVLensError if ``watch`` matches no parameter of ``model``."""
        names = [name for name, _ in model.named_parameters()]
        if self.watch is not None and not any(self.watch in name for name in names):
            raise KVLensError(
                f"train: watch must be part of a parameter's name, got {self.watch!r}, which matches none"
                f"{nearest(self.watch, names)}; leave it out to watch nothing"
            )

    def rate(self, progress: float) -> float:
        """The learning rate at ``progress`` in [0, 1]; beyond 1 it is the final rate."""
        progress, warmup, final = min(progress, 1.0), self.warmup_fraction, self.final_fraction
        if progress < warmup:
            return self.learning_rate * progress / warmup
        if self.schedule == "constant":
            return self.learning_rate
        cosine = (1 + math.cos(math.pi * ((progress - warmup) / (1 - warmup)))) / 2
        return self.learning_rate * (final + (1 - final) * cosine)
