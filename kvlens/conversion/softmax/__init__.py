"""Converting a softmax model's prompt: exactly with all its keys, or approximately with a known error (ICLCA sec. 5, ICLAA)."""

from kvlens.checks import doors
from kvlens.conversion.softmax.attention_matching import AttentionMatching
from kvlens.conversion.softmax.convert import convert_softmax_prompt
from kvlens.conversion.softmax.expected_attention import ExpectedAttention
from kvlens.conversion.softmax.free_features import EluPlusOne, Learned, RandomProjections, Taylor
from kvlens.conversion.softmax.kept_keys import H2O, KeptKeys, SnapKV, StreamingLLM
from kvlens.conversion.softmax.kvzip import KVzip
from kvlens.conversion.softmax.landmark import Landmark
from kvlens.conversion.softmax.method import Approximation, ConversionMethod, Exact
from kvlens.conversion.softmax.methods import METHODS, method_of, option_names
from kvlens.conversion.softmax.settings import TextOptions
from kvlens.conversion.softmax.teacher import Teacher

__all__ = [
    "H2O",
    "METHODS",
    "Approximation",
    "AttentionMatching",
    "ConversionMethod",
    "EluPlusOne",
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
    "convert_softmax_prompt",
    "method_of",
    "option_names",
]

doors(__name__)
