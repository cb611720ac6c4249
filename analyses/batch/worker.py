"""What runs in every worker, whatever started it: it keeps its model, and turns prompts into rows.

A prompt that the analysis refuses, or that fails, is an outcome like any other: the rest goes on. A model that cannot be
loaded is not: it ends the batch.
"""

import os
from dataclasses import dataclass

import torch

from analyses.batch.models import ModelShelf
from analyses.batch.table import schema_of, to_bytes
from analyses.batch.task import FRONT_COLUMNS, Task, load_analysis
from analyses.declaration import Analysis, Record
from kvlens import HookedKVTransformer, KVLensError

REFUSED, FAILED, DIED = "refused", "failed", "died"
"""Why a prompt has no rows: the analysis does not take it; an error of any other kind; it took its worker's life."""


@dataclass(frozen=True)
class Job:
    """Prompts for one model, with their places in the input.

    Attributes:
        model: index into the task's models.
        prompts: (place, record), at least one.
        deaths: how many workers have died over it.
    """

    model: int
    prompts: tuple[tuple[int, Record], ...]
    deaths: int = 0


@dataclass(frozen=True)
class Outcome:
    """What became of one prompt on one model.

    Attributes:
        model: index into the task's models.
        prompt: the prompt's place in the input.
        prompt_id: its id.
        n_rows: of its table.
        rows: its table, as :func:`analyses.batch.table.to_bytes` gives it; None where it failed.
        kind: :data:`REFUSED`, :data:`FAILED` or :data:`DIED` where it failed, else None.
        error: why, in one line.
    """

    model: int
    prompt: int
    prompt_id: str
    n_rows: int = 0
    rows: bytes | None = None
    kind: str | None = None
    error: str | None = None


def columns_of(analysis: Analysis, task: Task) -> dict[str, str]:
    """The table's columns with their dtypes: model and prompt in front of those that the task keeps."""
    kept = task.columns or tuple(analysis.columns)
    return {**dict.fromkeys(FRONT_COLUMNS, "str"), **{name: analysis.columns[name].dtype for name in kept}}


class Worker:
    """Runs jobs of one task, with the model of the last job at hand.

    Args:
        task: what is computed.
        threads: that torch may use; None leaves that as it is.
        models: the task's, where they are at hand.
    """

    def __init__(self, task: Task, threads: int | None = None, models: ModelShelf | None = None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and torch's get in each other's way
        if threads is not None:
            torch.set_num_threads(threads)
        self.task, self.analysis = task, load_analysis(task.analysis, task.folder)
        self.schema = schema_of(columns_of(self.analysis, task))
        self.models = models or ModelShelf(task.models, device=task.device, dtype=task.dtype)

    def ready(self) -> list[Outcome]:
        """The first answer of a new worker: no outcome yet."""
        return []

    def run(self, job: Job) -> list[Outcome]:
        """One outcome a prompt, in order.

        Raises:
            KVLensError: the model cannot be loaded.
        """
        model = self.models[job.model]
        with model.softmax_form():  # fused where it can, in layers whose pattern the analysis does not look at
            return [self._run_one(model, job.model, place, record) for place, record in job.prompts]

    def _run_one(self, model: HookedKVTransformer, index: int, place: int, record: Record) -> Outcome:
        try:
            frame = self.analysis.run(model, record, **self.task.options)
            frame = frame.assign(model=self.task.models[index], prompt_id=record.id)
            rows = to_bytes(frame[self.schema.names], self.schema)
        except KVLensError as error:
            return Outcome(index, place, record.id, kind=REFUSED, error=_one_line(str(error)))
        except Exception as error:  # whatever one prompt does to an analysis, the others go on
            return Outcome(index, place, record.id, kind=FAILED, error=_one_line(f"{type(error).__name__}: {error}"))
        return Outcome(index, place, record.id, n_rows=len(frame), rows=rows)


def _one_line(text: str) -> str:
    return " ".join(text.split())
