"""Linear attention as a TransformerLens attention: same parameters, same hook names, and those of kvlens (ICLCA eq. 12-13).

    z_i = (phi~(q_i)^T A_i + phi~(q_i)^T gamma^{i+1} b_KV) / (phi(q_i)^T D_i + phi(q_i)^T b_D)

A and D are the context's alone; the bias is read beside them, so that the two summands of ``hook_z`` stay exact. With
normaliser "none" the denominator is ``attn_scale``. Everything between the projections and ``hook_z`` is computed in
float32 or better, whatever the model's dtype.

``hook_attn_scores`` and ``hook_pattern`` are computed when something is hooked to them: the parallel form then runs, at
pos x pos. With a decode cache they cover the new tokens; what lies before is read from the state.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from kvlens._tl import Attention, GroupedQueryAttention, HookPoint
from kvlens.components.decode_cache import LinearCacheEntry
from kvlens.components.features import FeatureMap
from kvlens.components.kv_shift import KVShiftAndHooks, real_tokens, through
from kvlens.errors import KVLensError
from kvlens.ops.linear_attention import (
    LinearAttentionOutput,
    LinearAttentionState,
    causal_scores,
    chunked_linear_attention,
    final_state,
    parallel_linear_attention,
    read_state,
    real_steps,
    recurrent_linear_attention,
    running_normalizer,
    without_padding,
)
from kvlens.ops.rotary import RotaryTable, rotate

FORMS = {
    "parallel": parallel_linear_attention,
    "chunked": chunked_linear_attention,
    "recurrent": recurrent_linear_attention,
}


class _Linear(KVShiftAndHooks):
    """Mixed in before TransformerLens' attention classes, whose projections it uses."""

    hook_phi_q: HookPoint
    hook_phi_k: HookPoint
    hook_b_kv: HookPoint
    hook_b_d: HookPoint
    hook_normalizer: HookPoint
    hook_z_context: HookPoint
    hook_z_bias: HookPoint
    b_KV: nn.Parameter
    b_D: nn.Parameter

    def __init__(self, cfg: Any, attn_type: str = "global", layer_id: int | None = None):
        super().__init__(cfg, attn_type, layer_id)  # type: ignore[call-arg]
        self.add_hooks_and_shift()
        self.feature_map = FeatureMap(cfg, self.attn_scale)
        self.decay = cfg.decay_per_head()
        if cfg.trainable_kv_bias:
            shape = (cfg.n_heads, cfg.d_phi, cfg.d_head)
            self.b_KV = nn.Parameter(torch.zeros(shape, dtype=cfg.dtype))
            self.b_D = nn.Parameter(torch.zeros(shape[:2], dtype=cfg.dtype), requires_grad=cfg.normalizer == "kernel")
        if cfg.positional_embedding_type == "rotary":
            compute = functools.partial(
                self.calculate_sin_cos_rotary, cfg.rotary_dim, base=self._rotary_base(), dtype=torch.float64
            )
            self.rotary_table = RotaryTable(compute)

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: LinearCacheEntry | None = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_bias: Tensor | None = None,
    ) -> Tensor:
        """[batch, pos, d_model] from [batch, pos, d_model] or [batch, pos, head, d_model], as TransformerLens' attention."""
        if additive_attention_mask is not None or position_bias is not None:
            raise KVLensError("linear attention has no softmax scores to add a mask or position bias to")
        self._check_batch(query_input.shape[0])
        entry = past_kv_cache_entry
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        mask = real_tokens(attention_mask, q.shape[1], q.device)
        shifted, boundary = self.shift({"q": q, "k": k, "v": v}, {} if entry is None else entry.boundary, mask)
        accumulate = torch.promote_types(q.dtype, self.cfg.accumulates_in)
        n_before = 0 if entry is None else entry.n_tokens
        with torch.autocast(q.device.type, enabled=False):  # or it would round the products below to its own dtype
            q, k, v = (shifted[x].to(accumulate) for x in "qkv")
            phi_q, phi_k, norm_q, norm_k = self._features(q, k, n_before, mask)
            bias = self._read_bias(accumulate)
            z, state = self._attend(phi_q, phi_k, norm_q, norm_k, v, bias, entry, n_before, mask)
        if entry is not None and not entry.frozen:
            entry.state, entry.boundary, entry.bias = state, boundary, bias
            entry.n_tokens = n_before + (q.shape[1] if mask is None else mask.sum(dim=1))
            entry.n_places += q.shape[1]
        return self._project(self.hook_z(z.to(self.W_O.dtype)))

    def _check_batch(self, batch: int) -> None:
        n_prompts = 1 if self.layer_bias is None else self.layer_bias.b_kv.shape[0]
        if n_prompts not in (1, batch):
            raise KVLensError(
                f"the attached bias holds {n_prompts} prompts and the input has batch {batch}: give one row of input a prompt, "
                "or attach the bias of a single prompt, which serves every row"
            )

    def _features(
        self, q: Tensor, k: Tensor, n_before: int | Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """phi~ of the numerator and phi of the normaliser (None under "none")."""
        rotary, after = self.cfg.positional_embedding_type == "rotary", self.cfg.rotates_after
        if rotary:
            cos, sin = self._rotary_rows(q, n_before, mask)
        if rotary and not after:
            q = self.hook_rot_q(rotate(q, cos, sin, self.cfg.rotary_adjacent_pairs))
            k = self.hook_rot_k(rotate(k, cos, sin, self.cfg.rotary_adjacent_pairs))
        phi_q = norm_q = through(self.hook_phi_q, self.feature_map(q))
        phi_k = norm_k = through(self.hook_phi_k, self.feature_map(k))
        if rotary and after:
            phi_q = self.hook_rot_q(rotate(phi_q, cos, sin, self.cfg.rotary_adjacent_pairs))
            phi_k = self.hook_rot_k(rotate(phi_k, cos, sin, self.cfg.rotary_adjacent_pairs))
        if self.cfg.normalizer == "none":
            return phi_q / self.attn_scale, phi_k, None, None
        return phi_q, phi_k, norm_q, norm_k

    def _rotary_rows(self, q: Tensor, n_before: int | Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """cos, sin of the new tokens' positions, [batch or 1, pos, 1, rotary_dim]."""
        offset = 0 if self.layer_bias is None else self.layer_bias.position_offset
        first = n_before + offset
        if isinstance(first, int) and mask is None:
            cos, sin = self.rotary_table.rows(first, q.shape[1], q.device, q.dtype)
            return cos[None, :, None], sin[None, :, None]
        ranks = (real_steps(mask, q) - 1).clamp(min=0)
        positions = ranks + (first[:, None].to(q.device) if isinstance(first, Tensor) else first)
        cos, sin = self.rotary_table.at(positions, q.dtype)
        return cos[:, :, None], sin[:, :, None]

    def _read_bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
        """(b_KV, b_D) through their hooks: the attached bias, else the trained one, else None. b_D is None under "none"."""
        if self.layer_bias is not None:
            b_kv, b_d = self.layer_bias.b_kv, self.layer_bias.b_d
        elif self.cfg.trainable_kv_bias:
            b_kv, b_d = self.b_KV[None], self.b_D[None]
        else:
            return None
        b_kv = through(self.hook_b_kv, b_kv.to(self.W_O.device, dtype))
        return b_kv, through(self.hook_b_d, b_d.to(self.W_O.device, dtype)) if self.cfg.normalizer == "kernel" else None

    def _attend(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        norm_q: Tensor | None,
        norm_k: Tensor | None,
        v: Tensor,
        bias: tuple[Tensor, Tensor | None] | None,
        entry: LinearCacheEntry | None,
        n_before: int | Tensor,
        mask: Tensor | None,
    ) -> tuple[Tensor, LinearAttentionState]:
        """z [batch, pos, head, d_head] and the context's state after the last token."""
        decay = None if self.decay is None else self.decay.to(v)
        if decay is not None and phi_k.shape[2] != phi_q.shape[2]:  # gamma is the query head's: the state must be as well
            phi_k, v = (x.repeat_interleave(phi_q.shape[2] // x.shape[2], dim=2) for x in (phi_k, v))
        before = None if entry is None else entry.state
        pattern_hooked = self.hook_attn_scores.has_hooks() or self.hook_pattern.has_hooks()
        form = self._form(phi_q.shape[1], entry, pattern_hooked)
        if not pattern_hooked:
            out = FORMS[form](phi_q, phi_k, v, norm_q, norm_k, decay, mask, before)
            n = self._normalizer(out.normalizer, norm_q, bias, mask)
            z_context = out.numerator if n is None else out.numerator / n
        else:
            n_context = None
            if norm_q is not None and norm_k is not None:
                n_context = running_normalizer(norm_q, norm_k, mask, None if before is None else before.k_sum)
            n = self._normalizer(n_context, norm_q, bias, mask)
            z_context = self._through_pattern(phi_q, phi_k, v, decay, mask, before, n)
            out = LinearAttentionOutput(z_context, n, final_state(phi_k, v, norm_k, decay, mask, before))
        if bias is None:
            return z_context, out.state
        z_bias = read_state(phi_q, bias[0], decay, self._steps(phi_q, n_before, mask))
        z_bias = self.hook_z_bias(z_bias if n is None else z_bias / n)
        return self.hook_z_context(z_context) + z_bias, out.state

    def _form(self, pos: int, entry: LinearCacheEntry | None, pattern_hooked: bool) -> str:
        wanted = self.cfg.linear_attention_form
        if wanted == "auto":
            decoding = entry is not None and pos == 1
            return "parallel" if pattern_hooked else "recurrent" if decoding else "chunked"
        if pattern_hooked and wanted != "parallel":
            raise KVLensError(
                f"hook_attn_scores or hook_pattern is hooked, which only the parallel form computes, and "
                f"cfg.linear_attention_form={wanted!r} forbids it: set it to 'auto', or leave those two out of names_filter"
            )
        return wanted

    def _normalizer(
        self,
        n_context: Tensor | None,
        norm_q: Tensor | None,
        bias: tuple[Tensor, Tensor | None] | None,
        mask: Tensor | None,
    ) -> Tensor | None:
        """n_i [batch, pos, head, 1], bias included, 1 at padded places; None under "none"."""
        if n_context is None or norm_q is None:
            return None
        if bias is not None and bias[1] is not None:
            n_context = n_context + read_state(norm_q, bias[1].unsqueeze(-1)).squeeze(-1)
        if mask is not None:
            n_context = torch.where(mask[:, :, None], n_context, 1.0)
        return self.hook_normalizer(n_context).unsqueeze(-1)

    def _through_pattern(
        self,
        phi_q: Tensor,
        phi_k: Tensor,
        v: Tensor,
        decay: Tensor | None,
        mask: Tensor | None,
        before: LinearAttentionState | None,
        n: Tensor | None,
    ) -> Tensor:
        """The context's part of z by way of the hooked scores and pattern."""
        v = v if mask is None else without_padding(v, mask)
        scores = self.hook_attn_scores(causal_scores(phi_q, phi_k, decay, mask))
        pattern = through(self.hook_pattern, scores if n is None else scores / n.permute(0, 2, 1, 3))
        values = v.repeat_interleave(pattern.shape[1] // v.shape[2], dim=2).transpose(1, 2)
        z_context = (pattern @ values).transpose(1, 2)
        if before is None:
            return z_context
        read = read_state(phi_q, before.kv, decay, self._steps(phi_q, 0, mask))
        return z_context + (read if n is None else read / n)

    @staticmethod
    def _steps(phi_q: Tensor, n_before: int | Tensor, mask: Tensor | None) -> Tensor:
        """Real tokens up to and with each place, those before the new ones included: [batch or 1, pos]."""
        return real_steps(mask, phi_q) + (n_before[:, None].to(phi_q.device) if isinstance(n_before, Tensor) else n_before)

    def _project(self, z: Tensor) -> Tensor:
        """z W_O + b_O, through ``hook_result`` where the configuration asks for it."""
        if not self.cfg.use_attn_result:
            return nn.functional.linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)
        result = self.hook_result(torch.einsum("bphd,hdm->bphm", z, self.W_O))
        return result.sum(dim=2) + self.b_O


class LinearAttention(_Linear, Attention):
    """One key-value head a query head."""


class GroupedLinearAttention(_Linear, GroupedQueryAttention):
    """Grouped-query attention: the state is a key-value head's, the bias a query head's."""
