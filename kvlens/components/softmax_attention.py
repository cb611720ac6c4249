"""Softmax attention as a TransformerLens attention, with KV shift, a KV bias in log space, and torch's fused kernel.

    z_i = (sum_j exp(s_ij) v_j + phi(q_i)^T b_KV) / (sum_j exp(s_ij) + phi(q_i)^T b_D)          (ICLCA sec. 5, ICLAA)

With everything off, every line that runs is TransformerLens'. Otherwise the *eager* form runs TransformerLens' own steps one
by one (scores, mask, pattern), and the *fused* form hands q, k and v to torch's kernel, in every layer whose scores and
pattern nobody hooks. Where nothing that lies between is hooked, the eager form takes virtual keys of positive weight as keys in
front of the text's, through the same softmax: the sums of a pass with the prompt in front, in their order, so that scores of
thousands round alike in both.

``hook_pattern`` is exp(s_ij) over the whole normalizer, so that its rows sum to less than 1 under a bias; ``hook_normalizer``
is the normalizer's logarithm, and fires under a bias only; ``hook_phi_q`` are the query's features up to their scale, the
largest of which is about 1 (their true size may overflow).

Inside TransformerLens 3.9 it relies on ``calculate_attention_scores``, ``apply_causal_mask``, ``apply_rotary``,
``_extend_rotary_embeddings``, ``_apply_logn_scaling``, ``create_alibi_bias`` and ``create_alibi_slope``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvlens._tl import (
    AbstractAttention,
    Attention,
    GroupedQueryAttention,
    TransformerLensKeyValueCacheEntry,
    get_offset_position_ids,
)
from kvlens.components.fast_path import is_hooked, runs_fused
from kvlens.components.kv_attention import KVAttention
from kvlens.components.kv_shift import through
from kvlens.components.pieces import HeadOutputs, Piece
from kvlens.components.positions import all_take_positions
from kvlens.errors import KVLensError
from kvlens.kv_bias import VirtualKeys
from kvlens.ops.attention_variants import ridge_attention
from kvlens.ops.rotary import rotate
from kvlens.ops.softmax_attention import (
    JoinedBias,
    KeysBeside,
    ScaledMass,
    attend_beside,
    fused_beside,
    fused_softmax_attention,
    join_bias,
    visible_keys,
)
from kvlens.ops.softmax_features import ScoreRule, distance_scores


class _Softmax(KVAttention):
    """Mixed in before TransformerLens' attention classes, whose steps it uses."""

    alibi: Tensor | None
    observer: Callable[[Tensor, Tensor, Tensor], None] | None = None
    """Sees the queries, and all keys and values so far, as they are scored; set while a prompt is converted."""

    def forward(self, query_input, key_input, value_input, past_kv_cache_entry=None, *args, **kwargs):  # noqa: ANN001
        """As ``transformer_lens.components.AbstractAttention.forward``, which runs where nothing is added to it."""
        if self.cfg.positional_embedding_type == "alibi":
            past = 0 if past_kv_cache_entry is None else past_kv_cache_entry.past_keys.shape[1]
            self._grow_alibi(past + key_input.shape[1], key_input.device)
        unseen = self.layer_bias is None and self.observer is None
        plain = (
            self.cfg.kv_shift is None
            and unseen
            and self.variant is None
            and not self._runs_fused()
            and not all_take_positions()
            and not self._alibi_meets_sinks
        )
        run = AbstractAttention.forward if plain else KVAttention.forward
        return run(self, query_input, key_input, value_input, past_kv_cache_entry, *args, **kwargs)

    @property
    def _alibi_meets_sinks(self) -> bool:
        """TransformerLens takes ALiBi's rows from the end of its table, in which a shorter text is further from every key.

        Softmax does not see what is the same for all keys of a query; beside a sink, which has no distance, it is off by 6 to
        20 %.
        """
        return self.cfg.positional_embedding_type == "alibi" and self.cfg.use_attention_sinks

    def attend(self, piece: Piece, entry: TransformerLensKeyValueCacheEntry | None) -> HeadOutputs:
        """z of the context and of the bias; the new keys and values go into ``entry``."""
        past = 0 if entry is None else entry.past_keys.shape[1]
        k, v = (piece.k, piece.v) if entry is None else entry.append(piece.k, piece.v)
        q, k = self._positioned(piece.q, k, past, piece.counted)
        if self.observer is not None:
            self.observer(q, k, v)
        if self.ridge is not None:
            return HeadOutputs(self._solved(q, k, v, piece.attention_mask, self.ridge), None, None)
        bias = self.read_bias(torch.promote_types(q.dtype, torch.float32))
        fused = self._runs_fused()
        beside = self._beside(bias, q, k, past, piece.counted)
        if beside is not None and _wants_gradient(q, k, v, beside.keys, beside.log_weights, beside.values):
            if self._is_plain_beside(piece):
                causal = self.cfg.attention_dir == "causal"
                visible = visible_keys(q.shape[1], k.shape[1], causal, window=self._window, device=q.device)
                return HeadOutputs(attend_beside(q, k, v, beside, float(self.attn_scale), visible), None, None)
            beside = None
        if beside is not None and not fused:
            return HeadOutputs(self._eager_beside(q, k, v, past, piece, beside, entry), None, None)
        needs_normalizer = bias is not None or self.cfg.use_attention_sinks
        if fused and not (needs_normalizer and _wants_gradient(q, k, v)):
            z, log_n = self._fused(q, k, v, piece, needs_normalizer)
            if log_n is not None and self.cfg.use_attention_sinks:
                z, log_n = self._with_sink(z, log_n)
            if log_n is None or bias is None:
                return HeadOutputs(z, None, None)
            if beside is not None:
                return HeadOutputs(fused_beside(z, log_n, q, beside, float(self.attn_scale)), None, None)
            joined = self._joined(z.to(log_n.dtype), ScaledMass.of_log(log_n), q, bias, past, piece.counted)
            return HeadOutputs(joined.z_context, joined.z_bias, self.hook_normalizer(joined.log_normalizer))
        return self._eager(q, k, v, past, piece, bias, entry)

    # --- the two forms -------------------------------------------------------------------------------------------------

    def _runs_fused(self) -> bool:
        hooked = is_hooked(self.hook_attn_scores, self.hook_pattern)
        return runs_fused(self.cfg) and not (hooked or self.needs_pattern or self.wants_own_share)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, piece: Piece, log_normalizer: bool) -> tuple[Tensor, Tensor | None]:
        score_bias = piece.score_bias
        if self.cfg.positional_embedding_type == "alibi":
            alibi = self.alibi[None, :, k.shape[1] - q.shape[1] : k.shape[1], : k.shape[1]]  # type: ignore[index]
            score_bias = alibi if score_bias is None else score_bias + alibi
        causal = self.cfg.attention_dir == "causal"
        padding = piece.attention_mask if causal else None  # TransformerLens' bidirectional attention sees padding
        padding = None if padding is None or bool(padding.all()) else padding.bool()
        return fused_softmax_attention(q, k, v, self.attn_scale, causal, padding, self._window, score_bias, log_normalizer)

    @property
    def _window(self) -> int | None:
        return self.cfg.window_size if self.attn_type == "local" else None

    def _beside(
        self, bias: tuple[Tensor, Tensor | None] | None, q: Tensor, k: Tensor, past: int, attention_mask: Tensor | None
    ) -> KeysBeside | None:
        """The attached virtual keys as keys of the text's own softmax, where nothing that lies between is hooked."""
        held = self.layer_bias
        if bias is None or bias[1] is None or held is None or held.log_scale is None:
            return None
        if not isinstance(held.features, VirtualKeys):
            return None
        between = (self.hook_attn_scores, self.hook_pattern, self.hook_phi_q, self.hook_normalizer, self.hook_z_context)
        if self.needs_pattern or self.wants_own_share or is_hooked(*between, self.hook_z_bias):
            return None
        if bias[0].shape[1] != k.shape[2]:  # single query heads were selected
            return None
        keys, distance = held.features.keys[held.layer].to(q), held.features.distance[held.layer].to(q.device)
        keys, distance = (keys, distance) if keys.dim() == 4 else (keys[None], distance[None])
        beside, rule = KeysBeside.of(keys, bias[0], bias[1], held.log_scale.to(q)), self.score_rule()
        if beside is None or not rule.needs_distance:
            return beside
        positions = _places(q, past, attention_mask)
        return beside._replace(by_distance=distance_scores(rule, distance, positions, q.shape[2]))

    def _is_plain_beside(self, piece: Piece) -> bool:
        """Whether scores are q.k / scale and at most a window, as the form for gradients has them."""
        rule = self.score_rule()
        more = rule.soft_cap is not None or rule.slopes is not None or self.cfg.use_attention_sinks
        return not more and piece.score_bias is None and not _is_padded(piece)

    def _eager_beside(self, q: Tensor, k: Tensor, v: Tensor, past: int, piece: Piece, beside: KeysBeside, entry: Any) -> Tensor:
        """z of one softmax over virtual keys and the text's, in TransformerLens' order: a prompt's own keys then round as they
        would in front of the text.
        """
        batch, r = q.shape[0], beside.keys.shape[2]
        keys, values = (x.expand(batch, -1, -1, -1).transpose(1, 2) for x in (beside.keys, beside.values))
        scores = self.calculate_attention_scores(q, torch.cat([keys, k], dim=1)).to(beside.log_weights.dtype)
        scores = torch.cat([scores[..., :r] + beside.added(q.shape[2]), self._masked(scores[..., r:], past, piece)], dim=-1)
        pattern = self._pattern(scores)
        return self.read_values(pattern, scores, scores > -torch.inf, torch.cat([values.to(v), v], dim=1), entry)

    def _masked(self, scores: Tensor, past: int, piece: Piece) -> Tensor:
        """Scores of the text's own keys with everything that is added to them."""
        n_queries, n_keys = scores.shape[-2:]
        if self.cfg.positional_embedding_type == "alibi":
            scores += self.alibi[:, n_keys - n_queries : n_keys, :n_keys]  # type: ignore[index]
        if self.cfg.attention_dir == "causal":
            scores = self.apply_causal_mask(scores, past, piece.attention_mask)
        return scores if piece.score_bias is None else scores + piece.score_bias

    def _eager(
        self, q: Tensor, k: Tensor, v: Tensor, past: int, piece: Piece, bias: tuple[Tensor, Tensor | None] | None, entry: Any
    ) -> HeadOutputs:
        """TransformerLens' steps, in its order and with its hooks."""
        scores = self.hook_attn_scores(self._masked(self.calculate_attention_scores(q, k), past, piece))
        if bias is None:
            pattern = self.hook_pattern(self._pattern(scores))
            z = self.read_values(pattern, scores, scores > -torch.inf, v, entry)
            return HeadOutputs(z, None, None, self._own_share(pattern, past))
        scores = scores.to(bias[0].dtype)
        ones = torch.ones((), device=q.device, dtype=scores.dtype).expand(*q.shape[:-1], 1)
        share, z_bias, log_whole = self._joined(ones, self._mass(scores), q, bias, past, piece.counted)
        log_whole = self.hook_normalizer(log_whole)
        pattern = self.hook_pattern(self._pattern(scores) * share.transpose(1, 2))
        z = self.read_values(pattern, scores, scores > -torch.inf, v, entry)
        return HeadOutputs(z, z_bias, log_whole, self._own_share(pattern, past))

    def _pattern(self, scores: Tensor) -> Tensor:
        if self.cfg.use_attention_sinks:
            sink = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
            pattern = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        else:
            pattern = scores.softmax(dim=-1)
        return torch.where(pattern.isnan(), torch.zeros_like(pattern), pattern)

    def _own_share(self, pattern: Tensor, past: int) -> Tensor | None:
        """p_ii of the new tokens, where it is asked for."""
        return pattern.diagonal(offset=past, dim1=-2, dim2=-1).transpose(1, 2) if self.wants_own_share else None

    def _solved(self, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, strength: float) -> Tensor:
        """z of ridge attention, whose kernel is exp(q.k / scale)."""
        q, k, v = (x.transpose(1, 2).double() for x in (q, k, v))
        k_of_q = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        kernel, at_queries = ((a @ b.transpose(-1, -2) / self.attn_scale).exp() for a, b in ((k, k), (q, k_of_q)))
        mask = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        return ridge_attention(kernel, at_queries, v, strength, mask).transpose(1, 2)

    def _mass(self, scores: Tensor) -> ScaledMass:
        """The context's normalizer relative to its largest term: as a logarithm it would be rounded by that term's size."""
        top = scores.detach().amax(dim=-1)
        if self.cfg.use_attention_sinks:
            top = torch.maximum(top, self.sinks.detach()[:, None].to(top))
        shift = top.masked_fill(top == -torch.inf, 0.0)  # inf - inf would be NaN
        mass = (scores - shift[..., None]).exp().sum(dim=-1)
        if self.cfg.use_attention_sinks:
            mass = mass + (self.sinks[:, None].to(mass) - shift).exp()
        return ScaledMass(mass.transpose(1, 2), top.transpose(1, 2))

    def _sinks_joined(self, log_n: Tensor) -> Tensor:
        """log n [batch, head, pos] with the sink's part in it, where there are sinks."""
        return log_n.logaddexp(self.sinks[:, None].to(log_n.dtype)) if self.cfg.use_attention_sinks else log_n

    def _with_sink(self, z: Tensor, log_n: Tensor) -> tuple[Tensor, Tensor]:
        whole = self._sinks_joined(log_n.transpose(1, 2)).transpose(1, 2)
        return z * (log_n - whole).exp()[..., None].to(z.dtype), whole

    # --- queries, keys and the bias's features --------------------------------------------------------------------------

    def _positioned(self, q: Tensor, k: Tensor, past: int, attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """q and k rotated (``k`` from the start of the text, ``q`` after ``past`` places), q scaled where the model does."""
        if self.cfg.positional_embedding_type == "rotary":
            q = self.hook_rot_q(self._rotated(q, past, attention_mask))
            k = self.hook_rot_k(self._rotated(k, 0, attention_mask))
        if self.cfg.use_logn_attn and not self.training:
            q = self._apply_logn_scaling(q, past)
        return q, k

    def _rotated(self, x: Tensor, first: int, attention_mask: Tensor | None) -> Tensor:
        offset = 0 if self.layer_bias is None else self.layer_bias.position_offset
        if isinstance(offset, int) and offset == 0 and not self._runs_fused():
            return self.apply_rotary(x, first, attention_mask)  # TransformerLens' own, bit for bit
        if self.cfg.use_dynamic_ntk_rope and not self.training:
            self._rescale_rotary_for_ntk(first + x.shape[1])
        cos, sin = self._rotary_rows(x, first, attention_mask, offset)
        if self._runs_fused():
            return rotate(x, cos, sin, self.cfg.rotary_adjacent_pairs)
        turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
        turned = turned * cos + self.rotate_every_two(turned) * sin  # TransformerLens' sums, which round as the prompt's did
        return torch.cat([turned, rest], dim=-1)

    def _rotary_rows(self, x: Tensor, first: int, attention_mask: Tensor | None, offset: int | Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of the places of ``x``, [batch or 1, pos, 1, rotary_dim], from TransformerLens' tables."""
        whole = attention_mask is None or bool(attention_mask.all())
        if whole and isinstance(offset, int):
            last = first + offset + x.shape[1]
            rows: Any = slice(first + offset, last)
        else:
            places = torch.arange(first, first + x.shape[1], device=x.device)[None]
            places = places if attention_mask is None else get_offset_position_ids(first, attention_mask)
            rows = places + (offset[:, None].to(places.device) if isinstance(offset, Tensor) else offset)
            last = int(rows.max()) + 1
        if last > self.rotary_cos.shape[0]:
            if last > self.cfg.n_ctx:
                raise KVLensError(
                    f"position {last - 1} (attached prompt included) lies beyond n_ctx={self.cfg.n_ctx}, for which the rotary "
                    "positions of this model are made: shorten the text or the prompt"
                )
            self._extend_rotary_embeddings(min(self.cfg.n_ctx, max(last, 2 * self.rotary_cos.shape[0])))
        cos, sin = self.rotary_cos[rows], self.rotary_sin[rows]
        return (cos[None, :, None], sin[None, :, None]) if cos.dim() == 2 else (cos[:, :, None], sin[:, :, None])

    def _joined(
        self,
        z: Tensor,
        mass: ScaledMass,
        q: Tensor,
        bias: tuple[Tensor, Tensor | None],
        past: int,
        attention_mask: Tensor | None,
    ) -> JoinedBias:
        """The attached bias joined to attention over the context, with the query's features through their hook."""
        b_kv, b_d = bias
        assert b_d is not None
        assert self.layer_bias is not None
        rule = self.score_rule()
        positions = _places(q, past, attention_mask) if rule.needs_distance else None
        phi = self.layer_bias.phi(q.to(mass.log_scale.dtype), rule, positions, b_kv, b_d)
        phi = phi._replace(features=through(self.hook_phi_q, phi.features))
        return join_bias(z, mass, phi, b_kv, b_d)

    def score_rule(self) -> ScoreRule:
        """How this layer scores a key, stored ones included."""
        slopes = None
        if self.cfg.positional_embedding_type == "alibi":
            self._grow_alibi(2, self.W_O.device)
            slopes = -self.alibi[:, 1, 0]  # type: ignore[index]
        cap = self.cfg.attn_scores_soft_cap
        return ScoreRule(float(self.attn_scale), cap if cap > 0 else None, slopes, self._window)

    def _grow_alibi(self, n: int, device: torch.device) -> None:
        """Have an ALiBi bias of sufficient size ready, with the slopes that were given; TransformerLens keeps what it finds."""
        if self.alibi is not None and self.alibi.shape[-1] >= n and self.alibi.device == device:
            return
        if self.cfg.alibi_slopes is None:
            self.alibi = AbstractAttention.create_alibi_bias(self.cfg.n_heads, n, device)
        else:
            slopes = self.W_Q.new_tensor(list(self.cfg.alibi_slopes))
            self.alibi = AbstractAttention.create_alibi_slope(n, device) * slopes[:, None, None]  # type: ignore[arg-type]


def _places(q: Tensor, past: int, attention_mask: Tensor | None) -> Tensor:
    """Positions of the queries within the text, [batch or 1, pos]."""
    if attention_mask is not None:
        return get_offset_position_ids(past, attention_mask)
    return torch.arange(past, past + q.shape[1], device=q.device)[None]


def _is_padded(piece: Piece) -> bool:
    return piece.attention_mask is not None and not bool(piece.attention_mask.all())


def _wants_gradient(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


class SoftmaxAttention(_Softmax, Attention):
    """One key-value head per query head."""


class GroupedSoftmaxAttention(_Softmax, GroupedQueryAttention):
    """Grouped-query attention; the shift has one coefficient vector per key-value head."""
