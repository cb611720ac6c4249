"""The worker, the same for every engine: it keeps its model loaded, and turns prompts into rows.

If the analysis refuses a prompt or fails on it, that is recorded as its result, and the batch continues. If a model cannot be
loaded, the batch ends.
"""

import os
import sys
import traceback
import warnings
from dataclasses import dataclass, replace

import torch

from kvlens import KVLensError, KVModel, load

from ..declaration import Analysis, Record
from .table import schema_of, to_bytes
from .work import FRONT_COLUMNS, Work, load_analysis

REFUSED, FAILED, DIED = "refused", "failed", "died"
"""Why a prompt has no rows: the analysis refused it; it raised any other error; its worker died."""


@dataclass(frozen=True)
class Job:
    """Prompts for one model, with their numbers in the input.

    Attributes:
        model: index into the work's models.
        prompts: (number, record), at least one.
        deaths: number of workers that have died while running it.
    """

    model: int
    prompts: tuple[tuple[int, Record], ...]
    deaths: int = 0


@dataclass(frozen=True)
class PromptResult:
    """The result of one prompt on one model.

    Attributes:
        model: index into the work's models.
        prompt: number of the prompt in the input.
        prompt_id: id of the prompt.
        n_rows: number of rows of its table.
        rows: its table, from :func:`kvlens.analyses.batch.table.to_bytes`; None if it failed.
        kind: :data:`REFUSED`, :data:`FAILED` or :data:`DIED` if it failed, else None.
        error: the error, in one line.
        where: file and line of the code that raised it, and of the call in the analysis' module.
        warnings: given while the prompt was run.
    """

    model: int
    prompt: int
    prompt_id: str
    n_rows: int = 0
    rows: bytes | None = None
    kind: str | None = None
    error: str | None = None
    where: str | None = None
    warnings: tuple[str, ...] = ()


def columns_of(analysis: Analysis, work: Work) -> dict[str, str]:
    """The table's columns with their dtypes: model and prompt, then those that the work keeps."""
    kept = work.columns or tuple(analysis.columns)
    return {**dict.fromkeys(FRONT_COLUMNS, "str"), **{name: analysis.columns[name].dtype for name in kept}}


class ModelShelf:
    """Keeps the last requested model loaded; a batch goes model by model, and two might not fit in memory.

    Args:
        names: what :func:`kvlens.load` takes.
        device: where they run; None takes TransformerLens' choice.
        dtype: dtype of the weights, e.g. ``float64``; None keeps the stored one.
    """

    def __init__(self, names: tuple[str, ...], *, device: str | None, dtype: str | None):
        self.names, self.device, self.dtype = names, device, dtype
        self._held: tuple[int, KVModel] | None = None

    def __getitem__(self, index: int) -> KVModel:
        if self._held is None or self._held[0] != index:
            self._held = None  # frees the old model before the new one is read
            self._held = (index, load(self.names[index], device=self.device, dtype=self.dtype))
        return self._held[1]


class Worker:
    """Runs the jobs of one batch, keeping the model of the last job loaded.

    Args:
        work: what is computed.
        threads: threads that torch may use; None does not change them.
        models: the models of ``work``, if they are loaded already.
    """

    def __init__(self, work: Work, threads: int | None = None, models: ModelShelf | None = None):
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads would compete with torch's
        if threads is not None:
            torch.set_num_threads(threads)
        self.work, self.analysis = work, load_analysis(work.analysis, work.folder)
        self.schema = schema_of(columns_of(self.analysis, work))
        self.models = models or ModelShelf(work.models, device=work.device, dtype=work.dtype)

    def ready(self) -> list[PromptResult]:
        """The first answer of a new worker, without results."""
        return []

    def run(self, job: Job) -> list[PromptResult]:
        """Run a job; return one result per prompt, in order.

        Raises:
            KVLensError: the model cannot be loaded.
        """
        model = self.models[job.model]
        return [self._warned(model, job.model, number, record) for number, record in job.prompts]

    def _warned(self, model: KVModel, index: int, number: int, record: Record) -> PromptResult:
        with warnings.catch_warnings(record=True) as caught:
            result = self._run_one(model, index, number, record)
        return replace(result, warnings=tuple(dict.fromkeys(_one_line(str(one.message)) for one in caught)))

    def _run_one(self, model: KVModel, index: int, number: int, record: Record) -> PromptResult:
        try:
            frame = self.analysis.run(model, record, **self.work.options)
            frame = frame.assign(model=self.work.models[index], prompt_id=record.id)
            rows = to_bytes(frame[self.schema.names], self.schema)
        except KVLensError as error:
            return PromptResult(
                index, number, record.id, kind=REFUSED, error=_one_line(str(error)), where=_where(error, self.analysis)
            )
        except Exception as error:  # an error on one prompt does not stop the others
            why = _one_line(f"{type(error).__name__}: {error}")
            return PromptResult(index, number, record.id, kind=FAILED, error=why, where=_where(error, self.analysis))
        return PromptResult(index, number, record.id, n_rows=len(frame), rows=rows)


def _where(error: Exception, analysis: Analysis) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own_file = getattr(sys.modules.get(analysis.function.__module__), "__file__", None)
    own = [frame for frame in frames if frame.filename == own_file][-1:]
    raised = f"{frames[-1].filename}:{frames[-1].lineno}"
    called = [f"{frame.filename}:{frame.lineno}" for frame in own if frame is not frames[-1]]
    return ", called at ".join([raised, *called])


def _one_line(text: str) -> str:
    return " ".join(text.split())
