"""TransformerLens 3's HookedTransformer, as kvlens' own: release 4 no longer has it.

- :mod:`~kvlens.base.model`: the class; its parts are in ``config``, ``embedding``, ``norm``, ``attention``, ``rotary``, ``mlp``
  and ``block``;
- :mod:`~kvlens.base.text`, ``generation``, ``weights``: its methods;
- :mod:`~kvlens.base.families`, ``rope_parameters``: models of Transformers.
"""

from kvlens.base.attention import Attention, GroupedQueryAttention
from kvlens.base.block import TransformerBlock
from kvlens.base.config import HookedTransformerConfig
from kvlens.base.embedding import Embed, PosEmbed, Unembed
from kvlens.base.mlp import MLP, Expert, GatedMLP, MoE
from kvlens.base.model import HookedTransformer, Output
from kvlens.base.norm import Norm

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
