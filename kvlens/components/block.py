"""The base's block without redundant computation.

The base normalizes the residual stream three times, for queries, keys and values separately. The result here is the same up to
rounding, but the norm's hooks fire once. Blocks of a different kind (inputs split by head, norms after the layer, shortformer)
do as the base's.

Absolute positions follow an attached prompt: the text after a converted prompt of M tokens starts at position M.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kvlens.base import HookedTransformerConfig, PosEmbed, TransformerBlock
from kvlens.components.attention import GroupedQueryKVAttention, KVAttention
from kvlens.components.config import AttentionConfig
from kvlens.components.heads import all_take_positions, counted_by, given_places, is_hooked
from kvlens.components.layer_bias import check_batch
from kvlens.errors import KVLensError


class KVBlock(TransformerBlock):
    """A transformer block with kvlens' attention, which normalizes its input once."""

    cfg: AttentionConfig
    attn: KVAttention

    def build_attention(self, attn_type: str, layer: int) -> KVAttention:
        """The attention of layer ``layer``."""
        kind = KVAttention if self.cfg.n_key_value_heads is None else GroupedQueryKVAttention
        return kind(self.cfg, attn_type, layer)

    def attention_inputs(self, resid_pre: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """As in the base; the usual stream is normalized once, not for queries, keys and values each."""
        cfg = self.cfg
        by_head = cfg.use_attn_in or cfg.use_split_qkv_input
        behind = cfg.use_normalization_before_and_after or self.norms_follow
        if by_head or behind or cfg.positional_embedding_type == "shortformer":
            return super().attention_inputs(resid_pre, positions)
        return (self.ln1(resid_pre),) * 3

    def cut_point(self) -> str:
        """The hook point at which a hook may keep only the last positions: behind it no position reads another. That is where
        the heads' outputs are; the end of the block, where anything in it is hooked and may want all positions."""
        return "hook_resid_post" if is_hooked(*self.modules()) else "attn.hook_z"


class _Offset(nn.Module):
    """Positions of the new tokens; ``position_offset`` is set when a bias is attached (an int, or one per row)."""

    cfg: HookedTransformerConfig
    W_pos: nn.Parameter
    position_offset: int | Tensor = 0

    def positions(self, tokens: Tensor, past: int, attention_mask: Tensor | None) -> Int[Tensor, "#batch pos"]:
        given = given_places()
        if given is not None:
            ids = given
        elif counted_by(attention_mask) is None:
            ids = torch.arange(past, past + tokens.shape[-1], device=tokens.device)[None]
        else:
            assert attention_mask is not None
            ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, past:]
        offset = self.position_offset
        if not isinstance(offset, Tensor):
            return ids + offset
        check_batch(len(offset), len(tokens))
        return ids + offset[:, None].to(ids.device)

    @staticmethod
    def without_padding(embedded: Tensor, past: int, attention_mask: Tensor | None) -> Tensor:
        """Zeros at padded positions, as TransformerLens has them."""
        if attention_mask is None:
            return embedded
        return embedded * attention_mask[:, past:, None].to(embedded)


class OffsetPosEmbed(_Offset, PosEmbed):
    """The base's learned positions, plus the offset if one is set."""

    def forward(
        self,
        tokens: Shaped[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
    ) -> Float[Tensor, "batch new_pos d_model"]:
        """[batch, new_pos, d_model]; with a mask, the new positions follow the past ones, whatever the tokens.

        Raises:
            KVLensError: a position lies beyond ``n_ctx``.
        """
        starts_at_0 = isinstance(self.position_offset, int) and self.position_offset == 0
        if starts_at_0 and not all_take_positions():
            return super().forward(tokens, past_kv_pos_offset, attention_mask)
        ids = self.positions(tokens, past_kv_pos_offset, attention_mask)
        if int(ids.max()) >= self.cfg.n_ctx:
            raise KVLensError(
                f"position {int(ids.max())} (including the attached prompt) lies beyond n_ctx={self.cfg.n_ctx}, and positions "
                "are learned: shorten the text or the prompt"
            )
        embedded = self.without_padding(self.W_pos[ids], past_kv_pos_offset, attention_mask)
        return embedded.expand(tokens.shape[0], -1, -1).clone()


class SinusoidalPosEmbed(_Offset):
    """sin and cos of position / 10000^(2i / d_model), even features sin, odd features cos (Vaswani et al. 2017; LECTURE)."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model

    def forward(
        self,
        tokens: Shaped[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
    ) -> Float[Tensor, "batch new_pos d_model"]:
        """[batch, new_pos, d_model], in the dtype of ``tokens`` if that is a floating one; texts may have any length."""
        ids = self.positions(tokens, past_kv_pos_offset, attention_mask)
        even = torch.arange(0, self.d_model, 2, device=ids.device, dtype=torch.float64)
        angles = ids.double()[..., None] * 10000.0 ** (-even / self.d_model)
        embedded = torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., : self.d_model]
        embedded = self.without_padding(embedded, past_kv_pos_offset, attention_mask)
        embedded = embedded.to(tokens.dtype if tokens.is_floating_point() else embedded.dtype)
        return embedded.expand(tokens.shape[0], -1, -1).contiguous()  # not a view: hooks may write
