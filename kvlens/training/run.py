"""A training run: its settings, its loss, its state between two steps, and its two operations: an update and an evaluation.

The batch of step t is drawn from a generator seeded by (seed, t) alone. Weights, optimizer state and t are therefore the whole
state of a run: restoring them continues exactly where it stopped, without replaying earlier steps.

**The learning rate** is a function of progress p, from 0 to 1, measured in steps or in seconds of a time budget, whichever is
further along. One formula thus serves both, and a run that ends by its time budget has also finished its cosine.

    lr(p) = peak * p / w                                                                      p < w  (linear warm-up)
    lr(p) = peak * (f + (1 - f) (1 + cos(pi (p - w) / (1 - w))) / 2)                          p >= w, "cosine"
    lr(p) = peak                                                                              p >= w, "constant"

with w the warm-up's share of the run and f the final share of the peak. Step t of n (counted from 0) has p = (t + 1) / n, so
the first step has a positive rate, and the last has the final rate.

**The loss** is an object, so that a run can use another one.

    tokens:   loss = mean over scored positions of -log p(target)         accuracy = share whose largest logit is the target
    numbers:  loss = mean over scored positions of (prediction - target)^2            accuracy is NaN

`loss_of` returns a task's default loss, by what the task predicts. To use your own loss, subclass `Loss` and pass it to
``train(..., loss=...)``.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kvlens.checks import Count, Seed, Within, checked
from kvlens.errors import KVLensError, nearest
from kvlens.model import HookedKVTransformer
from kvlens.tasks import Batch, Task
from kvlens.tasks.task import Model


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

    def check_batches(self, task: Task) -> None:
        """Raise KVLensError if a batch of ``task`` would not fit into memory."""
        task.check_batch("batch_size", self.batch_size)
        task.check_batch("eval_sequences", self.eval_sequences)

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


class Score(NamedTuple):
    """Sums over the scored positions of a batch, so that scores of several batches add up.

    Attributes:
        loss: summed loss, a scalar tensor (with a gradient if gradients are enabled).
        correct: number of correct predictions; NaN if predictions are not right or wrong.
        n_scored: number of scored positions.
    """

    loss: Tensor
    correct: Tensor
    n_scored: int


class Loss(ABC):
    """The quantity that a training run minimizes."""

    @abstractmethod
    def score(self, model: Any, batch: Batch) -> Score:
        """Score ``model`` on one batch, which is on the model's device; the forward pass may run under autocast."""

    def identity(self) -> dict[str, object] | None:
        """JSON values that distinguish a run with this loss from others; None for the task's default loss."""
        return {"name": type(self).__name__}


class CrossEntropy(Loss):
    """Cross-entropy of the target tokens, in nats.

    Only scored positions are unembedded: with a vocabulary of 8,000 and one scored position in two, that halves the largest
    product. Positions behind the batch's last scored one are not read (`what_is_read`).
    """

    def score(self, model: HookedKVTransformer, batch: Batch) -> Score:
        """Score the logits at the scored positions."""
        batch = what_is_read(model, batch)
        return self.of(logits_at(model, batch.inputs, batch.scored), batch.targets[batch.scored])

    @staticmethod
    def of(logits: Tensor, wanted: Tensor) -> Score:
        """Score logits [scored, d_vocab] by the target tokens."""
        logits = in_float(logits)
        right = (logits.detach().argmax(dim=-1) == wanted).sum()
        return Score(F.cross_entropy(logits, wanted, reduction="sum"), right, len(wanted))

    def identity(self) -> None:
        """None: the default loss of tasks that predict tokens."""


class SquaredError(Loss):
    """The squared error of predicted numbers."""

    def score(self, model: Model, batch: Batch) -> Score:
        """Score the numbers at the scored positions."""
        batch = what_is_read(model, batch)
        predicted, wanted = in_float(model(batch.inputs)[batch.scored]), batch.targets[batch.scored]
        loss = F.mse_loss(predicted, wanted.to(predicted.dtype), reduction="sum")
        return Score(loss, torch.tensor(math.nan, device=loss.device), len(wanted))

    def identity(self) -> None:
        """None: the default loss of tasks that predict numbers."""


def loss_of(task: Task) -> Loss:
    """The default loss of ``task``, by what it predicts."""
    return CrossEntropy() if task.predicts == "tokens" else SquaredError()


def logits_at(model: HookedKVTransformer, inputs: Tensor, scored: Tensor) -> Float[Tensor, "scored d_vocab"]:
    """The model's logits at the positions where ``scored`` [batch pos] is True."""
    n_layers = model.cfg.n_layers
    resid = model(inputs, stop_at_layer=n_layers)[scored]
    return model(resid[None], start_at_layer=n_layers)[0]


def what_is_read(model: Model, batch: Batch) -> Batch:
    """``batch`` up to its last scored position: in a causal model, nothing behind it can change the loss."""
    scored = batch.scored.any(dim=0).nonzero()
    if model.cfg.attention_dir != "causal" or not len(scored):
        return batch
    return Batch(*(part[:, : int(scored[-1]) + 1] for part in batch))


def in_float(predicted: Tensor) -> Tensor:
    """Convert to float32 or better, in which losses are summed whatever the dtype of the forward pass."""
    return predicted.to(torch.promote_types(predicted.dtype, torch.float32))


class ModelAndLoss(nn.Module):
    """A model and its loss as one module, so that data parallelism sees one forward pass.

    Args:
        model: the model in training.
        loss: the loss that scores it.
        autocast: run the forward pass in bfloat16; weights and optimizer stay in the weights' own dtype.
    """

    def __init__(self, model: nn.Module, loss: Loss, *, autocast: bool = False):
        super().__init__()
        self.model = model
        self.loss = loss
        self.autocast = autocast

    def forward(self, batch: Batch) -> Score:
        """Score the model on one batch, wherever its parameters are."""
        device = next(self.model.parameters()).device
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast):
            return self.loss.score(self.model, Batch(*(part.to(device, non_blocking=True) for part in batch)))


def score_in_parts(objective: ModelAndLoss, batch: Batch, batch_size: int) -> Float[Tensor, "3"]:
    """Summed loss, number of correct predictions and number of scored positions of ``batch``, summed in float64.

    ``batch_size`` sequences are processed at a time.
    """
    parts = zip(*(part.split(batch_size) for part in batch), strict=True)
    scores = [objective(Batch(*part)) for part in parts]
    sums = [torch.stack([s.loss.double(), s.correct.double(), s.loss.new_tensor(s.n_scored).double()]) for s in scores]
    return torch.stack(sums).sum(dim=0)


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

    def __init__(self, model: Model, task: Task, loss: Loss, settings: TrainSettings):
        self.model, self.task, self.loss, self.settings = model, task, loss, settings
        self.progress = Progress()
        self.best: dict[str, Tensor] | None = None
        self.watched: list[tuple[int, dict[str, Tensor]]] = []
        self.optimizer = build_optimizer(model, settings)
        self._parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self._last_good = [p.detach().clone() for p in self._parameters]
        self._objective = ModelAndLoss(model, loss, autocast=settings.precision == "bfloat16")
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
    groups = [(list(decayed.values()), settings.weight_decay), (others, 0.0)]
    return torch.optim.AdamW(
        [dict(params=params, weight_decay=decay) for params, decay in groups if params],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True,
    )
