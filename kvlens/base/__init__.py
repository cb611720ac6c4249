"""TransformerLens 3's HookedTransformer, as kvlens' own: release 4 no longer has it.

- :mod:`~kvlens.base.model`: the class; its parts are in ``config``, ``layers``, ``attention`` and ``block``;
- :mod:`~kvlens.base.text`, ``generation``, ``weights``: its methods.
"""

from kvlens.base.attention import Attention, GroupedQueryAttention
from kvlens.base.block import TransformerBlock
from kvlens.base.config import HookedTransformerConfig
from kvlens.base.layers import MLP, Embed, Expert, GatedMLP, MoE, Norm, PosEmbed, Unembed
from kvlens.base.model import HookedTransformer, Output

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
