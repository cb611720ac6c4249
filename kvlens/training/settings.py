"""How a model is trained: every number of a run but the model and the task."""

import math
from dataclasses import dataclass, fields
from typing import Any

from kvlens.errors import KVLensError, nearest
from kvlens.tasks import Task
from kvlens.tasks.batch import Model
from kvlens.tasks.checks import require_batch
from kvlens.training.schedule import Schedule

PRECISIONS = ("float32", "bfloat16")


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

    steps: int = 1000
    batch_size: int = 32
    learning_rate: float | int = 1e-3
    schedule: str = "cosine"
    warmup_fraction: float | int = 0.02
    final_fraction: float | int = 0.1
    weight_decay: float | int = 0.01
    betas: tuple[float | int, float | int] = (0.9, 0.99)
    max_grad_norm: float | int = 1.0
    eval_every: int = 100
    eval_sequences: int = 128
    stop_at_accuracy: float | int | None = None
    patience: int | None = None
    max_minutes: float | int | None = None
    log_every: int = 1
    checkpoint_every: int | None = None
    watch: str | None = None
    precision: str = "float32"
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name), str(field.type))
        for name in ("steps", "batch_size", "eval_every", "eval_sequences", "log_every", "patience", "checkpoint_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise KVLensError(f"train: {name} must be an integer of at least 1, got {value!r}")
        for name in ("max_minutes", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise KVLensError(f"train: {name} must be positive, got {value}")
        if not 0 <= self.seed < 2**63:
            raise KVLensError(f"train: seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.stop_at_accuracy is not None and not 0 < self.stop_at_accuracy <= 1:
            raise KVLensError(f"train: stop_at_accuracy must be in (0, 1], got {self.stop_at_accuracy}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise KVLensError(f"train: weight_decay must be finite and at least 0, got {self.weight_decay}")
        if len(self.betas) != 2 or not all(isinstance(b, int | float) and 0 <= b < 1 for b in self.betas):
            raise KVLensError(f"train: betas must be two numbers in [0, 1), got {self.betas}")
        if self.precision not in PRECISIONS:
            hint = nearest(self.precision, PRECISIONS)
            raise KVLensError(f"train: precision must be one of {', '.join(PRECISIONS)}, got {self.precision!r}{hint}")
        self.rate()

    @classmethod
    def of(cls, settings: dict[str, Any]) -> "TrainSettings":
        """From settings by name; an unknown one is refused."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise KVLensError(f"train: unknown setting {name!r}{nearest(name, known)}; there are {', '.join(known)}")
        return cls(**{**settings, **({"betas": tuple(settings["betas"])} if isinstance(settings.get("betas"), list) else {})})

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


KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "tuple": (tuple, list)}


def _check_type(name: str, value: object, annotation: str) -> None:
    """Refuse what is not of the kind that the field's annotation names first."""
    kind = annotation.removeprefix("<class '").split("'")[0].split("[")[0].split(" ")[0]
    if value is None and "None" in annotation:
        return
    if not isinstance(value, KINDS[kind]) or isinstance(value, bool):
        least = " of at least 1" if kind == "int" and name != "seed" else ""
        words = {"int": f"an integer{least}", "float": "a number", "str": "text", "tuple": "two numbers"}[kind]
        raise KVLensError(f"train: {name} must be {words}, got {value!r}")
