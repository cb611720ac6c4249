"""How a model is scored on a batch: the loss as an object, so that a run can use another one.

    tokens:   loss = mean over scored positions of -log p(target)         accuracy = share whose largest logit is the target
    numbers:  loss = mean over scored positions of (prediction - target)^2            accuracy is NaN

`loss_of` returns a task's default loss, by what the task predicts. To use your own loss, subclass `Loss` and pass it to
``train(..., loss=...)``.
"""

import math
from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kvlens.model import HookedKVTransformer
from kvlens.tasks import Batch, Task
from kvlens.tasks.batch import Model


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

    def identity(self) -> dict[str, Any] | None:
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
        """Of logits [scored, d_vocab] and the target tokens."""
        logits = in_float(logits)
        right = (logits.detach().argmax(dim=-1) == wanted).sum()
        return Score(F.cross_entropy(logits, wanted, reduction="sum"), right, len(wanted))

    def identity(self) -> None:
        """None: the default loss of tasks that predict tokens."""


class SquaredError(Loss):
    """Of predicted numbers."""

    def score(self, model: Any, batch: Batch) -> Score:
        """Score the numbers at the scored positions."""
        batch = what_is_read(model, batch)
        predicted, wanted = in_float(model(batch.inputs)[batch.scored]), batch.targets[batch.scored]
        loss = F.mse_loss(predicted, wanted.to(predicted.dtype), reduction="sum")
        return Score(loss, torch.tensor(math.nan, device=loss.device), len(wanted))

    def identity(self) -> None:
        """None: the default loss of tasks that predict numbers."""


LOSSES: dict[str, Loss] = {"tokens": CrossEntropy(), "numbers": SquaredError()}
"""The default losses, by what a task predicts."""


def loss_of(task: Task) -> Loss:
    """The default loss of ``task``."""
    return LOSSES[task.predicts]


def loss_for(model: Model, task: Task, loss: Any) -> Loss:
    """The loss that is asked for; None stands for the task's default.

    Raises:
        KVLensError: ``model`` cannot read the task's inputs or predict its targets.
    """
    task.check_fit(model)
    return loss or loss_of(task)


def logits_at(model: HookedKVTransformer, inputs: Tensor, scored: Tensor) -> Float[Tensor, "scored d_vocab"]:
    """The model's logits at the positions where ``scored`` [batch pos] is True."""
    n_layers = model.cfg.n_layers
    resid = model(inputs, stop_at_layer=n_layers)[scored]
    return model(resid[None], start_at_layer=n_layers)[0]


def what_is_read(model: Any, batch: Batch) -> Batch:
    """``batch`` up to its last scored position: in a causal model, nothing behind it can change the loss."""
    scored = batch.scored.any(dim=0).nonzero()
    if model.cfg.attention_dir != "causal" or not len(scored):
        return batch
    return Batch(*(part[:, : int(scored[-1]) + 1] for part in batch))


def in_float(predicted: Tensor) -> Tensor:
    """Convert to float32 or better, in which losses are summed whatever the dtype of the forward pass."""
    return predicted.to(torch.promote_types(predicted.dtype, torch.float32))


class Objective(nn.Module):
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


def score_in_parts(objective: Objective, batch: Batch, batch_size: int) -> Float[Tensor, "3"]:
    """Summed loss, number of correct predictions and number of scored positions of ``batch``, summed in float64.

    ``batch_size`` sequences are processed at a time.
    """
    parts = zip(*(part.split(batch_size) for part in batch), strict=True)
    scores = [objective(Batch(*part)) for part in parts]
    sums = [torch.stack([s.loss.double(), s.correct.double(), s.loss.new_tensor(s.n_scored).double()]) for s in scores]
    return torch.stack(sums).sum(dim=0)
