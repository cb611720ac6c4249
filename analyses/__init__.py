"""Analyses of kvlens models: each a function that returns a tidy DataFrame, built on kvlens' public names only.

Folders go by what is looked at: :mod:`~analyses.bias` (a converted prompt), :mod:`~analyses.heads`, :mod:`~analyses.stream`
(the residual stream), :mod:`~analyses.prompt` (the predictions), :mod:`~analyses.dual` (a head as a step of learning);
:mod:`~analyses.batch` runs any of them over many prompts, and :mod:`~analyses.declaration` says how to write your own. Every
public name is imported from here, and loaded when it is first used, so that importing the package, and help, are quick.
"""

import importlib
from typing import Any

from analyses.registry import HOMES

__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'analyses' has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES])
