"""Converting prompts to weights: exactly for linear attention (ICLCA), exactly or compressed for softmax attention."""

from kvlens.conversion.carry import carry_bias
from kvlens.conversion.convert import convert_prompt
from kvlens.conversion.counterfactual import Counterfactuals, counterfactuals
from kvlens.conversion.recomputed import logits_after
from kvlens.conversion.softmax import (
    H2O,
    METHODS,
    Approximation,
    AttentionMatching,
    ConversionMethod,
    Exact,
    ExpectedAttention,
    KeptKeys,
    KVzip,
    Landmark,
    Learned,
    RandomProjections,
    SnapKV,
    StreamingLLM,
    Taylor,
    Teacher,
    TextOptions,
    method_of,
    option_names,
)

__all__ = [
    "H2O",
    "METHODS",
    "Approximation",
    "AttentionMatching",
    "ConversionMethod",
    "Counterfactuals",
    "Exact",
    "ExpectedAttention",
    "KVzip",
    "KeptKeys",
    "Landmark",
    "Learned",
    "RandomProjections",
    "SnapKV",
    "StreamingLLM",
    "Taylor",
    "Teacher",
    "TextOptions",
    "carry_bias",
    "convert_prompt",
    "counterfactuals",
    "logits_after",
    "method_of",
    "option_names",
]
