"""What every task checks: its settings when it is made, and a request when it is drawn from."""

from collections.abc import Iterable

import torch

from kvlens.errors import KVLensError, nearest
from kvlens.tasks.batch import SPLITS, Task


def require_integers(task: Task, **least: int) -> None:
    """Refuse settings that are not integers of at least this much.

    Args:
        task: whose settings are read.
        **least: setting=smallest allowed value.

    Raises:
        KVLensError: a setting is no integer, or too small.
    """
    for setting, smallest in least.items():
        value = getattr(task, setting)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise KVLensError(f"task {task.name!r}: {setting} must be an integer of at least {smallest}, got {value!r}")


def require_between(task: Task, setting: str, low: float, high: float) -> None:
    """Refuse a setting that is not a number from ``low`` to ``high``, both allowed.

    Raises:
        KVLensError: the setting is no number, or outside.
    """
    value = getattr(task, setting)
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise KVLensError(f"task {task.name!r}: {setting} must be a number from {low} to {high}, got {value!r}")


def require_choice(task: Task, setting: str, options: Iterable[str]) -> None:
    """Refuse a setting that is none of the names, and propose the nearest.

    Raises:
        KVLensError: the setting is another name.
    """
    value, options = getattr(task, setting), list(options)
    if value not in options:
        raise KVLensError(
            f"task {task.name!r}: {setting} must be one of {', '.join(options)}, got {value!r}{nearest(value, options)}"
        )


def require_drawable(task: Task, batch_size: int, generator: torch.Generator, split: str) -> None:
    """Refuse the arguments of `Task.sample` that cannot be served.

    Raises:
        KVLensError: an empty batch, a generator of another device, or an unknown split.
    """
    if batch_size < 1:
        raise KVLensError(f"task {task.name!r}: batch_size must be at least 1, got {batch_size}")
    if generator.device.type != "cpu":
        raise KVLensError(f"task {task.name!r}: batches are drawn on the CPU, but the generator is on {generator.device}")
    if split not in SPLITS:
        raise KVLensError(
            f"task {task.name!r}: split must be one of {', '.join(SPLITS)}, got {split!r}{nearest(split, SPLITS)}"
        )
