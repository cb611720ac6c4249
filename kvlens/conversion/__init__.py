"""Converting prompts to weights: exactly for linear attention (ICLCA), exactly or compressed for softmax attention.

:mod:`kvlens.conversion.convert` has the twelve steps of a conversion, by which the package is ordered.
"""

from kvlens.conversion.convert import METHODS, convert_prompt, method_of, option_names, recall
from kvlens.conversion.distillation import DistilledWeights, distill_prompt
from kvlens.conversion.features import EluKernel, Learned, RandomProjections, TaylorPolynomial
from kvlens.conversion.few_keys import AttentionMatching, Landmark
from kvlens.conversion.kvzip import KVzip
from kvlens.conversion.linear import carry_bias
from kvlens.conversion.method import Approximation, ConversionMethod, Exact, Teacher
from kvlens.conversion.prompt import Counterfactuals, counterfactuals
from kvlens.conversion.recomputed import converted_rows, logits_after
from kvlens.conversion.reference_queries import TextOptions
from kvlens.conversion.weight_patches import (
    ThoughtPatches,
    TokenPatches,
    WeightChange,
    thought_matrices,
    thought_vectors,
    token_patches,
)

__all__ = [
    "METHODS",
    "Approximation",
    "AttentionMatching",
    "ConversionMethod",
    "Counterfactuals",
    "DistilledWeights",
    "EluKernel",
    "Exact",
    "KVzip",
    "Landmark",
    "Learned",
    "RandomProjections",
    "TaylorPolynomial",
    "Teacher",
    "TextOptions",
    "ThoughtPatches",
    "TokenPatches",
    "WeightChange",
    "carry_bias",
    "convert_prompt",
    "converted_rows",
    "counterfactuals",
    "distill_prompt",
    "logits_after",
    "method_of",
    "option_names",
    "recall",
    "thought_matrices",
    "thought_vectors",
    "token_patches",
]
