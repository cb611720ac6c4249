"""The dual model: attention heads of a real model as one step of gradient descent on a representation-learning loss (DUAL)."""

from kvlens.dual.model import DualModel
from kvlens.dual.reading import LayerReading, check_attention, read_layers

__all__ = ["DualModel", "LayerReading", "check_attention", "read_layers"]
