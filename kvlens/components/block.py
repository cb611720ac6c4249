"""The base's block without redundant computation.

The base normalizes the residual stream three times, for queries, keys and values separately. The result here is the same up to
rounding, but the norm's hooks fire once. Blocks of a different kind (inputs split by head, norms after the layer, shortformer)
run the base's own pass.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.base import Norm, TransformerBlock
from kvlens.components.attention import GroupedQueryKVAttention, KVAttention
from kvlens.components.hooks import is_hooked


class KVBlock(TransformerBlock):
    """A transformer block with kvlens' attention, which normalizes its input once."""

    def build_attention(self, cfg: Any, attn_type: str, layer: int) -> KVAttention:
        """The attention of layer ``layer``."""
        return (KVAttention if cfg.n_key_value_heads is None else GroupedQueryKVAttention)(cfg, attn_type, layer)

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        shortformer_pos_embed: Tensor | None = None,
        past_kv_cache_entry: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch kept_pos d_model"]:
        """As ``kvlens.base.TransformerBlock.forward``; a hook at :meth:`cut_point` may keep only the last positions."""
        if not self._is_usual():
            return super().forward(resid_pre, shortformer_pos_embed, past_kv_cache_entry, attention_mask)
        resid_pre = self.hook_resid_pre(resid_pre)
        normed = norm(self.ln1, resid_pre)
        attn_out = self.attn(normed, normed, normed, past_kv_cache_entry=past_kv_cache_entry, attention_mask=attention_mask)
        attn_out = self.hook_attn_out(attn_out)
        if attn_out.shape[1] != resid_pre.shape[1]:
            resid_pre = resid_pre[:, -attn_out.shape[1] :].contiguous()
        resid_pre = resid_pre.to(attn_out.device)
        if self.cfg.attn_only:
            return self.hook_resid_post(resid_pre + attn_out)
        if self.cfg.parallel_attn_mlp:
            mlp_out = self.apply_mlp(norm(self.ln2, self._mlp_in(resid_pre)))
            return self.hook_resid_post(resid_pre + attn_out + mlp_out)
        resid_mid = self.hook_resid_mid(resid_pre + attn_out)
        return self.hook_resid_post(resid_mid + self.apply_mlp(norm(self.ln2, self._mlp_in(resid_mid))))

    def cut_point(self) -> str:
        """The hook point at which a hook may keep only the last positions: behind it no position reads another. That is where
        the heads' outputs are; the end of the block, where anything in it is hooked and may want all positions."""
        return "attn.hook_z" if self._is_usual() and not is_hooked(*self.modules()) else "hook_resid_post"

    def _is_usual(self) -> bool:
        cfg = self.cfg
        split = cfg.use_attn_in or cfg.use_split_qkv_input
        after = cfg.use_normalization_before_and_after or self.norms_follow
        return not split and not after and cfg.positional_embedding_type != "shortformer"


def norm(module: Any, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
    """``module(x)``, with a LayerNorm computed by torch's fused one (equal up to rounding) unless hooked."""
    if not (isinstance(module, Norm) and module.centers) or x.dtype not in (torch.float32, torch.float64):
        return module(x)
    if torch.is_autocast_enabled(x.device.type) or is_hooked(module, module.hook_scale, module.hook_normalized):
        return module(x)
    weight, shift = getattr(module, "w", None), getattr(module, "b", None)
    return nn.functional.layer_norm(x, x.shape[-1:], weight, shift, module.eps)
