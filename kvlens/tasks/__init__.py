"""Tasks: seeded, streaming sequences with the positions at which a prediction is scored.

``make_task("induction", vocab_size=512, length=128)`` returns a `Task`; `Task.sample` draws batches from a generator.
"""

from kvlens.checks import checked
from kvlens.errors import KVLensError, nearest
from kvlens.tasks.arithmetic import ArithmeticTask
from kvlens.tasks.batch import SPLITS, Batch, Task
from kvlens.tasks.bigrams import BigramTask
from kvlens.tasks.facts import FactsTask
from kvlens.tasks.functions import FUNCTION_CLASSES
from kvlens.tasks.hops import HopsTask
from kvlens.tasks.induction import InductionTask
from kvlens.tasks.ngrams import NgramTask
from kvlens.tasks.regression import RegressionTask
from kvlens.tasks.text import TextTask

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (InductionTask, BigramTask, NgramTask, HopsTask, ArithmeticTask, RegressionTask, FactsTask, TextTask)
}

__all__ = [
    "FUNCTION_CLASSES",
    "SPLITS",
    "TASKS",
    "ArithmeticTask",
    "Batch",
    "BigramTask",
    "FactsTask",
    "HopsTask",
    "InductionTask",
    "NgramTask",
    "RegressionTask",
    "Task",
    "TextTask",
    "make_task",
    "task_names",
]


def task_names() -> list[str]:
    """Return the names that `make_task` accepts."""
    return list(TASKS)


@checked
def make_task(name: str, **settings: object) -> Task:
    """Make a task by name.

    >>> import torch
    >>> task = make_task("induction", vocab_size=64, length=12)
    >>> batch = task.sample(2, torch.Generator().manual_seed(0))
    >>> batch.inputs.shape, task.n_positions
    (torch.Size([2, 12]), 12)

    Args:
        name: one of `task_names`.
        **settings: fields of the task's class; the others keep their defaults.

    Raises:
        KVLensError: there is no task of this name, it has no such setting, or a setting has a bad value.
    """
    if name not in TASKS:
        raise KVLensError(f"unknown task {name!r}{nearest(name, TASKS)}; there are {', '.join(TASKS)}")
    return TASKS[name].from_settings(settings)
