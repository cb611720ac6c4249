"""How a model is trained: every number of a run but the model and the task."""

import math
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from kvlens.checks import Count, Seed, Within, checked
from kvlens.errors import KVLensError, nearest
from kvlens.tasks import Task
from kvlens.tasks.batch import Model
from kvlens.tasks.checks import require_batch
from kvlens.training.schedule import Schedule


@checked
@dataclass(frozen=True)
class TrainSettings:
    """Settings of :func:`kvlens.training.train`; they decide, with model, task and machine, every metric of a run.

    Attributes:
        steps: number of updates, at most.
        batch_size: sequences per update, over all processes.
        learning_rate: the peak.
        schedule: "cosine" or "constant", after a linear warm-up over ``warmup_fraction`` of the run; the cosine ends at
            ``final_fraction`` of the peak.
        weight_decay: AdamW's, on parameters of `decayed_parameters` only.
        betas: AdamW's.
        max_grad_norm: the gradient's norm is scaled down to this.
        eval_every: steps between evaluations; there is one at the end, too.
        eval_sequences: held-out sequences of an evaluation, the same ones each time.
        stop_at_accuracy: end at the first evaluation that reaches this accuracy.
        patience: end after this many evaluations in a row without a lower loss.
        max_minutes: time budget, evaluations included. The schedule then follows time or steps, whichever is further, so
            that such a run depends on the machine's speed.
        log_every: steps between rows of the "train" split in the metrics.
        checkpoint_every: steps between checkpoints, where there is a folder for them; None: at every evaluation.
        watch: a piece of parameter names; those parameters are recorded at every evaluation (e.g. "shift_coef").
        precision: "float32", or "bfloat16" for the forward pass under autocast (weights stay float32).
        seed: of the batches. The model's initial weights have their own, ``cfg.seed``.

    Raises:
        KVLensError: a value is outside its range.
    """

    steps: Count = 1000
    batch_size: Count = 32
    learning_rate: float | int = 1e-3
    schedule: str = "cosine"
    warmup_fraction: float | int = 0.02
    final_fraction: float | int = 0.1
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

    def __post_init__(self) -> None:
        self.rate()

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "TrainSettings":
        """From settings by name; an unknown one is refused."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise KVLensError(f"train: unknown setting {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return cls(**settings)

    def check_batches(self, task: Task) -> None:
        """Raise KVLensError where a batch of ``task`` would fit into no memory."""
        require_batch(task, "batch_size", self.batch_size)
        require_batch(task, "eval_sequences", self.eval_sequences)

    def check_model(self, model: Model) -> None:
        """Raise KVLensError where ``watch`` names no parameter of ``model``."""
        names = [name for name, _ in model.named_parameters()]
        if self.watch is not None and not any(self.watch in name for name in names):
            raise KVLensError(
                f"train: watch must be a piece of a parameter's name, got {self.watch!r}, which is in none"
                f"{nearest(self.watch, names)}; leave it out to watch nothing"
            )

    def rate(self) -> Schedule:
        """The learning rate as a function of progress."""
        return Schedule(self.learning_rate, self.schedule, self.warmup_fraction, self.final_fraction)
