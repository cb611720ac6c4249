"""The forward pass that both kinds of attention share.

    projections -> KV shift -> the heads (linear or softmax, each in a file of its own) -> hook_z -> W_O

A kind of attention says what its heads do with a piece of text, given what came before it (:meth:`KVAttention.attend`); all
else happens here, once: projecting, shifting, what the variants of :mod:`kvlens.components.variants` do in front of the heads
and behind them, firing ``hook_z_context``, ``hook_z_bias`` and ``hook_z``, projecting back.

What this relies on inside TransformerLens 3.9: ``calculate_qkv_matrices`` (which fires ``hook_q``, ``hook_k``, ``hook_v`` and
norms), the names of the weights, and the arguments with which a block calls its attention.
"""

from typing import Any

import torch
from torch import Tensor, nn

from kvlens._tl import HookPoint
from kvlens.components.fast_path import is_hooked, on_fast_path
from kvlens.components.kv_shift import real_tokens, through
from kvlens.components.pieces import HeadOutputs, Piece
from kvlens.components.positions import counted_by
from kvlens.components.projections import project_heads
from kvlens.components.variants import AttentionVariants
from kvlens.errors import KVLensError
from kvlens.ops.affine import affine

OF_A_BIAS = ("hook_b_kv", "hook_b_d", "hook_z_context", "hook_z_bias")
OF_A_BOUNDARY = ("hook_last_k", "hook_last_v", "hook_last_q")
"""Hook points that fire where there is a KV bias alone, and where one is attached."""


class KVAttention(AttentionVariants):
    """Mixed in before TransformerLens' ``Attention`` or ``GroupedQueryAttention``."""

    hook_b_kv: HookPoint
    hook_b_d: HookPoint
    hook_phi_q: HookPoint
    hook_normalizer: HookPoint
    hook_z_context: HookPoint
    hook_z_bias: HookPoint

    def __init__(self, cfg: Any, attn_type: str = "global", layer_id: int | None = None):
        super().__init__(cfg, attn_type, layer_id)  # type: ignore[call-arg]
        self.add_hooks_and_shift()
        self.add_variants()

    def attend(self, piece: Piece, entry: Any) -> HeadOutputs:
        """What the heads make of ``piece``; ``entry`` of the decode cache holds what came before, and is brought up to date."""
        raise NotImplementedError

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: Any = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """[batch, pos, d_model] from [batch, pos, d_model] or [batch, pos, head, d_model], as TransformerLens' attention."""
        self._check_batch(query_input.shape[0])
        q, k, v = self._normed_and_clamped(*self.calculate_qkv_matrices(query_input, key_input, value_input))
        mask = real_tokens(attention_mask, q.shape[1], q.device)
        boundary = getattr(past_kv_cache_entry, "boundary", {})
        shifted, boundary = self.shift({"q": q, "k": k, "v": v}, boundary, mask)
        score_bias = _sum_of(additive_attention_mask, position_bias)
        k, v = self.augmented(shifted["k"], shifted["v"])
        piece = Piece(shifted["q"], k, v, mask, attention_mask, counted_by(attention_mask), score_bias)
        heads = self.regularised(self.attend(piece, past_kv_cache_entry), piece)
        if boundary and past_kv_cache_entry is not None and not past_kv_cache_entry.frozen:
            past_kv_cache_entry.boundary = boundary
        z = heads.z_context
        if heads.z_bias is not None:
            z = self.hook_z_context(z) + self.hook_z_bias(heads.z_bias)
        return self._project(self.hook_z(z.to(self.W_O.dtype)))

    def calculate_qkv_matrices(self, query_input: Tensor, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """TransformerLens' q, k and v, with its hooks and norms; one input for each head, and 4 bits, are left to it."""
        cfg = self.cfg
        ungrouped = cfg.n_key_value_heads is not None and cfg.ungroup_grouped_query_attention
        if not on_fast_path(cfg) or query_input.dim() != 3 or ungrouped or cfg.load_in_4bit:
            return super().calculate_qkv_matrices(query_input, key_input, value_input)  # type: ignore[misc]
        stored = "" if cfg.n_key_value_heads is None else "_"
        weights = [(self.W_Q, self.b_Q), *((getattr(self, f"{stored}W_{x}"), getattr(self, f"{stored}b_{x}")) for x in "KV")]
        inputs, hooks = (query_input, key_input, value_input), (self.hook_q, self.hook_k, self.hook_v)
        q, k, v = (hook(project_heads(x, *w)) for hook, x, w in zip(hooks, inputs, weights, strict=True))
        if cfg.use_qk_norm:
            q, k = self._apply_qk_norm(q, self.q_norm), self._apply_qk_norm(k, self.k_norm)
        return q, k, v

    def _normed_and_clamped(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What TransformerLens does behind ``hook_q``, ``hook_k``, ``hook_v``: norms over all heads (OLMo 2, 3), clamps."""
        if self.q_norm is not None and not self.cfg.use_qk_norm:
            q, k = (norm(x.flatten(2)).view_as(x) for norm, x in ((self.q_norm, q), (self.k_norm, k)))
        if self.cfg.clip_qkv is not None:
            q, k, v = (x.clamp(min=-self.cfg.clip_qkv, max=self.cfg.clip_qkv) for x in (q, k, v))
        return q, k, v

    def _check_batch(self, batch: int) -> None:
        n_prompts = 1 if self.layer_bias is None else self.layer_bias.b_kv.shape[0]
        if n_prompts not in (1, batch):
            raise KVLensError(
                f"the attached bias holds {n_prompts} prompts and the input has batch {batch}: give one row per prompt, "
                "or attach the bias of a single prompt, which serves every row"
            )

    def read_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
        """(b_KV, b_D) through their hooks: the attached bias, else the trained one, else None. b_D is None under "none".

        Hooks see query heads. A softmax bias has a row per key-value head, and comes back so unless a hook made the query heads
        of a group differ.
        """
        if self.layer_bias is not None:
            b_kv, b_d = self.layer_bias.b_kv, self.layer_bias.b_d
        elif self.cfg.trainable_kv_bias:
            b_kv, b_d = self.b_KV[None], self.b_D[None]
        else:
            return None
        b_kv, b_d = (b.to(self.W_O.device, dtype) for b in (b_kv, b_d))
        unused = self.cfg.attention == "linear" and self.cfg.normalizer == "none"
        if not is_hooked(self.hook_b_kv, self.hook_b_d):
            return b_kv, None if unused else b_d
        grouped = b_kv.shape[1] < self.cfg.n_heads
        b_kv = self._by_query_head(self.hook_b_kv, b_kv)
        if unused:
            return b_kv, None
        b_d = self._by_query_head(self.hook_b_d, b_d)
        return _grouped_where_equal(b_kv, b_d, self.cfg.n_kv_heads) if grouped else (b_kv, b_d)

    def waits_for_a_bias(self, hook_point: str) -> bool:
        """Whether the hook point of this name (``hook_b_kv``) fires under a KV bias alone, and there is none now."""
        if self.layer_bias is not None:
            return False
        if hook_point in OF_A_BOUNDARY:
            return True
        of_a_bias = OF_A_BIAS if self.cfg.attention == "linear" else (*OF_A_BIAS, "hook_phi_q", "hook_normalizer")
        return not self.cfg.trainable_kv_bias and hook_point in of_a_bias

    def _by_query_head(self, hook: HookPoint, b: Tensor) -> Tensor:
        """``b`` with a row per query head, through ``hook``."""
        b = b.repeat_interleave(self.cfg.n_heads // b.shape[1], dim=1)
        hooked = through(hook, b)
        if hooked.shape[1:] != b.shape[1:]:
            expected = f"[batch or 1, {', '.join(map(str, b.shape[1:]))}]"
            raise KVLensError(
                f"{hook.name}: a hook made {list(hooked.shape)} of it, and it is {expected}, a row per query head, as "
                "bias.per_query_head() has them"
            )
        return hooked

    def _project(self, z: Tensor) -> Tensor:
        """z W_O + b_O, through ``hook_result`` where the configuration asks for it."""
        if not self.cfg.use_attn_result:
            z, weight = z.flatten(2), self.W_O.flatten(0, 1)
            return affine(z, weight, self.b_O) if on_fast_path(self.cfg) else nn.functional.linear(z, weight.T, self.b_O)
        result = self.hook_result(torch.einsum("bphd,hdm->bphm", z, self.W_O))
        return result.sum(dim=2) + self.b_O


def _sum_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _grouped_where_equal(b_kv: Tensor, b_d: Tensor, n_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Of rows per query head one per key-value head again, where a group's are equal: they are then read as if unhooked."""
    if b_kv.requires_grad or b_d.requires_grad:
        return b_kv, b_d  # each query head has a gradient of its own
    groups = [b.unflatten(1, (n_kv_heads, -1)) for b in (b_kv, b_d)]
    if not all(torch.equal(b, b[:, :, :1].expand_as(b)) for b in groups):
        return b_kv, b_d
    return groups[0][:, :, 0], groups[1][:, :, 0]
