"""What is kept between decoding steps, in the form of TransformerLens' decode cache.

The base takes the position offset from ``past_keys.shape`` of the first entry. Linear attention keeps no keys, only
its state, so in a cache its entry provides a tensor of the right shape that uses no memory (one zero, expanded). Softmax
attention with a KV shift keeps the shifted keys and values, as TransformerLens does, and in addition the last raw rows.

Negative samples are chosen among the scores of all tokens so far, which a state of fixed size cannot hold: linear attention
with negative samples also keeps every token's features and value, and decoding is exact but no longer O(1).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry

from kvlens.errors import KVLensError
from kvlens.ops.attention_variants import RidgeState
from kvlens.ops.linear_attention import LinearAttentionState

ShiftState = dict[str, Tensor]
"""The last raw rows by projection: keys among "k", "v", "q"; each [batch, window, head, d_head]."""


@dataclass(frozen=True, eq=False)
class SeenTokens:
    """Features and values of every token so far, from which linear attention computes all scores.

    Attributes:
        phi_k: [batch, key_pos, kv_head, d_phi].
        v: [batch, key_pos, kv_head, d_head].
        mask: True at real tokens, [batch, key_pos]; None where all are.
    """

    phi_k: Tensor
    v: Tensor
    mask: Tensor | None

    def followed_by(self, new: "SeenTokens") -> "SeenTokens":
        """These tokens followed by ``new``."""
        mask = None
        if self.mask is not None or new.mask is not None:
            masks = (x.phi_k.new_ones(x.phi_k.shape[:2], dtype=torch.bool) if x.mask is None else x.mask for x in (self, new))
            mask = torch.cat(list(masks), dim=1)
        return SeenTokens(torch.cat([self.phi_k, new.phi_k], dim=1), torch.cat([self.v, new.v], dim=1), mask)


@dataclass
class LinearCacheEntry:
    """The state of one linear-attention layer: what a text leaves in it, a segment or a token at a time.

    Attributes:
        state: A and D of the context alone, without the KV bias.
        shift_state: the last raw keys, values and queries, if they are shifted.
        n_tokens: number of real tokens so far: an int, or [batch] if rows differ (padding).
        n_positions: number of positions so far, padding included, as TransformerLens counts them.
        ridge: the state of ridge attention, which replaces ``state``.
        seen: every token so far, if negative samples are chosen among them.
        negative_means: mean_{N_j} v of every token so far [batch, head, key_pos, d_head], if each label has its negatives.
        bias: (b_KV, b_D) as the last forward pass read them (b_D is None under normalizer "none"); None without a bias.
        frozen: whether passes read the entry without updating it.
        empty: in a cache, no keys in the form of TransformerLens' entry, [batch, 0, kv_head, d_head].
    """

    state: LinearAttentionState | None = None
    shift_state: ShiftState = field(default_factory=dict)
    n_tokens: int | Tensor = 0
    n_positions: int = 0
    bias: tuple[Tensor, Tensor | None] | None = None
    ridge: RidgeState | None = None
    seen: SeenTokens | None = None
    negative_means: Tensor | None = None
    frozen: bool = False
    empty: Tensor | None = None

    def count(self, n: int, mask: Tensor | None) -> None:
        """Count ``n`` more positions, of each row those where ``mask`` is True."""
        self.n_tokens = self.n_tokens + (n if mask is None else mask.sum(dim=1))
        self.n_positions += n

    @property
    def past_keys(self) -> Tensor:
        """A tensor [batch, n_positions, kv_head, d_head] that uses no memory, for the position offset."""
        assert self.empty is not None
        batch, _, *head = self.empty.shape
        return self.empty.new_zeros(1).expand(batch, self.n_positions, *head)

    past_values = past_keys


@dataclass
class ShiftedCacheEntry(TransformerLensKeyValueCacheEntry):
    """TransformerLens' entry (shifted keys and values, before RoPE), the last raw rows, and the means of negative samples."""

    shift_state: ShiftState = field(default_factory=dict)
    negative_means: Tensor | None = None


CacheEntry = LinearCacheEntry | ShiftedCacheEntry | TransformerLensKeyValueCacheEntry
"""What a layer keeps of the tokens before a pass."""


def upgrade_cache(cache: TransformerLensKeyValueCache, *, linear: bool) -> None:
    """Replace the stock entries of an empty cache by kvlens' own, in place; a cache made by kvlens is left unchanged."""
    for i, entry in enumerate(cache.entries):
        if isinstance(entry, (LinearCacheEntry, ShiftedCacheEntry)):
            continue
        n_positions = entry.past_keys.shape[1]
        if n_positions:
            raise KVLensError(
                f"past_kv_cache: entry {i} already holds {n_positions} keys of a plain softmax model; linear or shifted "
                "attention and negative samples need more than keys and values. Start from an empty cache."
            )
        if linear:
            new = LinearCacheEntry(empty=entry.past_keys, frozen=entry.frozen)
        else:
            new = ShiftedCacheEntry(entry.past_keys, entry.past_values, entry.frozen)
        cache.entries[i] = new  # type: ignore[call-overload]
