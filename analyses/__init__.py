"""Analyses of kvlens models: each a function that returns a tidy DataFrame, built on kvlens' public names only.

Beside its function, a module that the batch scripts can run holds ``ANALYSIS`` and is named in :data:`ANALYSES`. Everything is
imported when it is first used, so that ``python -m analyses.NAME`` finds its module not yet loaded, and help is quick.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analyses.activation_patching import activation_patching
    from analyses.bias_ablation import bias_ablation
    from analyses.bias_by_head import bias_by_head, bias_by_layer
    from analyses.bias_decomposition import bias_decomposition
    from analyses.bias_effects import bias_effects
    from analyses.bias_positions import bias_positions
    from analyses.bias_singular_values import bias_singular_values
    from analyses.circuits import bias_addition, bias_overwriting, bias_similarity, circuits
    from analyses.composition import composition
    from analyses.conversion_error import conversion_error
    from analyses.induction_heads import induction_heads
    from analyses.layer_contributions import layer_contributions
    from analyses.prompt_effect import prompt_effect

ANALYSES = (
    "activation_patching",
    "bias_by_head",
    "bias_decomposition",
    "bias_effects",
    "bias_positions",
    "bias_singular_values",
    "circuits",
    "composition",
    "conversion_error",
    "induction_heads",
    "layer_contributions",
    "prompt_effect",
)
"""The modules that ``kvlens analyse NAME`` and ``python -m analyses.NAME`` run over many prompts."""

_HOMES = {
    "activation_patching": "analyses.activation_patching",
    "bias_ablation": "analyses.bias_ablation",
    "bias_addition": "analyses.circuits",
    "bias_by_head": "analyses.bias_by_head",
    "bias_by_layer": "analyses.bias_by_head",
    "bias_decomposition": "analyses.bias_decomposition",
    "bias_effects": "analyses.bias_effects",
    "bias_overwriting": "analyses.circuits",
    "bias_positions": "analyses.bias_positions",
    "bias_similarity": "analyses.circuits",
    "bias_singular_values": "analyses.bias_singular_values",
    "circuits": "analyses.circuits",
    "composition": "analyses.composition",
    "conversion_error": "analyses.conversion_error",
    "induction_heads": "analyses.induction_heads",
    "layer_contributions": "analyses.layer_contributions",
    "prompt_effect": "analyses.prompt_effect",
}

__all__ = [
    "ANALYSES",
    "activation_patching",
    "bias_ablation",
    "bias_addition",
    "bias_by_head",
    "bias_by_layer",
    "bias_decomposition",
    "bias_effects",
    "bias_overwriting",
    "bias_positions",
    "bias_similarity",
    "bias_singular_values",
    "circuits",
    "composition",
    "conversion_error",
    "induction_heads",
    "layer_contributions",
    "prompt_effect",
]


class _Package(ModuleType):
    """Keeps ``analyses.NAME`` the function where module and function share the name.

    Python binds a sub-module to its package when it is first imported, and would put it in the function's place.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'analyses' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
