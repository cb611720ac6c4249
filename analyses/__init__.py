"""Analyses of kvlens models: each a function that returns a tidy DataFrame, built on kvlens' public names only.

Folders go by what is looked at: :mod:`~kvlens.analyses.bias` (a converted prompt), :mod:`~kvlens.analyses.heads`,
:mod:`~kvlens.analyses.stream` (the residual stream), :mod:`~kvlens.analyses.prompt` (the predictions),
:mod:`~kvlens.analyses.dual` (a head as a step of learning); :mod:`~kvlens.analyses.batch` runs any of them over many prompts,
and :mod:`~kvlens.analyses.declaration` says how to write your own. Every public name is imported from here, and loaded when it
is first used, so that importing the package, and help, are quick.

``from analyses import ...`` is short for ``from kvlens.analyses import ...``, unless something else on the path is called so.
"""

import importlib
from typing import Any

from kvlens.short_name import stand_for_long_name

if __name__ == "analyses":  # in a clone, by the folder's own name; what is imported below is then of kvlens.analyses
    stand_for_long_name(__name__)

from .registry import HOMES

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES])
