"""One layer: attention and MLP, each with its norm, added to the residual stream."""

from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import repeat_along_head_dimension
from transformer_lens.utilities.architectures import POST_NORM_ARCHITECTURES

from kvlens.base.attention import Attention, GroupedQueryAttention
from kvlens.base.config import HookedTransformerConfig
from kvlens.base.layers import Norm, build_mlp
from kvlens.errors import KVLensError


class TransformerBlock(nn.Module):
    """Norm, attention, norm, MLP; or attention and MLP side by side; or with norms behind them (Gemma 2, OLMo 2).

    Args:
        cfg: a :class:`~kvlens.base.HookedTransformerConfig`.
        block_index: the layer's number.
    """

    ln1: nn.Module
    ln2: nn.Module

    def __init__(self, cfg: Any, block_index: int):
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.of_layer(cfg, block_index)
        kind = cfg.normalization_type
        behind = cfg.use_normalization_before_and_after
        self.norms_follow = cfg.original_architecture in POST_NORM_ARCHITECTURES  # ln1 and ln2 are behind, not before (OLMo 2)
        for name in ("ln1",) if cfg.attn_only else ("ln1", "ln2"):
            setattr(self, name, nn.Identity() if kind is None else Norm(cfg, kind))
            if behind:  # those keep their weights: nothing follows that could absorb them
                setattr(self, f"{name}_post", nn.Identity() if kind is None else Norm(cfg, kind.removesuffix("Pre")))
        self.attn = self.build_attention(cfg, cfg.attn_types[block_index] if cfg.use_local_attn else "global", block_index)
        if not cfg.attn_only:
            self.mlp = build_mlp(cfg)
        self.hook_attn_in = HookPoint()
        self.hook_q_input, self.hook_k_input, self.hook_v_input = HookPoint(), HookPoint(), HookPoint()
        self.hook_mlp_in, self.hook_attn_out, self.hook_mlp_out = HookPoint(), HookPoint(), HookPoint()
        self.hook_resid_pre = HookPoint()
        if not (cfg.attn_only or cfg.parallel_attn_mlp):
            self.hook_resid_mid = HookPoint()
        self.hook_resid_post = HookPoint()

    def build_attention(self, cfg: Any, attn_type: str, layer: int) -> Attention:
        """The attention of this layer."""
        kind = Attention if cfg.n_key_value_heads is None else GroupedQueryAttention
        return kind(cfg, attn_type, layer)

    def forward(
        self,
        resid_pre: Float[Tensor, "batch pos d_model"],
        shortformer_pos_embed: Float[Tensor, "batch pos d_model"] | None = None,
        past_kv_cache_entry: Any = None,
        attention_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch kept_pos d_model"]:
        """The stream after this layer; the other arguments are those of attention."""
        resid_pre = self.hook_resid_pre(resid_pre)
        query, key, value = self.attention_inputs(resid_pre, shortformer_pos_embed)
        attn_out = self.attn(query, key, value, past_kv_cache_entry=past_kv_cache_entry, attention_mask=attention_mask)
        attn_out = self.hook_attn_out(self._after(attn_out, "ln1"))
        if attn_out.shape[1] != resid_pre.shape[1]:  # a hook on the heads' outputs keeps only the last positions
            resid_pre = resid_pre[:, -attn_out.shape[1] :].contiguous()
        resid_pre = resid_pre.to(attn_out.device)
        if self.cfg.attn_only:
            return self.hook_resid_post(resid_pre + attn_out)
        if self.cfg.parallel_attn_mlp:
            return self.hook_resid_post(resid_pre + attn_out + self.apply_mlp(self.mlp_input(resid_pre)))
        resid_mid = self.hook_resid_mid(resid_pre + attn_out)
        return self.hook_resid_post(resid_mid + self.apply_mlp(self.mlp_input(resid_mid)))

    def attention_inputs(self, resid_pre: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """What queries, keys and values are projected from: the normalized stream, once or once per head.

        Each is normalized by itself: the hook points of the norm fire three times, and gradients flow through each.
        """
        cfg = self.cfg
        inputs: tuple[Tensor, ...] = (resid_pre, resid_pre, resid_pre)
        ungrouped = cfg.n_key_value_heads is None or cfg.ungroup_grouped_query_attention
        by_head = cfg.use_attn_in or cfg.use_split_qkv_input
        if by_head and not ungrouped and (positions is not None or not cfg.use_split_qkv_input):
            split = "use_split_qkv_input with positional_embedding_type='shortformer'"
            setting = split if cfg.use_split_qkv_input else "use_attn_in"
            raise KVLensError(
                f"{setting} cannot be combined with grouped keys (n_key_value_heads={cfg.n_key_value_heads} of {cfg.n_heads} "
                "heads), which have no separate input per query head: turn it off, or call "
                "model.set_ungroup_grouped_query_attention(True)"
            )
        if cfg.use_attn_in:
            inputs = (self.hook_attn_in(repeat_along_head_dimension(resid_pre, cfg.n_heads)),) * 3
        if cfg.use_split_qkv_input:
            heads = (cfg.n_heads, *([cfg.n_heads if ungrouped else cfg.n_key_value_heads] * 2))
            hooks = (self.hook_q_input, self.hook_k_input, self.hook_v_input)
            inputs = tuple(hook(repeat_along_head_dimension(resid_pre, n)) for hook, n in zip(hooks, heads, strict=True))
        query, key, value = inputs if self.norms_follow else (self.ln1(x) for x in inputs)
        if positions is None:
            return query, key, value
        positions = repeat_along_head_dimension(positions, cfg.n_heads) if by_head else positions
        return query + positions, key + positions, value

    def apply_mlp(self, normalized_resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """The MLP's output, with any norm behind it, hooked."""
        return self.hook_mlp_out(self._after(self.mlp(normalized_resid), "ln2"))

    def norm_behind(self, norm: str) -> Any:
        """The norm between a part and the residual stream, ``norm`` being ``ln1`` or ``ln2``; None in nearly all models."""
        if self.cfg.use_normalization_before_and_after:
            return getattr(self, f"{norm}_post")
        return getattr(self, norm) if self.norms_follow else None

    def _after(self, out: Tensor, norm: str) -> Tensor:
        """A part's output, normalized where the architecture does so."""
        behind = self.norm_behind(norm)
        return out if behind is None else behind(out)

    def mlp_input(self, resid: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        """What the MLP reads: the normalized stream."""
        resid = self.hook_mlp_in(resid.clone()) if self.cfg.use_hook_mlp_in else resid
        return resid if self.norms_follow else self.ln2(resid)
