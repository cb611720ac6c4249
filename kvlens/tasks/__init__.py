"""Tasks: seeded, streaming sequences with the positions at which a prediction is scored.

``make_task("induction", vocab_size=512, length=128)`` returns a `Task`; `Task.sample` draws batches from a generator.

**A task.** A task is a frozen dataclass whose fields are its settings, each checked against its type (`Annotated[int,
Within(1)]` for a range). A batch depends only on the generator, so training can be resumed at any step.

```python
from dataclasses import dataclass
from typing import ClassVar

import torch

from kvlens.tasks import Batch, Task


@dataclass(frozen=True)
class ReverseTask(Task):
    '''Say a random word backwards: a b c | c b a.

    Attributes:
        vocab_size: number of letters; one more token id is the bar.
        length: letters per word.
    '''

    name: ClassVar[str] = "reverse"

    vocab_size: int = 16
    length: int = 5

    @property
    def n_positions(self) -> int:
        return 2 * self.length

    @property
    def d_input(self) -> int:
        return self.vocab_size + 1

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)
        word = torch.randint(self.vocab_size, (batch_size, self.length), generator=generator)
        bar = torch.full((batch_size, 1), self.vocab_size)
        text = torch.cat([word, bar, word.flip(1)], dim=1)
        scored = torch.zeros(batch_size, self.n_positions, dtype=torch.bool)
        scored[:, self.length :] = True
        return Batch(text[:, :-1], text[:, 1:], scored)

    @property
    def chance(self) -> float:
        return 1 / self.vocab_size  # the bar is never an answer
```

It can be trained as it is; a line in `kvlens/tasks/__init__.py` adds it to the command line as `kvlens train reverse`, whose
help names the tasks (`kvlens/cli/settings.py`). A row of `SMALL_TASKS` in `tests/tasks/task_checks.py` adds it to the tests of
every task; its own checks that the targets are right. `chance` is the accuracy of guessing, which figures and experiments show
beside the score.

```python
from kvlens.training import build_model, train

task = ReverseTask(length=3)
batch = task.heldout(2)
assert torch.equal(batch.targets[batch.scored].view(2, 3), batch.inputs[:, :3].flip(1))
result = train(build_model(task, {"n_layers": 1, "d_model": 32}), task, steps=3, eval_every=3, progress=False)
assert result.heldout["loss"].notna().all()
```
"""

from kvlens.checks import checked, from_fields
from kvlens.errors import check_known
from kvlens.tasks.arithmetic import ArithmeticTask
from kvlens.tasks.facts import FactsTask
from kvlens.tasks.induction import HopsTask, InductionTask
from kvlens.tasks.ngrams import BigramTask, NgramTask
from kvlens.tasks.regression import FUNCTION_CLASSES, RegressionTask
from kvlens.tasks.task import SPLITS, Batch, Task
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
    check_known("no task", name, TASKS)
    return from_fields(TASKS[name], settings)
