"""What is computed, and with what: the two halves of a batch's settings.

The work decides every number of the table, is sent to each worker, and is recorded: a batch is resumed with the same work or
not at all. The resources only decide how long it takes, and may change between an interruption and the resumption.
"""

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlens import KVLensError
from kvlens.arguments import check_choice, check_whole, path_of
from kvlens.errors import nearest
from kvlens.signature import hold_fields

from ..declaration import Analysis
from ..registry import locate

FRONT_COLUMNS = ("model", "prompt_id")
ENGINES = ("processes", "ray")
DTYPES = ("float32", "float64", "bfloat16", "float16")
MOST_PER_CORE, MOST_ACTORS = 16, 10_000
"""Processes (or threads of one) that a core may be given, and actors of a cluster: more are a slip of the hand."""


@dataclass(frozen=True)
class Work:
    """What every row of the table depends on, beside the prompts.

    Attributes:
        analysis: a name of ``kvlens.analyses.ANALYSES``, or MODULE:OBJECT of any `Analysis` that can be imported.
        models: names of shipped models, or folders.
        columns: those of the analysis to keep, in order; empty keeps all.
        options: of the analysis, by name; what is not given has its default.
        dtype: of the weights; None keeps the stored one.
        device: where the models run; None takes TransformerLens' choice.
        folder: where the module of an analysis of your own is looked for, beside what Python knows; on a cluster, under the
            same path on every machine.
    """

    analysis: str
    models: tuple[str, ...]
    columns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        hold_fields(self)


@dataclass(frozen=True)
class Resources:
    """How the work is shared out.

    Attributes:
        engine: "processes" (one, or spawned workers, on this machine) or "ray".
        workers: how many processes or actors; one process alone works in this one.
        gpus_per_worker: for Ray, 0.25 puts four workers on a GPU.
        threads: of each worker; None shares out those that torch has here. The last bits of a sum depend on it.
        prompts_per_job: what a worker is given, and what is recorded, at once.
    """

    engine: str = "processes"
    workers: int = 1
    gpus_per_worker: float = 0.0
    threads: int | None = None
    prompts_per_job: int = 8

    def __post_init__(self) -> None:
        hold_fields(self)
        if self.engine not in ENGINES:
            raise KVLensError(f"engine: expected {' or '.join(ENGINES)}, got {self.engine!r}{nearest(self.engine, ENGINES)}")
        cores = os.cpu_count() or 1
        for name in ("workers", "prompts_per_job") + (("threads",) if self.threads is not None else ()):
            check_whole(name, getattr(self, name), 1)
        most = {"workers": MOST_ACTORS if self.engine == "ray" else MOST_PER_CORE * cores, "threads": MOST_PER_CORE * cores}
        for name, limit in most.items():
            if (getattr(self, name) or 0) > limit:
                raise KVLensError(
                    f"{name}: at most {limit:,} ({cores} cores are here), got {getattr(self, name):,}; give fewer"
                )
        if not 0 <= self.gpus_per_worker < float("inf"):
            raise KVLensError(f"gpus_per_worker must be 0 or more, got {self.gpus_per_worker:g}")
        if self.gpus_per_worker and self.engine != "ray":
            raise KVLensError("gpus_per_worker is for the engine ray; for processes, choose the device")


def load_analysis(name: str, folder: str | None = None) -> Analysis:
    """Import an analysis by its name, or as MODULE:OBJECT.

    Raises:
        KVLensError: there is no such analysis (the nearest name is proposed).
    """
    path, attribute = locate(name)
    if folder is not None and folder not in sys.path:
        if not path_of("folder", folder).is_dir():  # in the path of Python it would stay, and be in everybody's way
            raise KVLensError(f"folder: {folder!r} is no folder; give the one that the analysis' module is in")
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise KVLensError(f"analysis: there is no module {path!r}") from error
    analysis = getattr(module, attribute, None)
    if not isinstance(analysis, Analysis):
        held = [found for found, value in vars(module).items() if isinstance(value, Analysis)]
        there = f"it holds {', '.join(held)}" if held else "it holds none"
        raise KVLensError(f"analysis: {attribute!r} of the module {path!r} is no Analysis; {there}{nearest(attribute, held)}")
    return analysis


def check_work(work: Work) -> Analysis:
    """Return the analysis of ``work``, all of whose names exist.

    Raises:
        KVLensError: an unknown analysis, column or option, an option of another type, no model or one twice, a dtype that
            weights cannot have.
    """
    analysis = load_analysis(work.analysis, work.folder)
    for column in work.columns:
        if column not in analysis.columns:
            raise KVLensError(
                f"{analysis.name} has no column {column!r}; it has {', '.join(analysis.columns)}"
                f"{nearest(column, analysis.columns)}"
            )
    for name in work.options:
        if name not in analysis.options:
            listed = f"it has {', '.join(analysis.options)}" if analysis.options else "it has none"
            raise KVLensError(f"{analysis.name} has no option {name!r}; {listed}{nearest(name, analysis.options)}")
    analysis.read_options(work.options)
    if work.dtype is not None:
        check_choice("dtype", work.dtype, DTYPES)
    for what, names in (("model", work.models), ("column", work.columns)):
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise KVLensError(f"the {what} {twice!r} is given twice")
    if not work.models:
        raise KVLensError("no model is given; name at least one")
    return analysis
