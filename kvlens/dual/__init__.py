"""The dual model: attention heads of a real model as one step of gradient descent on a representation-learning loss (DUAL)."""

from kvlens.dual.demonstrations import DemonstrationFigures, demonstration_figures
from kvlens.dual.model import DualModel
from kvlens.dual.queries import QueryFigures, dual_figures
from kvlens.dual.reading import LayerReading, check_attention, read_layers

__all__ = [
    "DemonstrationFigures",
    "DualModel",
    "LayerReading",
    "QueryFigures",
    "check_attention",
    "demonstration_figures",
    "dual_figures",
    "read_layers",
]
