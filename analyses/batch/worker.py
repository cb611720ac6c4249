"""What runs in every worker, whatever started it: it keeps its model, and turns prompts into rows.

A prompt that the analysis refuses, or that fails, is a result like any other: the batch continues. A model that cannot be
loaded is not: it ends the batch.
"""

import os
import sys
import traceback
from dataclasses import dataclass

import torch

from kvlens import HookedKVTransformer, KVLensError

from ..declaration import Analysis, Record
from .models import ModelShelf
from .table import schema_of, to_bytes
from .work import FRONT_COLUMNS, Work, load_analysis

REFUSED, FAILED, DIED = "refused", "failed", "died"
"""Why a prompt has no rows: the analysis does not take it; an error of any other kind; it took its worker's life."""


@dataclass(frozen=True)
class Job:
    """Prompts for one model, with their places in the input.

    Attributes:
        model: index into the work's models.
        prompts: (place, record), at least one.
        deaths: how many workers have died over it.
    """

    model: int
    prompts: tuple[tuple[int, Record], ...]
    deaths: int = 0


@dataclass(frozen=True)
class PromptResult:
    """What became of one prompt on one model.

    Attributes:
        model: index into the work's models.
        prompt: the prompt's place in the input.
        prompt_id: its id.
        n_rows: of its table.
        rows: its table, as :func:`kvlens.analyses.batch.table.to_bytes` gives it; None where it failed.
        kind: :data:`REFUSED`, :data:`FAILED` or :data:`DIED` where it failed, else None.
        error: why, in one line.
        where: file and line of the code that raised, and of the analysis' own module where that called it.
    """

    model: int
    prompt: int
    prompt_id: str
    n_rows: int = 0
    rows: bytes | None = None
    kind: str | None = None
    error: str | None = None
    where: str | None = None


def columns_of(analysis: Analysis, work: Work) -> dict[str, str]:
    """The table's columns with their dtypes: model and prompt in front of those that the work keeps."""
    kept = work.columns or tuple(analysis.columns)
    return {**dict.fromkeys(FRONT_COLUMNS, "str"), **{name: analysis.columns[name].dtype for name in kept}}


class Worker:
    """Runs the jobs of one batch, with the model of the last job at hand.

    Args:
        work: what is computed.
        threads: that torch may use; None leaves that as it is.
        models: the work's, where they are at hand.
    """

    def __init__(self, work: Work, threads: int | None = None, models: ModelShelf | None = None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads and torch's get in each other's way
        if threads is not None:
            torch.set_num_threads(threads)
        self.work, self.analysis = work, load_analysis(work.analysis, work.folder)
        self.schema = schema_of(columns_of(self.analysis, work))
        self.models = models or ModelShelf(work.models, device=work.device, dtype=work.dtype)

    def ready(self) -> list[PromptResult]:
        """The first answer of a new worker: no result yet."""
        return []

    def run(self, job: Job) -> list[PromptResult]:
        """One result per prompt, in order.

        Raises:
            KVLensError: the model cannot be loaded.
        """
        model = self.models[job.model]
        with model.using_softmax_form():  # fused where it can, in layers whose pattern the analysis does not look at
            return [self._run_one(model, job.model, place, record) for place, record in job.prompts]

    def _run_one(self, model: HookedKVTransformer, index: int, place: int, record: Record) -> PromptResult:
        try:
            frame = self.analysis.run(model, record, **self.work.options)
            frame = frame.assign(model=self.work.models[index], prompt_id=record.id)
            rows = to_bytes(frame[self.schema.names], self.schema)
        except KVLensError as error:
            return PromptResult(
                index, place, record.id, kind=REFUSED, error=_one_line(str(error)), where=_where(error, self.analysis)
            )
        except Exception as error:  # whatever one prompt does to an analysis, the others go on
            why = _one_line(f"{type(error).__name__}: {error}")
            return PromptResult(index, place, record.id, kind=FAILED, error=why, where=_where(error, self.analysis))
        return PromptResult(index, place, record.id, n_rows=len(frame), rows=rows)


def _where(error: Exception, analysis: Analysis) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(sys.modules.get(analysis.function.__module__), "__file__", None)
    own = [frame for frame in frames if frame.filename == own_file][-1:]
    raised = f"{frames[-1].filename}:{frames[-1].lineno}"
    called = [f"{frame.filename}:{frame.lineno}" for frame in own if frame is not frames[-1]]
    return ", called at ".join([raised, *called])


def _one_line(text: str) -> str:
    return " ".join(text.split())
