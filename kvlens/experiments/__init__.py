"""The papers' figures, tables and theorems as commands: a folder for each paper, a module for each experiment.

Every such module has a function of its own name, declared by `experiment`; shared code (curves, seeds, sweeps, results on disk)
is in :mod:`kvlens.experiments.shared`. ``kvlens reproduce NAME`` runs one; ``find_experiment(NAME).run(settings, tell)`` does
the same from Python.
"""

import importlib

from kvlens.checks import checked
from kvlens.errors import KVLensError, nearest
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome, write_outcome

_OF_PAPER = {
    "kvsa": (
        "induction-depth induction-width induction-exact landscape ngram hops arithmetic variants learning-rate scaling "
        "coefficients"
    ),
    "iclca": (
        "conversion-accuracy conversion-error trainable-bias facts-recall softmax-conversion compaction gpt2-text "
        "weights-to-prompt"
    ),
    "lecture": "function-classes",
    "dual": "dual-equivalence dual-variants random-features dual-layer gradient-descent dual-heads",
}
EXPERIMENTS = {name: paper for paper, of_paper in _OF_PAPER.items() for name in of_paper.split()}
"""Name -> the folder of the module of that name (with underscores), in the order of the papers."""

__all__ = [
    "EXPERIMENTS",
    "Comparison",
    "Experiment",
    "Outcome",
    "all_experiments",
    "find_experiment",
    "write_outcome",
]


@checked
def find_experiment(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        KVLensError: no such experiment; the nearest name is proposed.
    """
    if name not in EXPERIMENTS:
        raise KVLensError(f"no experiment is called {name!r}{nearest(name, EXPERIMENTS)}; there are {', '.join(EXPERIMENTS)}")
    module = name.replace("-", "_")
    return getattr(importlib.import_module(f"kvlens.experiments.{EXPERIMENTS[name]}.{module}"), module)


def all_experiments() -> list[Experiment]:
    """Every experiment, in the order of `EXPERIMENTS`."""
    return [find_experiment(name) for name in EXPERIMENTS]
