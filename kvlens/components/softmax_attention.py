"""TransformerLens' own softmax attention, with KV shift. With the shift off, every line that runs is TransformerLens'."""

from typing import Any

import torch
from torch import Tensor

from kvlens._tl import AbstractAttention, Attention, GroupedQueryAttention
from kvlens.components.decode_cache import ShiftedCacheEntry
from kvlens.components.kv_shift import KVShiftAndHooks, real_tokens


class _SoftmaxWithShift(KVShiftAndHooks):
    """Overrides two of TransformerLens' methods and adds nothing where no shift is configured."""

    alibi: Tensor | None

    def __init__(self, cfg: Any, attn_type: str = "global", layer_id: int | None = None):
        super().__init__(cfg, attn_type, layer_id)  # type: ignore[call-arg]
        self.add_hooks_and_shift()
        self._decoding: tuple[ShiftedCacheEntry | None, Tensor | None] = (None, None)

    def forward(self, query_input, key_input, value_input, past_kv_cache_entry=None, *args, **kwargs):  # noqa: ANN001
        """As ``transformer_lens.components.AbstractAttention.forward``."""
        if self.cfg.alibi_slopes is not None:
            past = 0 if past_kv_cache_entry is None else past_kv_cache_entry.past_keys.shape[1]
            self._grow_given_alibi(past + key_input.shape[1], key_input.device)
        if self.cfg.kv_shift is None:
            return super().forward(query_input, key_input, value_input, past_kv_cache_entry, *args, **kwargs)
        # TransformerLens computes q, k, v inside its forward, which does not tell calculate_qkv_matrices of the cache
        attention_mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self._decoding = (past_kv_cache_entry, attention_mask)
        try:
            return super().forward(query_input, key_input, value_input, past_kv_cache_entry, *args, **kwargs)
        finally:
            self._decoding = (None, None)

    def calculate_qkv_matrices(self, query_input, key_input, value_input):  # noqa: ANN001
        """TransformerLens' q, k, v, shifted."""
        q, k, v = super().calculate_qkv_matrices(query_input, key_input, value_input)  # type: ignore[misc]
        if self.cfg.kv_shift is None:
            return q, k, v
        entry, attention_mask = self._decoding
        mask = real_tokens(attention_mask, k.shape[1], k.device)
        shifted, boundary = self.shift({"q": q, "k": k, "v": v}, {} if entry is None else entry.boundary, mask)
        if entry is not None and not entry.frozen:
            entry.boundary = boundary
        return shifted["q"], shifted["k"], shifted["v"]

    def _grow_given_alibi(self, n: int, device: torch.device) -> None:
        """TransformerLens makes its own slopes when it finds no ALiBi bias of sufficient size: have one ready."""
        if self.alibi is None or self.alibi.shape[-1] < n or self.alibi.device != device:
            slopes = self.W_Q.new_tensor(list(self.cfg.alibi_slopes))  # type: ignore[operator]
            self.alibi = AbstractAttention.create_alibi_slope(n, device) * slopes[:, None, None]  # type: ignore[arg-type]


class SoftmaxAttention(_SoftmaxWithShift, Attention):
    """One key-value head a query head."""


class GroupedSoftmaxAttention(_SoftmaxWithShift, GroupedQueryAttention):
    """Grouped-query attention; the shift has one coefficient vector a key-value head."""
