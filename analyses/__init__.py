"""Analyses of kvlens models: each a function that returns a tidy DataFrame, built on kvlens' public names only.

Beside its function, a module that the batch scripts can run holds ``ANALYSIS`` and is named in :data:`ANALYSES`. Everything is
imported when it is first used, so that ``python -m analyses.NAME`` finds its module not yet loaded, and help is quick.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from analyses.bias_ablation import bias_ablation
    from analyses.bias_by_head import bias_by_head, bias_by_layer
    from analyses.conversion_error import conversion_error
    from analyses.prompt_effect import prompt_effect

ANALYSES = ("bias_by_head", "conversion_error", "prompt_effect")
"""The modules that ``kvlens analyse NAME`` and ``python -m analyses.NAME`` run over many prompts."""

_HOMES = {
    "bias_ablation": "analyses.bias_ablation",
    "bias_by_head": "analyses.bias_by_head",
    "bias_by_layer": "analyses.bias_by_head",
    "conversion_error": "analyses.conversion_error",
    "prompt_effect": "analyses.prompt_effect",
}

__all__ = ["ANALYSES", "bias_ablation", "bias_by_head", "bias_by_layer", "conversion_error", "prompt_effect"]


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
