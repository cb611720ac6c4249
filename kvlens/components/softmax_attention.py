"""Softmax attention between q, k, v and z, with a KV bias in log space and torch's fused kernel.

    z_i = (sum_j exp(s_ij) v_j + phi(q_i)^T b_KV) / (sum_j exp(s_ij) + phi(q_i)^T b_D)          (ICLCA sec. 5, ICLAA)

q, k and v go to torch's kernel, which shows neither scores nor pattern: a layer in which one of them is hooked, or whose
scores have a soft cap, computes them one by one, as the base does, and so do the attention variants that need them.

``hook_pattern`` is exp(s_ij) over the whole normalizer, so that its rows sum to less than 1 with a bias; ``hook_normalizer``
is the normalizer's logarithm, and fires only with a bias; ``hook_phi_q`` is the query's features, scaled so that the largest
is about 1 (their true size may overflow).
"""

from typing import Any

import torch
from torch import Tensor
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.utilities import get_offset_position_ids

from kvlens.components.heads import HeadOutputs, Heads, NewTokens, given_places, is_hooked, read_values, through
from kvlens.kv_bias import Features, Keys
from kvlens.ops.attention_variants import ridge_attention
from kvlens.ops.rotary import rotate
from kvlens.ops.softmax_attention import (
    ExtraKeys,
    JoinedBias,
    ScaledMass,
    attend_with_extra_keys,
    fused_softmax_attention,
    join_bias,
    last_with_extra_keys,
    merge_extra_keys,
    visible_keys,
)
from kvlens.ops.softmax_features import distance_scores

FEW_KEYS = 1024
"""Virtual keys of all rows up to which one kernel call is the faster for a single query (9 heads of 64, 14 of 64, one thread:
127 microseconds instead of 527 of 128 keys, 680 instead of 1,140 of 1,024, and 8,000 instead of 6,000 of 8,192)."""


def runs_fused(attn: Any) -> bool:
    """Whether torch's kernel computes this layer: nothing is hooked or configured that it does not expose."""
    if attn.cfg.attn_scores_soft_cap > 0 or is_hooked(attn.hook_attn_scores, attn.hook_pattern):
        return False
    return attn.variant is None or not (attn.variant.needs_pattern or attn.variant.wants_own_share)


class SoftmaxHeads(Heads):
    """The heads of one layer with softmax attention, for one forward pass.

    | case | z is computed by |
    |---|---|
    | ridge attention | ``_solved`` |
    | no bias | ``_fused`` where :func:`runs_fused`, else ``_by_steps`` |
    | virtual keys of positive weight, no phi(q) or summand of z hooked | ``_fused`` for the text, ``merge_extra_keys`` |
    | ... and one query, few keys, plain scores, log n not hooked | ``last_with_extra_keys`` |
    | ... and gradients, log n not hooked, plain scores | ``attend_with_extra_keys``; with others as for any other bias |
    | any other bias | ``_fused`` or, with gradients, ``_by_steps`` for the text, joined to the bias by ``_joined`` |
    """

    entry: TransformerLensKeyValueCacheEntry | None
    q: Tensor
    k: Tensor
    v: Tensor
    """Queries of the new tokens and keys and values of the whole text, as scored."""

    def __init__(self, attn: Any, tokens: NewTokens, entry: TransformerLensKeyValueCacheEntry | None):
        super().__init__(attn, tokens, entry)
        self.past = 0 if entry is None else entry.past_keys.shape[1]
        self.fused = runs_fused(attn)
        variant = attn.variant
        self.ridge = None if variant is None or variant.ridge is None else variant.ridge.strength
        self.wants_own_share = variant is not None and variant.wants_own_share

    def outputs(self) -> HeadOutputs:
        """z of the context and of the bias; the new keys and values are stored in the cache entry."""
        attn, tokens, scale = self.attn, self.tokens, float(self.attn.attn_scale)
        k, self.v = (tokens.k, tokens.v) if self.entry is None else self.entry.append(tokens.k, tokens.v)
        self.q, self.k = attn.with_positions(tokens.q, k, self.past, self._rotated)
        q, k, v = self.q, self.k, self.v
        if attn.observer is not None:
            attn.observer(q, k, v)
        if self.ridge is not None:
            return HeadOutputs(self._solved(self.ridge))
        bias = None
        if attn.layer_bias is not None:
            wide = torch.promote_types(q.dtype, torch.float32)
            bias = attn.layer_bias.through_hooks(attn, q.shape[2], q.device, wide)
        extra = self._extra_keys(bias) if self.fused and bias is not None else None
        gradient = extra is not None and _wants_gradient(q, k, v, *extra[:3])
        if gradient and (is_hooked(attn.hook_normalizer) or not self._scores_are_plain()):
            extra = None
        if extra is not None:
            if attn.normalizers is not None:
                attn.normalizers.see_positive(q[..., 0])
            if gradient:
                causal = self.cfg.attention_dir == "causal"
                visible = visible_keys(q.shape[1], k.shape[1], causal, window=attn.window, device=q.device)
                return HeadOutputs(attend_with_extra_keys(q, k, v, extra, scale, visible))
            if self._is_one_step(extra):
                return HeadOutputs(last_with_extra_keys(q, k, v, extra, scale))
        needs_normalizer = bias is not None or self.cfg.use_attention_sinks
        if not self.fused or (needs_normalizer and _wants_gradient(q, k, v)):
            return self._by_steps(bias)
        z, log_n = self._fused(needs_normalizer)
        if log_n is not None and self.cfg.use_attention_sinks:
            z, log_n = self._with_sink(z, log_n)
        if log_n is None or bias is None:
            return HeadOutputs(z)
        if extra is not None:
            z, log_n = merge_extra_keys(z, log_n, q, extra, scale)
            attn.hook_normalizer(log_n)
            return HeadOutputs(z)
        joined = self._joined(z.to(log_n.dtype), ScaledMass.of_log(log_n), bias)
        return HeadOutputs(joined.z_context, joined.z_bias)

    def _fused(self, log_normalizer: bool) -> tuple[Tensor, Tensor | None]:
        n_queries, n_keys, score_bias = self.q.shape[1], self.k.shape[1], self.tokens.score_bias
        if self.cfg.positional_embedding_type == "alibi":
            alibi = self.attn.alibi_bias(n_keys, self.q.device)[None, :, n_keys - n_queries : n_keys, :n_keys]
            score_bias = alibi if score_bias is None else score_bias + alibi
        causal = self.cfg.attention_dir == "causal"
        padding = self.tokens.attention_mask if causal else None  # the base's bidirectional attention sees padding
        padding = None if padding is None or bool(padding.all()) else padding.bool()
        scale, window = self.attn.attn_scale, self.attn.window
        return fused_softmax_attention(self.q, self.k, self.v, scale, causal, padding, window, score_bias, log_normalizer)

    def _extra_keys(self, bias: Features) -> ExtraKeys | None:
        """The attached virtual keys as additional keys of the text's own softmax; None where that cannot express them, or the
        query's features or a summand of z is hooked."""
        attn, n_kv_heads = self.attn, self.k.shape[2]
        if is_hooked(attn.hook_phi_q, attn.hook_z_context, attn.hook_z_bias):
            return None
        if not isinstance(bias, Keys) or not bias.n_heads == bias.keys.shape[1] == n_kv_heads:
            return None  # a group's query heads read different things
        extra, rule = attn.layer_bias.extra_keys(bias, self.q.dtype), attn.score_rule()
        if extra is None or not rule.needs_distance:
            return extra
        distance = bias.distance.to(self.q.device)
        return extra._replace(by_distance=distance_scores(rule, distance, self._query_positions(), self.q.shape[2]))

    def _is_one_step(self, extra: ExtraKeys) -> bool:
        """Whether a single query is read with so few virtual keys that a copy of them takes less time than a second kernel."""
        n_keys = len(self.q) * extra.log_weights.shape[-1]
        if self.q.shape[1] != 1 or n_keys > FEW_KEYS or is_hooked(self.attn.hook_normalizer) or not self._scores_are_plain():
            return False
        return extra.by_distance is None and self.q.dtype == extra.log_weights.dtype

    def _scores_are_plain(self) -> bool:
        """Whether scores are q.k / scale with at most a window, the only kind that the form with gradients supports."""
        rule, mask = self.attn.score_rule(), self.tokens.attention_mask
        more = rule.soft_cap is not None or rule.slopes is not None or self.cfg.use_attention_sinks
        padded = mask is not None and not bool(mask.all())
        return not more and self.tokens.score_bias is None and not padded

    def _masked(self, scores: Tensor) -> Tensor:
        """Scores of the text's own keys, including everything that is added to them."""
        scores = self.attn.masked_scores(scores, self.past, self.tokens.attention_mask)
        return scores if self.tokens.score_bias is None else scores + self.tokens.score_bias

    def _by_steps(self, bias: Features | None) -> HeadOutputs:
        """The base's steps, in its order and with its hooks."""
        attn = self.attn
        scores = attn.hook_attn_scores(self._masked(attn.calculate_attention_scores(self.q, self.k)))
        if bias is None:
            z_bias, pattern = None, attn.hook_pattern(attn.pattern_of(scores))
        else:
            scores = scores.to(bias.b_kv.dtype)
            ones = torch.ones((), device=self.q.device, dtype=scores.dtype).expand(*self.q.shape[:-1], 1)
            mass = ScaledMass.of_scores(scores, attn.sinks if self.cfg.use_attention_sinks else None)
            share, z_bias, _ = self._joined(ones, mass, bias)
            pattern = attn.hook_pattern(attn.pattern_of(scores) * share.transpose(1, 2))
        z = read_values(attn, pattern, scores, None, self.v, self.entry)
        return HeadOutputs(z, z_bias, self._own_share(pattern))

    def _own_share(self, pattern: Tensor) -> Tensor | None:
        """p_ii of the new tokens, if a variant needs it."""
        return pattern.diagonal(offset=self.past, dim1=-2, dim2=-1).transpose(1, 2) if self.wants_own_share else None

    def _solved(self, strength: float) -> Tensor:
        """z of ridge attention, whose kernel is exp(q.k / scale)."""
        q, k, v = (x.transpose(1, 2).double() for x in (self.q, self.k, self.v))
        k_of_q = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        kernel, at_queries = ((a @ b.transpose(-1, -2) / self.attn.attn_scale).exp() for a, b in ((k, k), (q, k_of_q)))
        mask = self.tokens.attention_mask
        mask = None if mask is None or bool(mask.all()) else mask.bool()
        return ridge_attention(kernel, at_queries, v, strength, mask).transpose(1, 2)

    def _with_sink(self, z: Tensor, log_n: Tensor) -> tuple[Tensor, Tensor]:
        """z and log n with the sink in the normalizer."""
        whole = log_n.logaddexp(self.attn.sinks.to(log_n.dtype))
        return z * (log_n - whole).exp()[..., None].to(z.dtype), whole

    def _rotated(self, x: Tensor, first: int) -> Tensor:
        offset = 0 if self.attn.layer_bias is None else self.attn.layer_bias.position_offset
        cos, sin = self._rotary_rows(x, first, offset)
        return rotate(x, cos, sin, self.cfg.rotary_adjacent_pairs)

    def _rotary_rows(self, x: Tensor, first: int, offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of the positions of ``x``, [batch or 1, pos, 1, rotary_dim], from the layer's tables."""
        attn, mask = self.attn, self.tokens.counted
        whole = given_places() is None and (mask is None or bool(mask.all()))
        if whole and isinstance(offset, int):
            last = first + offset + x.shape[1]
            rows: slice | Tensor = slice(first + offset, last)
        else:
            rows = self._positions(x, first) + (offset[:, None].to(x.device) if isinstance(offset, Tensor) else offset)
            last = int(rows.max()) + 1
        attn.grow_rotary(last)
        cos, sin = attn.rotary_cos[rows], attn.rotary_sin[rows]
        return (cos[None, :, None], sin[None, :, None]) if cos.dim() == 2 else (cos[:, :, None], sin[:, :, None])

    def _positions(self, x: Tensor, first: int) -> Tensor:
        """Positions of ``x`` within the text, its first row at position ``first``: [batch or 1, pos]."""
        mask, given = self.tokens.counted, given_places()
        if given is not None:
            return given
        if mask is not None:
            return get_offset_position_ids(first, mask)
        return torch.arange(first, first + x.shape[1], device=x.device)[None]

    def _query_positions(self) -> Tensor:
        return self._positions(self.q, self.past)

    def _joined(self, z: Tensor, mass: ScaledMass, bias: Features) -> JoinedBias:
        """Join the attached bias to attention over the context; the query's features and the normalizer pass their hooks."""
        attn, rule = self.attn, self.attn.score_rule()
        positions = self._query_positions() if rule.needs_distance else None
        phi = bias.phi(self.q.to(mass.log_scale.dtype), rule, positions)
        phi = phi._replace(features=through(attn.hook_phi_q, phi.features))
        joined = join_bias(z, mass, phi, bias.b_kv, bias.b_d)
        if attn.normalizers is not None:
            attn.normalizers.see(joined.below_zero())
        attn.hook_normalizer(joined.log_normalizer)
        return joined


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
