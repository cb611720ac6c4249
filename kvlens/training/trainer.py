"""Training a model whose ``model(tokens, return_type="loss")`` is its mean next-token loss: TransformerLens' convention.

The loop is the plain one: AdamW, linear warm-up and cosine (`kvlens.training.schedule`), gradient clipping, a held-out loss
every so often. Four things it promises beyond that:

- *Time.* With ``max_minutes`` no step begins after that time, evaluations included, and the cosine has finished by then; the
  last step and the last evaluation may overrun it by their own duration.
- *Best weights.* With ``evaluate`` a run that comes to its end leaves the model with the weights of its best evaluation;
  ``patience`` ends a run that no longer improves.
- *A loss that is not finite* ends the run with an error that names the step; the model then holds the weights of the last step
  whose loss and gradient were finite.
- *Weight decay only where it means something*: on matrices named ``W_...``, not on biases, norms or mixing coefficients, whose
  natural value need not be 0.

Nothing here draws random numbers; the batches do, from their own generator.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor, nn
from tqdm.auto import tqdm

from kvlens.errors import KVLensError
from kvlens.training.schedule import Schedule

METRIC_COLUMNS = ("step", "split", "loss", "tokens", "seconds", "learning_rate")
Batches = Iterable[Tensor] | Callable[[], Tensor]


@dataclass
class TrainResult:
    """What a run did. The model itself was trained in place.

    Attributes:
        metrics: one row a measurement: ``step`` (updates done), ``split`` ("train": the loss of the batch of that update,
            before it; "heldout": what ``evaluate`` returned after it), ``loss`` (nats a token), ``tokens`` (seen so far),
            ``seconds`` (since the start), ``learning_rate`` (of that update; of the last one for "heldout").
        steps: updates done.
        stopped_by: "steps", "time" or "patience".
        best_loss, best_step: of the best evaluation; NaN and the last step without ``evaluate``.
    """

    metrics: pd.DataFrame
    steps: int
    stopped_by: str
    best_loss: float
    best_step: int


@dataclass
class _Run:
    """The state of a run between two steps."""

    started: float = field(default_factory=lambda: perf_counter())
    step: int = 0
    tokens: int = 0
    learning_rate: float = 0.0
    rows: list[tuple[object, ...]] = field(default_factory=list)
    best_loss: float = math.inf
    best_step: int = 0
    best_state: dict[str, Tensor] | None = None
    evaluations_since_best: int = 0

    @property
    def seconds(self) -> float:
        return perf_counter() - self.started

    def record(self, split: str, loss: float) -> None:
        self.rows.append((self.step, split, loss, self.tokens, self.seconds, self.learning_rate))


def train(
    model: nn.Module,
    batches: Batches,
    *,
    steps: int,
    learning_rate: float,
    schedule: str = "cosine",
    warmup_fraction: float = 0.02,
    final_fraction: float = 0.1,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.99),
    max_grad_norm: float = 1.0,
    max_minutes: float | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    eval_every: int = 100,
    patience: int | None = None,
    log_every: int = 1,
    autocast: bool = False,
    progress: bool = True,
) -> TrainResult:
    """Train ``model`` in place and return the course of its losses.

    Args:
        model: ``model(tokens, return_type="loss")`` is a scalar, the mean next-token loss in nats.
        batches: a function that returns the next tokens ``[batch, pos]``, such as
            ``lambda: windows.sample(32, 256, generator)``; or an iterable of them, begun anew when it ends.
        steps: number of updates, at most.
        learning_rate: the peak.
        schedule: "cosine" or "constant" after a linear warm-up over ``warmup_fraction`` of the run; the cosine ends at
            ``final_fraction`` of the peak.
        weight_decay: AdamW's, on parameters of `decayed_parameters` only.
        betas: AdamW's.
        max_grad_norm: the gradient's norm is scaled down to this.
        max_minutes: time budget, evaluations included. The schedule then follows time or steps, whichever is further.
        evaluate: called with the model, in eval mode without gradients, every ``eval_every`` steps and at the end;
            returns a loss, such as ``lambda model: heldout_loss(model, windows)``. The best weights are put back at the end.
        patience: end after this many evaluations in a row without a new best. Needs ``evaluate``.
        log_every: the batch's loss is put into the metrics every so many steps.
        autocast: forward pass in bfloat16, weights in float32. TransformerLens then returns the loss in bfloat16 too,
            to about 3 digits: compare models by an ``evaluate`` without autocast.
        progress: whether to show a progress bar.

    Raises:
        KVLensError: an argument is out of range, the batches are empty, or a loss or gradient is not finite.
    """
    _check(evaluate, max_minutes, steps=steps, eval_every=eval_every, log_every=log_every, patience=patience)
    rate = Schedule(learning_rate, schedule, warmup_fraction, final_fraction)
    optimizer = _optimizer(model, learning_rate, weight_decay, betas)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    last_good = [parameter.detach().clone() for parameter in parameters]
    source, run = _endless(batches), _Run()
    stopped_by = "steps"
    was_training = model.training
    with tqdm(total=steps, disable=not progress, unit="step") as bar:
        try:
            while run.step < steps:
                run.learning_rate = rate.learning_rate(_progress(run, steps, max_minutes))
                loss = _update(model, next(source), optimizer, parameters, last_good, run, max_grad_norm, autocast)
                if run.step % log_every == 0 or run.step == 1:
                    run.record("train", loss)
                    bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
                bar.update()
                out_of_time = max_minutes is not None and run.seconds >= 60 * max_minutes
                if evaluate and (run.step % eval_every == 0 or run.step == steps or out_of_time):
                    _evaluate(model, evaluate, run)
                if patience is not None and run.evaluations_since_best >= patience:
                    stopped_by = "patience"
                    break
                if out_of_time and run.step < steps:
                    stopped_by = "time"
                    break
        finally:
            model.train(was_training)
    if run.best_state is not None:
        model.load_state_dict(run.best_state)
    return TrainResult(
        metrics=pd.DataFrame(run.rows, columns=list(METRIC_COLUMNS)),
        steps=run.step,
        stopped_by=stopped_by,
        best_loss=run.best_loss if run.best_state is not None else math.nan,
        best_step=run.best_step if run.best_state is not None else run.step,
    )


@torch.no_grad()
def heldout_loss(
    model: nn.Module, windows: Int[Tensor, "window pos"], *, batch_size: int = 32, autocast: bool = False
) -> float:
    """Return the mean next-token loss over ``windows``, in nats a token, in eval mode and without gradients.

    Args:
        model: as for `train`.
        windows: of one length, such as ``TokenWindows.consecutive(256)``; batches are moved to the model's device.
        batch_size: windows at a time.
        autocast: forward pass in bfloat16.

    Raises:
        KVLensError: there is no window.
    """
    if len(windows) == 0:
        raise KVLensError("heldout_loss: windows is empty")
    was_training = model.training
    model.eval()
    try:
        total = 0.0
        for batch in windows.split(batch_size):
            total += float(_loss(model, batch, autocast)) * len(batch)
    finally:
        model.train(was_training)
    return total / len(windows)


def decayed_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters that weight decay applies to: two axes or more, and ``W_`` in the name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.ndim > 1 and "W_" in name}


def _optimizer(model: nn.Module, learning_rate: float, weight_decay: float, betas: tuple[float, float]) -> torch.optim.AdamW:
    decayed = decayed_parameters(model)
    others = [p for name, p in model.named_parameters() if p.requires_grad and name not in decayed]
    groups = [
        {"params": list(decayed.values()), "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise KVLensError("train: the model has no parameter that requires a gradient")
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def _update(
    model: nn.Module,
    tokens: Tensor,
    optimizer: torch.optim.Optimizer,
    parameters: list[Tensor],
    last_good: list[Tensor],
    run: _Run,
    max_grad_norm: float,
    autocast: bool,
) -> float:
    """One step; returns the loss before it. ``last_good`` then holds the weights that this loss was measured with."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    loss = _loss(model, tokens, autocast)
    value = float(loss.detach())
    norm = math.nan
    if math.isfinite(value):
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(parameters, max_grad_norm))
    with torch.no_grad():
        if not math.isfinite(norm):
            _copy(last_good, parameters)
            what = "gradient" if math.isfinite(value) else f"loss ({value})"
            raise KVLensError(
                f"train: the {what} of step {run.step + 1} is not finite (learning rate {run.learning_rate:.3g}); the model "
                "holds the last good weights. Lower learning_rate or max_grad_norm, or lengthen warmup_fraction"
            )
        _copy(parameters, last_good)
    for group in optimizer.param_groups:
        group["lr"] = run.learning_rate
    optimizer.step()
    run.step += 1
    run.tokens += tokens.numel()
    return value


def _progress(run: _Run, steps: int, max_minutes: float | None) -> float:
    """Share of the run that is done when the coming step is: of the steps or of the time, whichever is further."""
    done = (run.step + 1) / steps
    if max_minutes is None:
        return done
    seconds_a_step = run.seconds / max(1, run.step)
    return max(done, (run.seconds + seconds_a_step) / (60 * max_minutes))


def _copy(source: list[Tensor], target: list[Tensor]) -> None:
    for ours, theirs in zip(target, source, strict=True):
        ours.copy_(theirs)


def _evaluate(model: nn.Module, evaluate: Callable[[nn.Module], float], run: _Run) -> None:
    model.eval()
    with torch.no_grad():
        loss = float(evaluate(model))
    run.record("heldout", loss)
    run.evaluations_since_best += 1
    if loss < run.best_loss:
        run.best_loss, run.best_step, run.evaluations_since_best = loss, run.step, 0
        run.best_state = {name: value.detach().clone() for name, value in model.state_dict().items()}


def _loss(model: nn.Module, tokens: Tensor, autocast: bool) -> Tensor:
    device = next(model.parameters()).device
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
        return model(tokens.to(device), return_type="loss").float()


def _endless(batches: Batches) -> Iterator[Tensor]:
    if callable(batches):
        while True:
            yield batches()
    while True:
        tokens = None
        for tokens in batches:
            yield tokens
        if tokens is None:
            raise KVLensError(
                "train: batches is empty or used up; an iterator can be read once: give a list, a DataLoader, or a function"
            )


def _check(evaluate: Callable[..., float] | None, max_minutes: float | None, **counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise KVLensError(f"train: {name} must be at least 1, got {value}")
    if max_minutes is not None and not max_minutes > 0:
        raise KVLensError(f"train: max_minutes must be positive, got {max_minutes}")
    if counts["patience"] is not None and evaluate is None:
        raise KVLensError("train: patience needs evaluate=, a function of the model that returns its held-out loss")
