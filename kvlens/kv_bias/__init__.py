"""A prompt as weights: :class:`KVBias`, its arithmetic, its file format, and the fingerprint of the model it fits."""

from kvlens.kv_bias.answers import AnswerErrors
from kvlens.kv_bias.features import (
    EluFeatures,
    LearnedFeatures,
    RandomFeatures,
    SoftmaxFeatures,
    TaylorFeatures,
    VirtualKeys,
)
from kvlens.kv_bias.fingerprint import Fingerprint
from kvlens.kv_bias.fit import BiasFit
from kvlens.kv_bias.kv_bias import KVBias
from kvlens.kv_bias.recall import Recall
from kvlens.kv_bias.recurrent import NO_STATES, RecurrentStates
from kvlens.kv_bias.validation import LAST_POSITION

combine = KVBias.combine

__all__ = [
    "LAST_POSITION",
    "NO_STATES",
    "AnswerErrors",
    "BiasFit",
    "EluFeatures",
    "Fingerprint",
    "KVBias",
    "LearnedFeatures",
    "RandomFeatures",
    "Recall",
    "RecurrentStates",
    "SoftmaxFeatures",
    "TaylorFeatures",
    "VirtualKeys",
    "combine",
]
