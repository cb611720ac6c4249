"""A prompt as weights: :class:`KVBias`, its arithmetic, its file format, and the fingerprint of the model it fits.

With softmax attention and every key kept, a bias holds the same keys and values as a key-value cache, and the model gives the
same answer. But a cache belongs to one generation, grows in place, and mixes prompt and text; a bias is kept apart from the
text's own keys in every pass. With linear attention it is a sum whose size does not depend on the prompt's length.

What to know before relying on one:

- With fewer keys than the prompt has it is an approximation. Its error is in ``bias.fit.answers``, measured on continuations
  that were not used for fitting. A small error does not mean that facts are kept: ``bias.fit.recall`` has the share of the
  prompt's own words that the model would still say, and names those that are lost. A high recall does not mean it either: at
  10 % of the keys 95 % of the words, but 75 % of the answers about six documents, were kept (:mod:`kvlens.kv_bias.fit`).
- A bias fits the model that it was converted with, with the same weights; attaching it to another raises an error. If weights
  change while it is attached, the next pass warns. They are read again only if a change was seen: what changes some numbers of
  a tensor but not its first, through ``weight.data``, numpy or a fused optimizer, goes unnoticed.
- Threads can share a model, but their passes run one at a time, and only the thread that attached a bias reads it: those of
  other threads raise an error until it is detached or replaced, also after that thread has ended.
"""

from kvlens.kv_bias.features import EluFeatures, LearnedFeatures, RandomFeatures, SoftmaxFeatures, TaylorFeatures, VirtualKeys
from kvlens.kv_bias.fields import LAST_POSITION, Fingerprint
from kvlens.kv_bias.fit import AnswerErrors, BiasFit, Recall
from kvlens.kv_bias.kv_bias import KVBias
from kvlens.kv_bias.layers import BiasPart, Features, Keys, Layer, Recurrence, State

combine = KVBias.combine

__all__ = [
    "LAST_POSITION",
    "AnswerErrors",
    "BiasFit",
    "BiasPart",
    "EluFeatures",
    "Features",
    "Fingerprint",
    "KVBias",
    "Keys",
    "Layer",
    "LearnedFeatures",
    "RandomFeatures",
    "Recall",
    "Recurrence",
    "SoftmaxFeatures",
    "State",
    "TaylorFeatures",
    "VirtualKeys",
    "combine",
]
