"""A prompt as a change of the weights themselves, for comparison with a KV bias: patches of the MLPs, and distillation."""

from kvlens.conversion.weights.change import WeightChange
from kvlens.conversion.weights.distillation import Distillation, DistilledWeights, distill_prompt
from kvlens.conversion.weights.thought_patches import ThoughtPatches, thought_matrices, thought_vectors
from kvlens.conversion.weights.token_patches import TokenPatches, token_patches

__all__ = [
    "Distillation",
    "DistilledWeights",
    "ThoughtPatches",
    "TokenPatches",
    "WeightChange",
    "distill_prompt",
    "thought_matrices",
    "thought_vectors",
    "token_patches",
]
