"""What a task asks of a model: the loss and the accuracy at the scored positions, and the check that the two fit.

    tokens:   loss = mean over scored positions of -log p(target)         accuracy = share whose largest logit is the target
    numbers:  loss = mean over scored positions of (prediction - target)^2            accuracy is NaN

Only scored positions are unembedded: with a vocabulary of 8,000 and one scored position in two, that halves the largest
product.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kvlens.errors import KVLensError
from kvlens.model import HookedKVRegressor, HookedKVTransformer
from kvlens.tasks import Batch, Task

Model = HookedKVTransformer | HookedKVRegressor


class Score(NamedTuple):
    """Sums over the scored positions of a batch, so that scores of several batches add up.

    Attributes:
        loss: summed, scalar tensor (with a gradient where one is taken).
        correct: how many were right; NaN for numbers.
        n_scored: how many were scored.
    """

    loss: Tensor
    correct: Tensor
    n_scored: int


class Objective(nn.Module):
    """A model and how it is judged, as one module, so that data parallelism sees one forward pass.

    Args:
        model: a :class:`HookedKVTransformer` for tasks that predict tokens, a :class:`HookedKVRegressor` for numbers.
        autocast: run the forward pass in bfloat16; weights, loss and optimiser stay in the weights' own dtype.
    """

    def __init__(self, model: Model, *, autocast: bool = False):
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, batch: Batch) -> Score:
        """Judge the model on one batch, wherever its parameters are."""
        device = next(self.model.parameters()).device
        inputs, targets, scored = (part.to(device, non_blocking=True) for part in batch)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.autocast):
            predicted = scored_predictions(self.model, inputs, scored)
        predicted = predicted.to(torch.promote_types(predicted.dtype, torch.float32))
        wanted, n_scored = targets[scored], int(batch.scored.sum())
        if isinstance(self.model, HookedKVRegressor):
            loss = F.mse_loss(predicted, wanted.to(predicted.dtype), reduction="sum")
            return Score(loss, torch.tensor(math.nan, device=device), n_scored)
        loss = F.cross_entropy(predicted, wanted, reduction="sum")
        return Score(loss, (predicted.detach().argmax(dim=-1) == wanted).sum(), n_scored)


def score_in_parts(objective: Objective, batch: Batch, batch_size: int) -> Float[Tensor, "3"]:
    """Summed loss, right predictions and scored positions of ``batch``, ``batch_size`` sequences at a time, in float64."""
    parts = zip(*(part.split(batch_size) for part in batch), strict=True)
    scores = [objective(Batch(*part)) for part in parts]
    sums = [torch.stack([s.loss.double(), s.correct.double(), s.loss.new_tensor(s.n_scored).double()]) for s in scores]
    return torch.stack(sums).sum(dim=0)


def scored_predictions(model: Model, inputs: Tensor, scored: Tensor) -> Tensor:
    """The model's logits [scored d_vocab], or numbers [scored], at the positions where ``scored`` [batch pos] is True."""
    if isinstance(model, HookedKVRegressor):
        return model(inputs)[scored]
    resid = model(inputs, stop_at_layer=model.cfg.n_layers)[scored][None]
    if model.cfg.normalization_type is not None:
        resid = model.ln_final(resid)
    return model.unembed(resid)[0]


def check_fit(model: Model, task: Task) -> None:
    """Raise KVLensError unless ``model`` can read the inputs of ``task`` and predict its targets."""
    if not isinstance(model, HookedKVTransformer | HookedKVRegressor):
        raise KVLensError(f"train: expected a HookedKVTransformer or a HookedKVRegressor, got {type(model).__name__}")
    if not isinstance(task, Task):
        raise KVLensError(f"train: expected a task of kvlens.tasks, got {type(task).__name__}; make_task(name) makes one")
    reads_numbers = isinstance(model, HookedKVRegressor)
    if reads_numbers != (task.predicts == "numbers"):
        wanted = "HookedKVRegressor" if task.predicts == "numbers" else "HookedKVTransformer"
        raise KVLensError(f"train: task {task.name!r} predicts {task.predicts}, which needs a {wanted}")
    cfg, has = model.cfg, model.d_input if reads_numbers else model.cfg.d_vocab
    if (has != task.d_input) if reads_numbers else (has < task.d_input):
        what = "numbers a position (d_input)" if reads_numbers else "token ids (d_vocab)"
        raise KVLensError(f"train: task {task.name!r} uses {task.d_input} {what}, the model has {has}; make them fit")
    if cfg.has_position_limit and cfg.n_ctx < task.n_positions:
        raise KVLensError(
            f"train: sequences of task {task.name!r} have {task.n_positions} positions, the model's end at n_ctx={cfg.n_ctx}; "
            "build it with a larger n_ctx, or shorten the task"
        )
