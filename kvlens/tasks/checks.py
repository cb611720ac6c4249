"""What every task checks: its settings when it is made, and a request when it is drawn from."""

from collections.abc import Iterable
from typing import Annotated

import torch
from torch import Tensor

from kvlens.checks import Within, ensure, one_of
from kvlens.errors import KVLensError, brief
from kvlens.tasks.batch import SPLITS, Task

MOST_PLACES = 2**31
"""Positions of a batch: 16 GB of token ids alone."""


def require_integers(task: Task, **least: int) -> None:
    """Refuse settings that are not integers of at least this much.

    Args:
        task: whose settings are read.
        **least: setting=smallest allowed value.

    Raises:
        KVLensError: a setting is no integer, or too small.
    """
    for setting, smallest in least.items():
        value = ensure(f"task {task.name!r}: {setting}", Annotated[int, Within(smallest)], getattr(task, setting))
        object.__setattr__(task, setting, value)  # a whole number of numpy as Python's, also where it is frozen


def require_between(task: Task, setting: str, low: float, high: float) -> None:
    """Refuse a setting that is not a number from ``low`` to ``high``, both allowed.

    Raises:
        KVLensError: the setting is no number, or outside.
    """
    ensure(f"task {task.name!r}: {setting}", Annotated[float, Within(low, high)], getattr(task, setting))


def require_choice(task: Task, setting: str, options: Iterable[str]) -> None:
    """Refuse a setting that is none of the names, and propose the nearest.

    Raises:
        KVLensError: the setting is another name.
    """
    value, options = getattr(task, setting), list(options)
    ensure(f"task {task.name!r}: {setting}", one_of(options), value)


def require_batch(task: Task, what: str, n_sequences: int) -> None:
    """Refuse a number of sequences that is none, or whose tokens no memory holds.

    Raises:
        KVLensError: as said; ``what`` is the argument's name.
    """
    ensure(f"task {task.name!r}: {what}", Annotated[int, Within(1, max(1, MOST_PLACES // task.n_positions))], n_sequences)


def require_drawable(task: Task, batch_size: int, generator: torch.Generator, split: str) -> None:
    """Refuse the arguments of `Task.sample` that cannot be served.

    Raises:
        KVLensError: an empty batch, a generator of another device, or an unknown split.
    """
    require_batch(task, "batch_size", batch_size)
    if not isinstance(generator, torch.Generator):
        raise KVLensError(f"task {task.name!r}: expected a torch.Generator, got {generator!r}; torch.Generator() makes one")
    if generator.device.type != "cpu":
        raise KVLensError(f"task {task.name!r}: batches are drawn on the CPU, but the generator is on {generator.device}")
    ensure(f"task {task.name!r}: split", one_of(SPLITS), split)


def require_ids(task: Task, tokens: Tensor) -> None:
    """Refuse tokens that are not one sequence of this task's ids.

    Raises:
        KVLensError: as said.
    """
    is_row = tokens.dim() == 1 and not (tokens.is_floating_point() or tokens.is_complex())
    if not is_row or bool(((tokens < 0) | (tokens >= task.d_input)).any()):
        raise KVLensError(
            f"task {task.name!r}: expected token ids [pos], whole numbers from 0 to {task.d_input - 1}, got {brief(tokens)}"
        )
