"""Which attention class a configuration asks for."""

from typing import Any

from kvlens.components.linear_attention import GroupedLinearAttention, LinearAttention
from kvlens.components.softmax_attention import GroupedSoftmaxAttention, SoftmaxAttention

KVAttention = LinearAttention | GroupedLinearAttention | SoftmaxAttention | GroupedSoftmaxAttention


def build_attention(cfg: Any, attn_type: str, layer: int) -> KVAttention:
    """The attention of layer ``layer``; ``attn_type`` is TransformerLens' "global" or "local"."""
    grouped = cfg.n_key_value_heads is not None
    if cfg.attention == "linear":
        return GroupedLinearAttention(cfg, attn_type, layer) if grouped else LinearAttention(cfg, attn_type, layer)
    return GroupedSoftmaxAttention(cfg, attn_type, layer) if grouped else SoftmaxAttention(cfg, attn_type, layer)
