"""The papers' figures, tables and theorems as commands: one module an experiment, each with an `EXPERIMENT`.

``kvlens reproduce NAME`` runs one; ``find_experiment(NAME).run(settings, tell)`` does the same from Python.
"""

import importlib

from kvlens.errors import KVLensError, nearest
from kvlens.experiments.outcome import Comparison, Experiment, Outcome, write_outcome

EXPERIMENTS = (
    "induction-depth",
    "induction-width",
    "induction-exact",
    "landscape",
    "ngram",
    "hops",
    "arithmetic",
    "variants",
    "learning-rate",
    "scaling",
    "coefficients",
    "conversion-accuracy",
    "conversion-error",
    "trainable-bias",
    "function-classes",
)
"""Names, in the order of the papers; each is the module of that name with underscores."""

__all__ = ["EXPERIMENTS", "Comparison", "Experiment", "Outcome", "all_experiments", "find_experiment", "write_outcome"]


def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        KVLensError: there is none; the nearest name is proposed.
    """
    if name not in EXPERIMENTS:
        raise KVLensError(f"no experiment is called {name!r}{nearest(name, EXPERIMENTS)}; there are {', '.join(EXPERIMENTS)}")
    return importlib.import_module(f"kvlens.experiments.{name.replace('-', '_')}").EXPERIMENT


def all_experiments() -> list[Experiment]:
    """Every experiment, in the order of `EXPERIMENTS`."""
    return [find_experiment(name) for name in EXPERIMENTS]
