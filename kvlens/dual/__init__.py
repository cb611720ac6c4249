"""The dual model: attention heads of a real model as one step of gradient descent on a representation-learning loss (DUAL)."""

from kvlens.dual.figures import DemonstrationFigures, QueryFigures, demonstration_figures, dual_figures
from kvlens.dual.head_inputs import LayerReading, check_attention, read_layers
from kvlens.dual.layer import DualLayer
from kvlens.dual.model import DualModel

__all__ = [
    "DemonstrationFigures",
    "DualLayer",
    "DualModel",
    "LayerReading",
    "QueryFigures",
    "check_attention",
    "demonstration_figures",
    "dual_figures",
    "read_layers",
]
