"""Analyses of kvlens models: functions that return a tidy DataFrame, built only on kvlens' public names.

Folders are organized by subject: :mod:`~kvlens.analyses.attribution` (which unit of a prompt made the model say it),
:mod:`~kvlens.analyses.bias` (a converted prompt), :mod:`~kvlens.analyses.circuits` (what reads what) and
:mod:`~kvlens.analyses.heads`; files are :mod:`~kvlens.analyses.logit_attribution` (the residual stream),
:mod:`~kvlens.analyses.readings` (the predictions),
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

_HOMES = importlib.import_module("kvlens.analyses.registry").ANALYSES | {
    "ANALYSES": "kvlens.analyses.registry",
    "ANSWER": "kvlens.analyses.declaration",
    "Analysis": "kvlens.analyses.declaration",
    "AttentionUnderBias": "kvlens.analyses.heads.rows",
    "AtSizes": "kvlens.analyses.circuits.circuit",
    "Circuit": "kvlens.analyses.circuits.circuit",
    "Columns": "kvlens.analyses.declaration",
    "Field": "kvlens.analyses.declaration",
    "HeadDetails": "kvlens.analyses.heads.rows",
    "LinkedShares": "kvlens.analyses.bias.positions",
    "Option": "kvlens.analyses.declaration",
    "PROMPT": "kvlens.analyses.declaration",
    "RIVAL": "kvlens.analyses.declaration",
    "Record": "kvlens.analyses.declaration",
    "TEXT": "kvlens.analyses.declaration",
    "analysis": "kvlens.analyses.declaration",
    "attention_under_bias": "kvlens.analyses.heads.rows",
    "baseline_ablation": "kvlens.analyses.bias.effects",
    "bias_ablation": "kvlens.analyses.bias.effects",
    "bias_by_layer": "kvlens.analyses.bias.decomposition",
    "faithfulness": "kvlens.analyses.circuits.mib",
    "head_details": "kvlens.analyses.heads.rows",
    "linked_shares": "kvlens.analyses.bias.positions",
    "next_token_texts": "kvlens.texts",
    "token_texts": "kvlens.texts",
    "tokens_field": "kvlens.analyses.declaration",
}
"""Public name of the package -> the module that holds it."""
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
