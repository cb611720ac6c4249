"""A prompt as weights: :class:`KVBias`, its arithmetic, its file format, and the fingerprint of the model it fits."""

from kvlens.kv_bias.fingerprint import Fingerprint
from kvlens.kv_bias.kv_bias import KVBias

combine = KVBias.combine

__all__ = ["Fingerprint", "KVBias", "combine"]
