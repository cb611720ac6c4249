"""Analyses of kvlens models: functions that return a tidy DataFrame, built only on kvlens' public names.

Folders are organized by subject: :mod:`~kvlens.analyses.attribution` (which unit of a prompt made the model say it),
:mod:`~kvlens.analyses.bias` (a converted prompt), :mod:`~kvlens.analyses.heads`; files are
:mod:`~kvlens.analyses.logit_attribution` (the residual stream), :mod:`~kvlens.analyses.readings` (the predictions),
:mod:`~kvlens.analyses.dual` (a head as a step of learning) and :mod:`~kvlens.analyses.state` (what recurrent layers keep).
:mod:`~kvlens.analyses.batch` runs any of them over many prompts, and :mod:`~kvlens.analyses.declaration` explains how to write
your own. Every public name can be imported from here, and is loaded on first use, so that importing the package and showing
help are quick.

This file and the folder ``analyses`` are one package, ``kvlens.analyses``: in a clone the folder with its modules lies beside
``kvlens``, in a wheel it is ``kvlens/analyses``. In neither is there a package ``analyses``: a user's own file or folder of
that name is found instead.
"""

import importlib
import sys
from pathlib import Path
from typing import Any

from kvlens.errors import KVLensError

if __name__ == "__main__":  # python -m kvlens.analyses
    from kvlens.analyses.batch.script import main

    sys.exit(main())

FOLDERS = (Path(__file__).resolve().with_suffix(""), Path(__file__).resolve().parents[1] / "analyses")
"""Where the modules lie in a wheel, and in a clone."""

__path__ = [str(folder) for folder in FOLDERS if (folder / "registry.py").is_file()]
if not __path__:
    raise KVLensError(
        f"kvlens.analyses: {FOLDERS[1]} is missing, or not the folder that belongs to kvlens; take the whole clone"
    )

HOMES = importlib.import_module("kvlens.analyses.registry").HOMES
__all__ = list(HOMES)


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *HOMES])
