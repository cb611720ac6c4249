"""The state of a training run between two steps, and its two operations: an update and an evaluation.

The batch of step t is drawn from a generator seeded by (seed, t) alone. Weights, optimizer state and t are therefore the whole
state of a run: restoring them continues exactly where it stopped, without replaying earlier steps.
"""

import hashlib
import math
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvlens.errors import KVLensError
from kvlens.tasks import Task
from kvlens.training.loss import Loss, Objective, score_in_parts
from kvlens.training.settings import TrainSettings


class NotFiniteError(KVLensError):
    """A loss or gradient of a training run is not finite."""


class Row(NamedTuple):
    """One measurement; the columns of the metrics (see :class:`kvlens.training.TrainResult`)."""

    step: int
    split: str
    loss: float
    accuracy: float
    tokens: int
    learning_rate: float
    grad_norm: float


@dataclass
class Progress:
    """The numbers of a run; tensors are in the model and the optimizer.

    Attributes:
        step: updates done.
        tokens: positions seen.
        rows: the metrics so far.
        seconds: time spent before this process resumed the run.
        best_loss, best_step: loss and step of the best evaluation.
        since_best: evaluations since then.
        stopped_by: why the run ended; None while it is running.
    """

    step: int = 0
    tokens: int = 0
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    best_loss: float = math.inf
    best_step: int = 0
    since_best: int = 0
    stopped_by: str | None = None


class Run:
    """A model in training on a task.

    Attributes:
        progress: counters and metrics.
        best: weights of the best evaluation, None before the first.
        watched: (step, values by parameter name), one entry per evaluation.
    """

    def __init__(self, model: Any, task: Task, loss: Loss, settings: TrainSettings):
        self.model, self.task, self.loss, self.settings = model, task, loss, settings
        self.progress = Progress()
        self.best: dict[str, Tensor] | None = None
        self.watched: list[tuple[int, dict[str, Tensor]]] = []
        self.optimizer = build_optimizer(model, settings)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._last_good = [p.detach().clone() for p in self._parameters]
        self._objective = Objective(model, loss, autocast=settings.precision == "bfloat16")
        self._heldout = task.heldout(settings.eval_sequences, settings.seed)
        self._started = perf_counter()
        self._rate = 0.0

    @property
    def seconds(self) -> float:
        """Time spent, including that before the run was resumed."""
        return self.progress.seconds + perf_counter() - self._started

    def update(self) -> Row:
        """Take one step; return its row, whose loss is that of the weights before the step.

        Raises:
            NotFiniteError: loss or gradient is not finite; the model then holds the weights before the last step.
        """
        done, settings = self.progress, self.settings
        batch = self.task.sample(settings.batch_size, batch_generator(settings.seed, done.step))
        count, self._rate = int(batch.scored.sum()), settings.rate(self._share_done())
        if not self.model.training:  # setting it in every module takes a twentieth of a small model's step
            self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        score = self._objective(batch)
        loss, correct = torch.stack([score.loss.detach(), score.correct.to(score.loss)]).tolist()
        norm = math.nan
        if math.isfinite(loss):
            (score.loss * (1 / count)).backward()
            norm = float(nn.utils.clip_grad_norm_(self._parameters, settings.max_grad_norm))
        self._keep_if_finite(loss, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate
        self.optimizer.step()
        done.step += 1
        done.tokens += batch.scored.numel()
        return Row(done.step, "train", loss / count, correct / count, done.tokens, self._rate, norm)

    @torch.no_grad()
    def evaluate(self) -> Row:
        """Evaluate the weights on the held-out sequences, and keep them if they are the best so far."""
        done = self.progress
        self.model.eval()
        loss, correct, count = score_in_parts(self._objective, self._heldout, self.settings.batch_size).tolist()
        row = Row(done.step, "heldout", loss / count, correct / count, done.tokens, self._rate, math.nan)
        done.since_best += 1
        if row.loss < done.best_loss:
            done.best_loss, done.best_step, done.since_best = row.loss, done.step, 0
            self.best = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        if self.settings.watch is not None:
            watched = ((name, p) for name, p in self.model.named_parameters() if self.settings.watch in name)
            self.watched.append((done.step, {name: p.detach().float().cpu().clone() for name, p in watched}))
        return row

    @torch.no_grad()
    def keep_weights(self) -> None:
        """Record the current weights as the last good ones."""
        torch._foreach_copy_(self._last_good, self._parameters)

    def out_of_time(self) -> bool:
        """Whether the time budget is spent."""
        return self.settings.max_minutes is not None and self.seconds >= 60 * self.settings.max_minutes

    def _share_done(self) -> float:
        """Progress after the coming step: the share of the steps or of the time, whichever is larger."""
        done = (self.progress.step + 1) / self.settings.steps
        if self.settings.max_minutes is None:
            return done
        return max(done, self.seconds * (1 + 1 / max(1, self.progress.step)) / (60 * self.settings.max_minutes))

    @torch.no_grad()
    def _keep_if_finite(self, loss: float, norm: float) -> None:
        if math.isfinite(norm):
            self.keep_weights()
            return
        for kept, parameter in zip(self._last_good, self._parameters, strict=True):
            parameter.copy_(kept)
        what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
        raise NotFiniteError(
            f"train: the {what} of step {self.progress.step + 1} is not finite (learning rate {self._rate:.3g}); the model "
            "holds the last good weights, and the checkpoint, if there is one, is unchanged. Lower learning_rate or "
            "max_grad_norm, or lengthen warmup_fraction"
        )


def batch_generator(seed: int, step: int) -> torch.Generator:
    """The generator of the batch of one step; torch's CPU generator uses 32 bits of a seed, so the two numbers are hashed."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def decayed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters that weight decay applies to: two axes or more, and ``W_`` or ``weight`` in the name.

    Biases, norms and mixing coefficients, the filters of a short convolution among them, do not decay, since 0 is not their
    natural value.
    """
    named = ((name, p) for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1)
    return {name: p for name, p in named if "W_" in name or (name.endswith("weight") and not name.endswith("conv1d.weight"))}


def build_optimizer(model: nn.Module, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with weight decay on `decayed_parameters` only."""
    decayed = decayed_parameters(model)
    others = [p for name, p in model.named_parameters() if p.requires_grad and name not in decayed]
    groups: list[dict[str, Any]] = [
        {"params": list(decayed.values()), "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=True)
