"""How random things are drawn that several tasks need."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.tasks.batch import Batch, Task

MAX_TRIES = 100


def draw_distinct(n: int, batch_size: int, n_draws: int, generator: torch.Generator) -> Int[Tensor, "{batch_size} {n_draws}"]:
    """Return rows of distinct numbers below ``n`` in random order, a draw without replacement in each row.

    The places of the largest of n independent numbers, from the largest down, are such a draw.
    """
    return torch.rand(batch_size, n, generator=generator).topk(n_draws, dim=1).indices


def draw_until_scored(task: Task, draw: Callable[[], Batch]) -> Batch:
    """Draw a batch again while it scores nothing: a mean over its scored positions must exist.

    Args:
        task: named in the message.
        draw: draws one batch; successive calls use the same generator.

    Raises:
        KVLensError: many batches in a row score nothing, so the settings leave next to nothing to predict.
    """
    for _ in range(MAX_TRIES):
        batch = draw()
        if bool(batch.scored.any()):
            return batch
    raise KVLensError(
        f"task {task.name!r}: {MAX_TRIES} batches in a row held no position to score; with {task.settings()} sequences are too "
        "short for what is to be predicted: make them longer, or the batch larger"
    )
