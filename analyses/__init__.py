"""Analyses of kvlens models: functions that return a tidy DataFrame, built only on kvlens' public names.

Folders are organized by subject: :mod:`~kvlens.analyses.bias` (a converted prompt), :mod:`~kvlens.analyses.heads`,
:mod:`~kvlens.analyses.stream` (the residual stream), :mod:`~kvlens.analyses.prompt` (the predictions),
:mod:`~kvlens.analyses.dual` (a head as a step of learning); :mod:`~kvlens.analyses.batch` runs any of them over many prompts,
and :mod:`~kvlens.analyses.declaration` explains how to write your own. Every public name can be imported from here, and is
loaded on first use, so that importing the package and showing help are quick.

``from analyses import ...`` is short for ``from kvlens.analyses import ...``, unless the path has another ``analyses``.
"""

import importlib
from typing import Any

from kvlens.short_name import stand_for_long_name

if __name__ == "analyses":  # imported by the folder's name in a clone; the imports below then refer to kvlens.analyses
    stand_for_long_name(__name__)

from .registry import HOMES

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES])
