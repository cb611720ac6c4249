"""The work of a batch: the part of its settings that determines every number of the table.

It is sent to each worker, and recorded: a batch can be resumed only with the same work. The other settings are in
:mod:`kvlens.analyses.batch.resources`.
"""

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlens import KVLensError
from kvlens.arguments import path_of
from kvlens.checks import checked, ensure, one_of
from kvlens.errors import nearest

from ..declaration import Analysis
from ..registry import locate
from .arguments import check_columns
from .resources import DTYPES, Resources

FRONT_COLUMNS = ("model", "prompt_id")
__all__ = ["FRONT_COLUMNS", "Resources", "Work", "check_work", "load_analysis"]


@checked
@dataclass(frozen=True)
class Work:
    """Everything that the rows of the table depend on, except the prompts.

    Attributes:
        analysis: a name of ``kvlens.analyses.ANALYSES``, or MODULE:FUNCTION of any `Analysis` that can be imported.
        models: names of shipped models, or folders.
        columns: columns of the analysis to keep, in order; empty keeps all.
        options: options of the analysis, by name; others have their defaults.
        dtype: dtype of the weights; None keeps the stored one.
        device: where the models run; None takes TransformerLens' choice.
        folder: folder in which to look for the module of your own analysis, in addition to Python's path; on a cluster, it must
            have the same path on every machine.
    """

    analysis: str
    models: tuple[str, ...]
    columns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str | None = None
    folder: str | None = None


def load_analysis(name: str, folder: str | None = None) -> Analysis:
    """Import an analysis by its name, or as MODULE:FUNCTION.

    Raises:
        KVLensError: there is no such analysis (the nearest name is proposed).
    """
    path, attribute = locate(name)
    if folder is not None and folder not in sys.path:
        if not path_of("folder", folder).is_dir():  # it would remain in Python's path
            raise KVLensError(f"folder: {folder!r} is not a folder; give the one with the module of the analysis")
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise
        raise KVLensError(f"analysis: there is no module {path!r}") from error
    analysis = _declared(getattr(module, attribute, None))
    if analysis is None:
        held = [found for found, value in vars(module).items() if _declared(value) is not None]
        there = f"it has {', '.join(held)}" if held else "it has none"
        what = f"{attribute!r} of {path!r} is no function with the decorator kvlens.analyses.analysis"
        raise KVLensError(f"analysis: {what}; {there}{nearest(attribute, held)}")
    return analysis


def _declared(value: Any) -> Analysis | None:
    """The declaration of a decorated function, or an `Analysis` itself."""
    found = getattr(value, "__dict__", {}).get("analysis", value)
    return found if isinstance(found, Analysis) else None


def check_work(work: Work) -> Analysis:
    """Check ``work`` and return its analysis.

    Raises:
        KVLensError: an unknown analysis, column or option, an option of another type, no model, a model given twice, or an
            invalid dtype.
    """
    analysis = load_analysis(work.analysis, work.folder)
    check_columns(analysis.name, work.columns, tuple(analysis.columns))
    for name in work.options:
        if name not in analysis.options:
            listed = f"it has {', '.join(analysis.options)}" if analysis.options else "it has none"
            raise KVLensError(f"{analysis.name} has no option {name!r}; {listed}{nearest(name, analysis.options)}")
    analysis.read_options(work.options)
    if work.dtype is not None:
        ensure("dtype", one_of(DTYPES), work.dtype)
    for what, names in (("model", work.models), ("column", work.columns)):
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise KVLensError(f"the {what} {twice!r} is given twice")
    if not work.models:
        raise KVLensError("no model is given; name at least one")
    return analysis
