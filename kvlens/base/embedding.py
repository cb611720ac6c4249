"""From tokens to the residual stream, and from there to logits."""

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_offset_position_ids

from kvlens.base.norm import Norm


class Embed(nn.Module):
    """A row of W_E for each token, normalized if ``post_embedding_ln``."""

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg = cfg
        self.W_E = nn.Parameter(torch.empty(cfg.d_vocab, cfg.d_model, dtype=cfg.dtype))
        if cfg.post_embedding_ln:
            self.ln = Norm(cfg, "LN")

    def forward(self, tokens: Int[Tensor, "batch pos"]) -> Float[Tensor, "batch pos d_model"]:
        """[batch, pos, d_model]."""
        embedded = self.W_E[tokens, :]
        return self.ln(embedded) if self.cfg.post_embedding_ln else embedded


class PosEmbed(nn.Module):
    """A row of W_pos for each position. With ALiBi it exists but is not used, and is 0."""

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg = cfg
        new = torch.zeros if cfg.positional_embedding_type == "alibi" else torch.empty
        self.W_pos = nn.Parameter(new(cfg.n_ctx, cfg.d_model, dtype=cfg.dtype))

    def forward(
        self,
        tokens: Shaped[Tensor, "batch pos"],
        past_kv_pos_offset: int = 0,
        attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
    ) -> Float[Tensor, "batch new_pos d_model"]:
        """Rows of the new positions, after ``past_kv_pos_offset`` earlier ones.

        With a mask (of earlier and new tokens), positions count the tokens that it shows; the others get zeros.
        """
        batch, pos = tokens.shape[0], tokens.shape[-1]
        if attention_mask is None:
            rows = self.W_pos[past_kv_pos_offset : past_kv_pos_offset + pos]
            return rows.expand(batch, -1, -1).clone()
        rows = self.W_pos[get_offset_position_ids(past_kv_pos_offset, attention_mask)]
        hidden = ~attention_mask[:, past_kv_pos_offset : past_kv_pos_offset + pos, None].bool()
        return torch.where(hidden, 0, rows)


class Unembed(nn.Module):
    """x W_U + b_U."""

    def __init__(self, cfg: Any):
        super().__init__()
        self.cfg = cfg
        self.W_U = nn.Parameter(torch.empty(cfg.d_model, cfg.d_vocab_out, dtype=cfg.dtype))
        self.b_U = nn.Parameter(torch.zeros(cfg.d_vocab_out, dtype=cfg.dtype))
        self.hook_in = HookPoint()
        self.hook_out = HookPoint()

    def forward(self, residual: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab_out"]:
        """Logits, before any soft cap."""
        return self.hook_out(nn.functional.linear(self.hook_in(residual), self.W_U.T, self.b_U))
