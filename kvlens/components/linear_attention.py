"""Linear attention between q, k, v and z (ICLCA eq. 12-13).

    z_i = (phi~(q_i)^T A_i + phi~(q_i)^T gamma^{i+1} b_KV) / (phi(q_i)^T D_i + phi(q_i)^T b_D)

A and D belong to the context alone; the bias is read separately, so that the two summands of ``hook_z`` are exact. With
normalizer "none" the denominator is ``attn_scale``. Everything between the projections and ``hook_z`` is computed in float32 or
better, whatever the model's dtype.

``hook_attn_scores`` and ``hook_pattern`` are computed only by the parallel form, with pos x pos scores, which runs if something
is hooked to them and for short texts, where it takes no longer than chunks. With a decode cache they cover the new tokens, and
earlier tokens are read from the state. With negative samples they are always computed, and cover all tokens so far.
"""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvlens.components.config import AttentionConfig
from kvlens.components.decode_cache import LinearCacheEntry, SeenTokens
from kvlens.components.feature_maps import FEATURE_MAPS
from kvlens.components.heads import HeadOutputs, Heads, NewTokens, is_hooked, read_values, through
from kvlens.components.layer_bias import of_one_shape
from kvlens.errors import KVLensError
from kvlens.ops.attention_variants import ridge_attention, ridge_state, ridge_steps
from kvlens.ops.linear_attention import (
    LinearAttentionState,
    causal_scores,
    chunked_linear_attention,
    final_state,
    read_state,
    real_steps,
    recurrent_linear_attention,
    running_normalizer,
    without_padding,
)
from kvlens.ops.rotary import RotaryTable, rotate

WITHOUT_SCORES = {"chunked": chunked_linear_attention, "recurrent": recurrent_linear_attention}
"""The forms that never hold all scores; the parallel form's steps are those of :class:`LinearHeads`, with hooks between."""
LONGEST_PARALLEL = 128
"""Tokens for which all scores at once take no longer than in chunks."""


class TokenFeatures(NamedTuple):
    """The features of new tokens: for the numerator, for the normalizer (None under "none"), and the values.

    ``made_of`` holds the inputs of the feature map, queries and keys.
    """

    phi_q: Tensor
    phi_k: Tensor
    norm_q: Tensor | None
    norm_k: Tensor | None
    v: Tensor
    made_of: tuple[Tensor, Tensor]

    def hidden(self, mask: Tensor) -> "TokenFeatures":
        """The same, except that tokens outside ``mask`` [batch, pos] write nothing, though they keep their positions."""
        norm_k = None if self.norm_k is None else without_padding(self.norm_k, mask)
        return self._replace(phi_k=without_padding(self.phi_k, mask), v=without_padding(self.v, mask), norm_k=norm_k)


def accumulates_in(cfg: AttentionConfig) -> torch.dtype:
    """The dtype of linear attention: ``accumulation_dtype``, or wider if the model or its feature map needs it."""
    least = "float64" if FEATURE_MAPS[cfg.feature_map].needs_float64 else cfg.accumulation_dtype
    return torch.promote_types(cfg.dtype, getattr(torch, least))


class LinearHeads(Heads):
    """The heads of one layer with linear attention, for one forward pass."""

    entry: LinearCacheEntry | None

    def __init__(self, attn: Any, tokens: NewTokens, entry: LinearCacheEntry | None):
        super().__init__(attn, tokens, entry)
        self.state, self.n_before = (None, 0) if entry is None else (entry.state, entry.n_tokens)
        self.mask = None if tokens.counted is None else tokens.mask  # real tokens; the others take up no position
        self.needs_pattern = attn.variant is not None and attn.variant.needs_pattern
        self.updates = entry is not None and not entry.frozen

    @classmethod
    def add_parameters(cls, attn: Any, cfg: AttentionConfig) -> None:
        """Add the feature map, decay, trained bias and rotary table."""
        attn.feature_map = FEATURE_MAPS[cfg.feature_map](cfg, attn.attn_scale)
        attn.decay = cfg.decay_per_head()
        if cfg.trainable_kv_bias:
            shape = (cfg.n_heads, FEATURE_MAPS[cfg.feature_map].d_phi(cfg), cfg.d_head)
            attn.b_KV = nn.Parameter(torch.zeros(shape, dtype=cfg.dtype))
            attn.b_D = nn.Parameter(torch.zeros(shape[:2], dtype=cfg.dtype), requires_grad=cfg.normalizer == "kernel")
        if cfg.positional_embedding_type == "rotary":
            compute = functools.partial(
                attn.calculate_sin_cos_rotary, cfg.rotary_dim, base=attn.rotary_base, dtype=torch.float64
            )
            attn.rotary_table = RotaryTable(compute)

    @classmethod
    @torch.no_grad()
    def init_parameters(cls, attn: Any, generator: torch.Generator | None) -> None:
        """Initialize the feature map, and b_KV and b_D to 0."""
        attn.feature_map.init_weights(generator)
        if attn.cfg.trainable_kv_bias:
            nn.init.zeros_(attn.b_KV)
            nn.init.zeros_(attn.b_D)

    def outputs(self) -> HeadOutputs:
        """z of the context and of the bias; the state after the tokens is stored in the cache entry."""
        tokens, entry, mask = self.tokens, self.entry, self.mask
        if tokens.score_bias is not None:
            raise KVLensError("linear attention has no softmax scores to add a mask or position bias to")
        accumulate = torch.promote_types(tokens.q.dtype, accumulates_in(self.cfg))
        device = tokens.q.device.type  # of an autocast that would round the products below to its own dtype
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext():
            features = self._features(*(x.to(accumulate) for x in (tokens.q, tokens.k, tokens.v)))
            if mask is None and tokens.mask is not None:
                features = features.hidden(tokens.mask)
            bias = self._bias(accumulate)
            variant = self.attn.variant
            if variant is not None and variant.ridge is not None:
                return self._solved(features, variant.ridge.strength)
            heads, state = self._attend(features, bias)
        if entry is not None and self.updates:
            entry.state, entry.bias = state, bias
            entry.count(tokens.q.shape[1], mask)
        return heads

    def _features(self, q: Tensor, k: Tensor, v: Tensor) -> TokenFeatures:
        """phi~ of the numerator and phi of the normalizer."""
        rotary, after = self.cfg.positional_embedding_type == "rotary", self.cfg.rotates_after
        if rotary:
            cos, sin = self._rotary_rows(q)
        if rotary and not after:
            q = self.attn.hook_rot_q(rotate(q, cos, sin, self.cfg.rotary_adjacent_pairs))
            k = self.attn.hook_rot_k(rotate(k, cos, sin, self.cfg.rotary_adjacent_pairs))
        made_of = (q, k)
        phi_q = norm_q = through(self.attn.hook_phi_q, self.attn.feature_map(q))
        phi_k = norm_k = through(self.attn.hook_phi_k, self.attn.feature_map(k))
        if rotary and after:
            phi_q = self.attn.hook_rot_q(rotate(phi_q, cos, sin, self.cfg.rotary_adjacent_pairs))
            phi_k = self.attn.hook_rot_k(rotate(phi_k, cos, sin, self.cfg.rotary_adjacent_pairs))
        if self.cfg.normalizer == "none":
            return TokenFeatures(phi_q / self.attn.attn_scale, phi_k, None, None, v, made_of)
        return TokenFeatures(phi_q, phi_k, norm_q, norm_k, v, made_of)

    def _bias(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
        """(b_KV, b_D) after their hooks: of the attached bias, otherwise the trained one, else None.

        b_D is None under normalizer "none".
        """
        attn, attached = self.attn, self.attn.layer_bias
        if attached is None and not self.cfg.trainable_kv_bias:
            return None
        bias = (attn.b_KV[None], attn.b_D[None]) if attached is None else (attached.part.b_kv, attached.part.b_d)
        hooked = is_hooked(attn.hook_b_kv, attn.hook_b_d)
        if hooked and attached is not None:
            bias = attached.of_every_prompt(bias[0]), attached.of_every_prompt(bias[1])
        b_kv, b_d = (b.to(attn.W_O.device, dtype) for b in bias)
        if hooked:
            b_kv = of_one_shape(attn.hook_b_kv, b_kv)
        if self.cfg.normalizer == "none":
            return b_kv, None
        return b_kv, of_one_shape(attn.hook_b_d, b_d) if hooked else b_d

    def _rotary_rows(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """cos, sin of the new tokens' positions, [pos, 1, rotary_dim], with a batch axis in front where rows differ."""
        attn, mask = self.attn, self.mask
        first = self.n_before + (0 if attn.layer_bias is None else attn.layer_bias.position_offset)
        if isinstance(first, int) and mask is None:
            cos, sin = attn.rotary_table.rows(first, q.shape[1], q.device, q.dtype)
            return cos.unsqueeze(1), sin.unsqueeze(1)
        ranks = (real_steps(mask, q) - 1).clamp(min=0)
        positions = ranks + (first[:, None].to(q.device) if isinstance(first, Tensor) else first)
        cos, sin = attn.rotary_table.at(positions, q.dtype)
        return cos[:, :, None], sin[:, :, None]

    def _attend(
        self, features: TokenFeatures, bias: tuple[Tensor, Tensor | None] | None
    ) -> tuple[HeadOutputs, LinearAttentionState | None]:
        """The two summands of z, and the context's state after the last token (None where the parallel form needs none)."""
        attn, mask = self.attn, self.mask
        phi_q, phi_k, norm_q, norm_k, v, _ = features
        decay = None if attn.decay is None else attn.decay.to(v)
        if decay is not None and phi_k.shape[2] != phi_q.shape[2]:  # gamma is the query head's: the state must be as well
            phi_k, v = (x.repeat_interleave(phi_q.shape[2] // x.shape[2], dim=2) for x in (phi_k, v))
            features = features._replace(phi_k=phi_k, v=v)
        pattern_hooked = is_hooked(attn.hook_attn_scores, attn.hook_pattern) or self.needs_pattern
        form = self._form(phi_q.shape[1], pattern_hooked)
        state: LinearAttentionState | None = None
        if form == "parallel":
            n_context = None
            if norm_q is not None and norm_k is not None:
                k_sum = None if self.state is None else self.state.k_sum
                n_context = running_normalizer(norm_q, norm_k, mask, k_sum)
            n = self._normalizer(n_context, norm_q, bias)
            divisor = self._divisor(n, features)
            z_context = self._through_pattern(features, decay, divisor)
            if self.updates:
                state = final_state(phi_k, v, norm_k, decay, mask, self.state)
        else:
            out = WITHOUT_SCORES[form](phi_q, phi_k, v, norm_q, norm_k, decay, mask, self.state)
            n, state = self._normalizer(out.normalizer, norm_q, bias), out.state
            divisor = self._divisor(n, features)
            z_context = out.numerator if divisor is None else out.numerator / divisor[..., None]
        z_bias = None
        if bias is not None:
            z_bias = read_state(phi_q, bias[0], decay, None if decay is None else self._steps(phi_q, self.n_before))
            z_bias = z_bias if divisor is None else z_bias / divisor[..., None]
        if n is not None and divisor is not n:
            self._check_nothing_visible(n, z_context if z_bias is None else z_context + z_bias)
        own_share = None if attn.variant is None else self._own_share(phi_q, phi_k, divisor)
        return HeadOutputs(z_context, z_bias, own_share), state

    def _divisor(self, n: Tensor | None, features: TokenFeatures) -> Tensor | None:
        """``n`` if nothing in it is near 0; otherwise with 1 in place of zeros, so that 0 / 0 is 0 with a finite gradient."""
        if n is None:
            return None
        normalizers, positive = self.attn.normalizers, self.attn.feature_map.positive
        if float(n.detach().amin()) >= _least(n):
            if normalizers is not None:
                normalizers.see_positive(n)
            return n
        if normalizers is not None and positive:
            normalizers.see(n < 0)
        if float(n.detach().abs().amin()) >= _least(n):
            return n
        if positive:
            self._check_features_hold(n, *features.made_of)
        return torch.where(n == 0, 1.0, n)

    @torch.no_grad()
    def _check_features_hold(self, n: Tensor, q: Tensor, k: Tensor) -> None:
        """Raise KVLensError if n, which is at least phi(q_i).phi(k_i), is too small because that product underflows.

        If the product does not underflow, hooks removed the features on purpose, and nothing is visible.
        """
        phi_q, phi_k = self.attn.feature_map(q), self.attn.feature_map(k)
        own = (phi_q * phi_k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)).sum(dim=-1)
        lost = ((n.abs() < _least(n)) & (own < _least(n))).nonzero()
        if len(lost):
            row, position, head = lost[0].tolist()
            norms = [x[row, position, head // (q.shape[2] // x.shape[2])].norm().item() for x in (q, k)]
            wider = "" if n.dtype == torch.float64 else "accumulation_dtype='float64', "
            raise KVLensError(
                f"layer {self.attn.layer_id}, head {head}, position {position}: the normalizer phi(q).D underflows to "
                f"{n[row, position, head]:.1g}. A query of length {norms[0]:.3g} and a key of length {norms[1]:.3g} are too "
                f"long for feature map {self.cfg.feature_map!r} in {str(n.dtype).removeprefix('torch.')}; use {wider}"
                "smaller W_Q and W_K, or feature map 'relu'"
            )

    def _check_nothing_visible(self, n: Tensor, undivided: Tensor) -> None:
        """Raise KVLensError unless the numerator is 0 wherever the normalizer is, so that nothing is visible and z is 0."""
        broken = ((n == 0) & (undivided != 0).any(dim=-1)).nonzero()
        if len(broken):
            _, position, head = broken[0].tolist()
            positive = ", ".join(name for name, feature_map in FEATURE_MAPS.items() if feature_map.positive)
            raise KVLensError(
                f"layer {self.attn.layer_id}, head {head}, position {position}: the normalizer phi(q).D is 0 but phi(q).A is "
                f"not, because features of the map {self.cfg.feature_map!r} cancel; use a positive feature map ({positive}), "
                "or normalizer='none'"
            )

    def _own_share(self, phi_q: Tensor, phi_k: Tensor, n: Tensor | None) -> Tensor | None:
        """phi~(q_i).phi~(k_i) / n_i, if a variant needs it."""
        if not self.attn.variant.wants_own_share:
            return None
        own = (phi_q * phi_k.repeat_interleave(phi_q.shape[2] // phi_k.shape[2], dim=2)).sum(dim=-1)
        return own if n is None else own / n

    def _solved(self, features: TokenFeatures, strength: float) -> HeadOutputs:
        """z of ridge attention: a whole text at once, or token by token if there is a state."""
        phi_q, phi_k, _, _, v, _ = features
        if self.cfg.normalizer == "none":
            phi_q = phi_q * self.attn.attn_scale  # undo the division, since ridge has no normalizer
        before = None if self.entry is None else self.entry.ridge
        if before is None:
            q, k, values = (x.transpose(1, 2).double() for x in (phi_q, phi_k, v))
            at_queries = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(-1, -2)
            z = ridge_attention(k @ k.transpose(-1, -2), at_queries, values, strength, self.mask).transpose(1, 2)
            state = ridge_state(k, values, self.mask)
        else:
            z, state = ridge_steps(phi_q, phi_k, v, strength, before, self.mask)
        if self.entry is not None and not self.entry.frozen:
            self.entry.ridge = state
            self.entry.count(phi_q.shape[1], self.mask)
        return HeadOutputs(z)

    def _form(self, pos: int, pattern_hooked: bool) -> str:
        wanted = self.cfg.linear_attention_form
        if wanted == "auto":
            if self.state is not None and pos == 1 and not pattern_hooked:
                return "recurrent"
            return "parallel" if pattern_hooked or pos <= LONGEST_PARALLEL else "chunked"
        if pattern_hooked and wanted != "parallel":
            raise KVLensError(
                f"hook_attn_scores or hook_pattern is hooked, which only the parallel form computes, but "
                f"cfg.linear_attention_form={wanted!r} forbids it: set it to 'auto', or leave those two out of names_filter"
            )
        return wanted

    def _normalizer(
        self, n_context: Tensor | None, norm_q: Tensor | None, bias: tuple[Tensor, Tensor | None] | None
    ) -> Tensor | None:
        """n_i [batch, pos, head], bias included, 1 at padded positions; None under "none"."""
        if n_context is None or norm_q is None:
            return None
        if bias is not None and bias[1] is not None:
            n_context = n_context + read_state(norm_q, bias[1].unsqueeze(-1)).squeeze(-1)
        if self.mask is not None:
            n_context = torch.where(self.mask[:, :, None], n_context, 1.0)
        return self.attn.hook_normalizer(n_context)

    def _through_pattern(self, features: TokenFeatures, decay: Tensor | None, n: Tensor | None) -> Tensor:
        """The context's summand of z, computed through the hooked scores and pattern."""
        attn, phi_q = self.attn, features.phi_q
        seen = SeenTokens(features.phi_k, features.v, self.mask)
        seen = self._seen(seen, self.entry) if self.needs_pattern and self.entry is not None else seen
        v = seen.v if seen.mask is None else without_padding(seen.v, seen.mask)
        scores = attn.hook_attn_scores(causal_scores(phi_q, seen.phi_k, decay, seen.mask))
        pattern = through(attn.hook_pattern, scores if n is None else scores / n.transpose(1, 2)[..., None])
        visible = None
        if self.needs_pattern:  # negatives are chosen among the visible tokens
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=v.device).tril(v.shape[1] - scores.shape[-2])
            visible = visible[None, None] if seen.mask is None else visible & seen.mask[:, None, None]
        z_context = read_values(attn, pattern, scores, visible, v, self.entry)
        if self.state is None or self.needs_pattern:  # then the pattern covers earlier tokens too
            return z_context
        read = read_state(phi_q, self.state.kv, decay, None if decay is None else self._steps(phi_q, 0))
        return z_context + (read if n is None else read / n[..., None])

    @staticmethod
    def _seen(new: SeenTokens, entry: LinearCacheEntry) -> SeenTokens:
        """The new tokens and all earlier ones, among which negatives are chosen."""
        seen = new if entry.seen is None else entry.seen.followed_by(new)
        if not entry.frozen:
            entry.seen = seen
        return seen

    def _steps(self, phi_q: Tensor, n_before: int | Tensor) -> Tensor:
        """The number of real tokens up to and including each position, counting earlier ones: [batch or 1, pos]."""
        before = n_before[:, None].to(phi_q.device) if isinstance(n_before, Tensor) else n_before
        return real_steps(self.mask, phi_q) + before


def _least(n: Tensor) -> float:
    """The size below which a normalizer loses digits: terms of relative size eps would be subnormal."""
    found = torch.finfo(n.dtype)
    return found.tiny / found.eps
