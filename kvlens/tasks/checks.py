"""Checks shared by all tasks: of the settings when a task is made, and of the arguments when a batch is drawn."""

from typing import Annotated

import torch
from torch import Tensor

from kvlens.checks import Within, ensure, one_of
from kvlens.errors import KVLensError, brief
from kvlens.tasks.batch import SPLITS, Task

MOST_PLACES = 2**31
"""The most positions of a batch: 16 GB of token ids alone."""


def require_batch(task: Task, what: str, n_sequences: int) -> None:
    """Refuse a number of sequences that is not a positive integer, or whose tokens would not fit into memory.

    Raises:
        KVLensError: the number is invalid; the message calls the argument ``what``.
    """
    ensure(f"task {task.name!r}: {what}", Annotated[int, Within(1, max(1, MOST_PLACES // task.n_positions))], n_sequences)


def require_drawable(task: Task, batch_size: int, generator: torch.Generator, split: str) -> None:
    """Refuse invalid arguments of `Task.sample`.

    Raises:
        KVLensError: an empty batch, no generator, or an unknown split.
    """
    require_batch(task, "batch_size", batch_size)
    ensure(f"task {task.name!r}: generator", torch.Generator, generator)
    ensure(f"task {task.name!r}: split", one_of(SPLITS), split)


def require_ids(task: Task, tokens: Tensor) -> None:
    """Refuse tokens that are not one sequence of this task's ids.

    Raises:
        KVLensError: the tokens have another shape or type, or are out of range.
    """
    is_row = tokens.dim() == 1 and not (tokens.is_floating_point() or tokens.is_complex())
    if not is_row or bool(((tokens < 0) | (tokens >= task.d_input)).any()):
        raise KVLensError(
            f"task {task.name!r}: expected token ids [pos], whole numbers from 0 to {task.d_input - 1}, got {brief(tokens)}"
        )
