"""TransformerLens 3's HookedTransformer, as kvlens' own: release 4 no longer has it.

- :mod:`~kvlens.base.model`: the class; its parts are in ``config``, ``layers`` and ``attention``;
- :mod:`~kvlens.base.text`, ``weights``: its methods.
"""

from kvlens.base.attention import Attention, GroupedQueryAttention
from kvlens.base.config import HookedTransformerConfig
from kvlens.base.layers import MLP, Embed, Expert, GatedMLP, MoE, Norm, PosEmbed, Unembed
from kvlens.base.model import HookedTransformer, Output, TransformerBlock

__all__ = [
    "MLP",
    "Attention",
    "Embed",
    "Expert",
    "GatedMLP",
    "GroupedQueryAttention",
    "HookedTransformer",
    "HookedTransformerConfig",
    "MoE",
    "Norm",
    "Output",
    "PosEmbed",
    "TransformerBlock",
    "Unembed",
]
