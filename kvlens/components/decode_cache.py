"""What is kept between decoding steps, in the shape that TransformerLens' own generation code asks for.

TransformerLens reads the position offset off ``past_keys.shape`` of the first entry. Linear attention keeps no keys, only
its state: its entry answers with a tensor of the right shape and no memory (one zero, expanded). Softmax attention with a
KV shift keeps the shifted keys and values, as TransformerLens does, and beside them the raw last rows.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvlens._tl import TransformerLensKeyValueCache, TransformerLensKeyValueCacheEntry
from kvlens.errors import KVLensError
from kvlens.ops.attention_variants import RidgeState
from kvlens.ops.linear_attention import LinearAttentionState

Boundary = dict[str, Tensor]
"""The raw last rows by projection: keys among "k", "v", "q"; each [batch, window, head, d_head]."""


@dataclass
class LinearCacheEntry:
    """The state of one linear-attention layer.

    Attributes:
        state: A and D of the context alone; the KV bias stays apart.
        boundary: the raw last keys, values, queries, where they are shifted.
        n_tokens: real tokens so far: an int, or [batch] where rows differ (padding).
        n_places: places so far, padding included, as TransformerLens counts them.
        ridge: the state of ridge attention, which takes the place of ``state``.
        bias: (b_KV, b_D) as the last forward pass read them (b_D is None under normaliser "none"); None without a bias.
    """

    batch: int
    n_kv_heads: int
    d_head: int
    device: torch.device | str | None
    state: LinearAttentionState | None = None
    boundary: Boundary = field(default_factory=dict)
    n_tokens: int | Tensor = 0
    n_places: int = 0
    bias: tuple[Tensor, Tensor | None] | None = None
    ridge: RidgeState | None = None
    frozen: bool = False

    @property
    def past_keys(self) -> Tensor:
        """[batch, n_places, kv_head, d_head] of no memory, for TransformerLens' position offset."""
        return torch.zeros(1, device=self.device).expand(self.batch, self.n_places, self.n_kv_heads, self.d_head)

    past_values = past_keys


@dataclass
class ShiftedCacheEntry(TransformerLensKeyValueCacheEntry):
    """TransformerLens' entry (shifted keys and values, before RoPE) with the raw last rows beside it."""

    boundary: Boundary = field(default_factory=dict)


def upgrade_cache(cache: TransformerLensKeyValueCache, *, linear: bool) -> None:
    """Replace the stock entries of an empty cache by kvlens' own, in place; one that kvlens made is left as it is."""
    for i, entry in enumerate(cache.entries):
        if isinstance(entry, (LinearCacheEntry, ShiftedCacheEntry)):
            continue
        batch, n_places, n_kv_heads, d_head = entry.past_keys.shape
        if n_places:
            raise KVLensError(
                f"past_kv_cache: entry {i} already holds {n_places} keys of a plain softmax model; a model with linear "
                "or shifted attention needs more than keys and values. Start from an empty cache."
            )
        if linear:
            new = LinearCacheEntry(batch, n_kv_heads, d_head, entry.past_keys.device, frozen=entry.frozen)
        else:
            new = ShiftedCacheEntry(entry.past_keys, entry.past_values, entry.frozen)
        cache.entries[i] = new  # type: ignore[call-overload]
