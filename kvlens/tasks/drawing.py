"""Random draws that several tasks share, and the look-up of the previous occurrence, which all tasks like induction need."""

from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.tasks.batch import Batch, Task

MAX_TRIES = 100


def draw_distinct(n: int, batch_size: int, n_draws: int, generator: torch.Generator) -> Int[Tensor, "{batch_size} {n_draws}"]:
    """Return rows of distinct numbers below ``n`` in random order, a draw without replacement in each row.

    The indices of the largest of n independent numbers, in descending order, are such a draw.
    """
    return torch.rand(batch_size, n, generator=generator).topk(n_draws, dim=1).indices


def draw_until_scored(task: Task, draw: Callable[[], Batch]) -> Batch:
    """Draw batches until one has a scored position, so that the mean over scored positions exists.

    Args:
        task: named in the message.
        draw: draws one batch; successive calls use the same generator.

    Raises:
        KVLensError: many batches in a row have no scored position, so these settings leave almost nothing to predict.
    """
    for _ in range(MAX_TRIES):
        batch = draw()
        if bool(batch.scored.any()):
            return batch
    raise KVLensError(
        f"task {task.name!r}: {MAX_TRIES} batches in a row held no position to score; with {task.settings()} sequences are too "
        "short for what is to be predicted: make them longer, or the batch larger"
    )


def previous_occurrence(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Return for each position the last earlier position with the same token, or -1.

    A stable sort puts equal tokens next to each other in the order of their positions, so the left neighbor is the previous
    occurrence: O(length log(length)) work, and no length x length table.

    Args:
        tokens: token ids, of any range.
    """
    order = tokens.argsort(dim=1, stable=True)
    in_order = tokens.gather(1, order)
    repeats = in_order[:, 1:] == in_order[:, :-1]
    return torch.full_like(tokens, -1).scatter_(1, order[:, 1:], torch.where(repeats, order[:, :-1], -1))
