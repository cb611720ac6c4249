"""The papers' figures, tables and theorems as commands: a folder for each paper, a module for each experiment.

Every such module has a function of its own name, declared by `experiment`; shared code (curves, seeds, sweeps, results on disk)
is in :mod:`kvlens.experiments.shared`. ``kvlens reproduce NAME`` runs one; ``find_experiment(NAME).run(settings, tell)`` does
the same from Python.
"""

import importlib

from kvlens.checks import checked
from kvlens.errors import KVLensError, nearest
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome, write_outcome

EXPERIMENTS = {
    "induction-depth": "kvsa",
    "induction-width": "kvsa",
    "induction-exact": "kvsa",
    "landscape": "kvsa",
    "ngram": "kvsa",
    "hops": "kvsa",
    "arithmetic": "kvsa",
    "variants": "kvsa",
    "learning-rate": "kvsa",
    "scaling": "kvsa",
    "coefficients": "kvsa",
    "conversion-accuracy": "iclca",
    "conversion-error": "iclca",
    "trainable-bias": "iclca",
    "facts-recall": "iclca",
    "softmax-conversion": "iclca",
    "compaction": "iclca",
    "gpt2-text": "iclca",
    "weights-to-prompt": "iclca",
    "function-classes": "lecture",
    "dual-equivalence": "dual",
    "dual-variants": "dual",
    "random-features": "dual",
    "dual-layer": "dual",
    "gradient-descent": "dual",
    "dual-heads": "dual",
}
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
