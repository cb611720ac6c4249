"""What a batch is asked for, and the checks of it that are made before a model is loaded.

`Work`, with the code of an analysis of your own, is the part of the settings that determines every number of the table. It is
sent to each worker, and recorded but for the device and the folder: a batch can be resumed only with the same work.
`Resources` affect how long it takes, and may change when it is resumed. Nothing here needs torch, so that the command line can
check it first.
"""

import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from kvlens import KVLensError
from kvlens.arguments import path_of
from kvlens.checks import Count, Within, checked, ensure, one_of
from kvlens.errors import check_known
from kvlens.files import check_writable, reading_file

from ..registry import locate

if TYPE_CHECKING:
    from ..declaration import Analysis

ENGINES = ("processes", "ray")
DTYPE_NAMES = ("float32", "float64", "bfloat16", "float16")
MOST_PER_CORE, MOST_ACTORS = 16, 10_000
"""The most processes (or threads of one) per core, and the most actors of a cluster; more are surely a typing error."""
FRONT_COLUMNS = ("model", "prompt_id")
"""Those of every table, before the records' own fields and the columns of the analysis."""


@checked
@dataclass(frozen=True)
class Work:
    """Everything that the rows of the table depend on, except the prompts.

    Attributes:
        analysis: a name of ``kvlens.analyses.ANALYSES``, or MODULE:FUNCTION of any `Analysis` that can be imported.
        models: names of shipped models, folders, or GGUF files.
        options: options of the analysis, by name; others have their defaults.
        dtype: dtype of the weights; None keeps the stored one.
        device: where the models run; None takes TransformerLens' choice.
        folder: folder in which to look for the module of your own analysis, in addition to Python's path; on a cluster, it must
            have the same path on every machine.
    """

    analysis: str
    models: tuple[str, ...]
    options: Mapping[str, object] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    folder: str | None = None


@checked
@dataclass(frozen=True)
class Resources:
    """How the work is distributed.

    Attributes:
        engine: "processes" (one, or spawned workers, on this machine) or "ray".
        workers: number of processes or actors; with one process, the batch runs in this process.
        gpus_per_worker: for Ray; 0.25 puts four workers on a GPU.
        threads: threads of each worker; None divides torch's threads here among them. The last bits of a sum depend on it.
    """

    engine: Literal["processes", "ray"] = "processes"
    workers: Count = 1
    gpus_per_worker: Annotated[float, Within(0)] = 0.0
    threads: Count | None = None

    def __post_init__(self) -> None:
        cores = os.cpu_count() or 1
        most = {"workers": MOST_ACTORS if self.engine == "ray" else MOST_PER_CORE * cores, "threads": MOST_PER_CORE * cores}
        for name, limit in most.items():
            if (getattr(self, name) or 0) > limit:
                raise KVLensError(
                    f"{name}: at most {limit:,} (this machine has {cores} cores), got {getattr(self, name):,}; give fewer"
                )
        if self.gpus_per_worker and self.engine != "ray":
            raise KVLensError("gpus_per_worker is for the engine ray; for processes, choose the device")


def load_analysis(name: str, folder: str | None = None) -> "Analysis":
    """Import an analysis by its name, or as MODULE:FUNCTION.

    Raises:
        KVLensError: there is no such analysis (the nearest name is proposed).
    """
    path, attribute = locate(name)
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise KVLensError(
            f"analysis: there is no module {path!r} here; run the command in the folder that holds it, or install it"
        ) from error
    held = {name: found for name, value in vars(module).items() if (found := _declared(value)) is not None}
    check_known(f"analysis: in {path!r} no function with the decorator kvlens.analyses.analysis", attribute, held)
    return held[attribute]


def code_of(name: str) -> str | None:
    """The file of an analysis of your own, with a hash of its text; None for kvlens' own, whose code its version says."""
    file = getattr(sys.modules.get(locate(name)[0]), "__file__", None)
    if ":" not in name or file is None:
        return None
    return f"{Path(file).name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]}"


def _declared(value: object) -> "Analysis | None":
    """The declaration of a decorated function, or an `Analysis` itself."""
    from ..declaration import Analysis  # imports torch

    found = getattr(value, "__dict__", {}).get("analysis", value)
    return found if isinstance(found, Analysis) else None


def columns_of(analysis: "Analysis", own_fields: Mapping[str, str]) -> dict[str, str]:
    """The table's columns with their dtypes: model and prompt, the records' own fields, then those of the analysis.

    Raises:
        KVLensError: a field of the records has the name of another column.
    """
    others = {**dict.fromkeys(FRONT_COLUMNS, "str"), **analysis.columns.dtypes}
    for name in own_fields:
        if name in others:
            raise KVLensError(
                f"prompts: the field {name!r} of the records would be a column of the table, and {analysis.name} already "
                f"has one of that name; call it something else, such as {f'my_{name}'!r}"
            )
    return {**dict.fromkeys(FRONT_COLUMNS, "str"), **own_fields, **analysis.columns.dtypes}


def check_work(work: Work) -> "Analysis":
    """Check ``work`` and return its analysis.

    Raises:
        KVLensError: an unknown analysis or option, an option of another type, a model given twice, or an invalid dtype.
    """
    analysis = load_analysis(work.analysis, work.folder)
    check_known(f"{analysis.name}: no option", work.options, analysis.options)
    analysis.read_options(work.options)
    if work.dtype is not None:
        ensure("dtype", one_of(DTYPE_NAMES), work.dtype)
    for number, name in enumerate(work.models):
        if name in work.models[:number]:
            raise KVLensError(f"the model {name!r} is given twice")
    return analysis


def check_prompts(prompts: str | Path) -> Path:
    """Return the path of the prompts.

    Raises:
        KVLensError: not a path, or nothing is there.
    """
    path = path_of("prompts", prompts)
    with reading_file("prompts", path):
        path.stat()
    if not path.is_dir() and not path.is_file():
        raise KVLensError(
            f"prompts: {path} is a pipe or a device, which can be read only once; a batch reads its prompts twice, and again "
            "when it is resumed. Write them to a file first, whose name says what it is (.jsonl, .txt)"
        )
    return path


def check_table_path(out: Path) -> None:
    """Raise KVLensError unless ``out`` is a valid path of a table."""
    if out.suffix != ".parquet":
        raise KVLensError(f"out: expected a file that ends in .parquet, got {str(out)!r}")
    check_writable(out)
