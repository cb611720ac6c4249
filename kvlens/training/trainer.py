"""Training a model on a task: AdamW, warm-up, gradient clipping and regular held-out evaluations.

What it guarantees beyond a plain loop:

- *Exact resume.* With a ``folder`` the whole run is written there, atomically; calling `train` again with the same arguments
  resumes it at the last checkpoint and ends with the same weights and metrics as an uninterrupted run (same machine, same
  number of threads).
- *Best weights.* A finished run leaves the model with the weights of its best evaluation.
- *A loss that is not finite* ends the run with an error that names the step. The model then has the weights of the last step
  whose loss and gradient were finite, and the checkpoint is from before the failure.
- *Time.* With ``max_minutes`` no step begins after that time, and the cosine has finished by then.

No random numbers are drawn here; the task draws them from a generator seeded by the run's seed and the step.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from tqdm.auto import tqdm

from kvlens.arguments import path_of
from kvlens.checks import checked, from_fields
from kvlens.errors import KVLensError
from kvlens.tasks import Task
from kvlens.tasks.task import Model
from kvlens.training.checkpoint import CheckpointFolder, check_run_folder, metrics_frame, only_run_in, run_name
from kvlens.training.run import Loss, ModelAndLoss, Row, Run, TrainSettings, loss_of, score_in_parts


@dataclass(frozen=True)
class TrainResult:
    """The record of a run. The model itself was trained in place.

    Attributes:
        metrics: one row per measurement, determined by model, task and settings alone: ``step`` (updates done), ``split``
            ("train": the batch of that update, before it; "heldout": after it), ``loss`` (mean over scored positions: nats,
            or squared error), ``accuracy`` (share of scored positions; NaN for numbers), ``tokens`` (positions seen so far),
            ``learning_rate`` (of that update; of the last one for "heldout"), ``grad_norm`` (before clipping; NaN for
            "heldout").
        watched: the parameters that ``watch`` matched, at each evaluation, the first of which is after ``eval_every`` steps:
            ``step``, ``parameter``, flat ``index``, ``value``.
        steps: updates done.
        stopped_by: "steps", "accuracy", "patience" or "time".
        best_loss, best_step: loss and step of the best evaluation.
        seconds: wall-clock time, including that before the run was resumed.
    """

    metrics: pd.DataFrame
    watched: pd.DataFrame
    steps: int
    stopped_by: str
    best_loss: float
    best_step: int
    seconds: float

    @property
    def heldout(self) -> pd.DataFrame:
        """The rows of the held-out split."""
        return self.metrics[self.metrics["split"] == "heldout"].reset_index(drop=True)


def train(
    model: Model,
    task: Task,
    *,
    loss: Loss | None = None,
    folder: str | Path | None = None,
    runs: str | Path | None = None,
    restart: bool = False,
    progress: bool = True,
    **settings: object,
) -> TrainResult:
    """Train ``model`` in place.

    Args:
        model: a :class:`kvlens.HookedKVTransformer`, or a :class:`kvlens.model.HookedKVRegressor` for regression.
        task: from :func:`kvlens.tasks.make_task`.
        loss: the loss to minimize; None takes the task's default loss.
        folder: where checkpoint and metrics go; a run found there is resumed, or returned if it is finished.
        runs: in place of ``folder``: a folder of many runs, in which this one has a folder named after its task, data, model
            and settings, so that equal runs are trained once. If another process is training it, this one waits.
        restart: start from scratch even if there is a checkpoint.
        progress: show a progress bar with loss and accuracy.
        settings: fields of :class:`kvlens.training.TrainSettings`: ``steps``, ``learning_rate``, ``batch_size`` ...

    Returns:
        The record of the run.

    Raises:
        KVLensError: model and task do not fit, a setting is out of range, the folder holds another run or cannot be written,
            another process trains in it, or (as a :class:`kvlens.training.NotFiniteError`) a loss or gradient is not finite.
    """
    chosen, loss = from_fields(TrainSettings, settings), loss_for(model, task, loss)
    chosen.check_batches(task)
    chosen.check_model(model)
    if folder is not None and runs is not None:
        raise KVLensError("train: give folder or runs, not both: a run in runs has a folder of its own there")
    folder = None if folder is None else path_of("train: folder", folder)
    was_training = model.training
    run = Run(model, task, loss, chosen)
    if runs is not None:
        folder = path_of("train: runs", runs) / run_name(run)
    if folder is not None:
        check_run_folder(folder)
    held = nullcontext() if folder is None else only_run_in(folder, wait=runs is not None)
    with held:
        store = None if folder is None else CheckpointFolder(folder, run, restart=restart)
        if store is not None:
            store.resume()
        try:
            return run_to_end(run, store, progress)
        finally:
            model.train(was_training)


@checked
@torch.no_grad()
def score_heldout(
    model: Model, task: Task, n_sequences: int, *, loss: Loss | None = None, seed: int = 0
) -> tuple[float, float]:
    """Mean loss and accuracy over the scored positions of ``n_sequences`` held-out sequences, in eval mode.

    Args:
        model, task: as for `train`.
        n_sequences: number of sequences.
        loss: None takes the task's default loss.
        seed: seed of the sequences; `train` uses that of its settings.

    Returns:
        Loss (nats, or squared error) and accuracy (NaN for numbers).
    """
    objective = ModelAndLoss(model, loss_for(model, task, loss))
    task.check_batch("n_sequences", n_sequences)
    was_training, heldout = model.training, task.heldout(n_sequences, seed)
    model.eval()
    try:
        total, correct, count = score_in_parts(objective, heldout, 32).tolist()
    finally:
        model.train(was_training)
    return total / count, correct / count


def loss_for(model: Model, task: Task, loss: Loss | None) -> Loss:
    """The loss that is asked for; None stands for the task's default.

    Raises:
        KVLensError: ``model`` cannot read the task's inputs or predict its targets.
    """
    task.check_fit(model)
    return loss or loss_of(task)


def run_to_end(run: Run, store: CheckpointFolder | None, show: bool) -> TrainResult:
    """Take steps until the run stops; its model then has the weights of the best evaluation.

    Args:
        run: what is trained.
        store: where checkpoints go.
        show: whether a progress bar is shown.
    """
    _loop(run, store, show)
    if run.best is not None:
        run.model.load_state_dict(run.best, strict=False)
    return _result(run)


def _loop(run: Run, store: CheckpointFolder | None, show: bool) -> None:
    done, settings = run.progress, run.settings
    shown: dict[str, str] = {}
    with tqdm(total=settings.steps, initial=done.step, disable=not show, unit="step") as bar:
        while done.stopped_by is None:
            row, evaluated = run.update(), None
            if row.step % settings.log_every == 0 or row.step == 1:
                done.rows.append(row)
            late = run.out_of_time()
            if row.step % settings.eval_every == 0 or row.step == settings.steps or late:
                evaluated = run.evaluate()
                done.rows.append(evaluated)
            done.stopped_by = _why_stop(run, evaluated, late)
            shown |= _words("", row) | (_words("held-out ", evaluated) if evaluated else {})
            bar.set_postfix(shown, refresh=False)
            bar.update()
            if store is not None and (done.stopped_by or _is_checkpoint(settings, row.step, evaluated)):
                store.save()


def _why_stop(run: Run, evaluated: Row | None, late: bool) -> str | None:
    settings, done = run.settings, run.progress
    if evaluated is not None and settings.stop_at_accuracy is not None and evaluated.accuracy >= settings.stop_at_accuracy:
        return "accuracy"
    if settings.patience is not None and done.since_best >= settings.patience:
        return "patience"
    if done.step >= settings.steps:
        return "steps"
    return "time" if late else None


def _is_checkpoint(settings: TrainSettings, step: int, evaluated: Row | None) -> bool:
    return evaluated is not None if settings.checkpoint_every is None else step % settings.checkpoint_every == 0


def _words(prefix: str, row: Row) -> dict[str, str]:
    words = {f"{prefix}loss": f"{row.loss:.3f}"}
    return words if row.accuracy != row.accuracy else {**words, f"{prefix}accuracy": f"{row.accuracy:.3f}"}


def _result(run: Run) -> TrainResult:
    done = run.progress
    watched = [
        pd.DataFrame({"step": step, "parameter": name, "index": range(values.numel()), "value": values.flatten().tolist()})
        for step, by_name in run.watched
        for name, values in by_name.items()
    ]
    empty = pd.DataFrame({"step": [], "parameter": [], "index": [], "value": []})
    return TrainResult(
        metrics=metrics_frame(done.rows),
        watched=pd.concat(watched, ignore_index=True) if watched else empty,
        steps=done.step,
        stopped_by=str(done.stopped_by),
        best_loss=done.best_loss,
        best_step=done.best_step,
        seconds=run.seconds,
    )
