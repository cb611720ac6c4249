"""The attention module of a layer: the base's parameters and hook points, kvlens' own, and one forward pass.

    q, k, v  ->  KV shift  ->  augmented k, v  ->  the heads, linear or softmax  ->  z  ->  z W_O + b_O

:meth:`KVAttention.forward` implements this line for every kind of attention. The heads are a
:class:`~kvlens.components.linear_attention.LinearHeads` or :class:`~kvlens.components.softmax_attention.SoftmaxHeads`, an
object created for one pass. Where kvlens adds nothing, the result is that of :class:`kvlens.base.Attention`, up to rounding.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from kvlens.base import Attention, GroupedQueryAttention
from kvlens.components.config import AttentionConfig, KVShiftConfig
from kvlens.components.decode_cache import CacheEntry, ShiftState
from kvlens.components.heads import (
    KVLENS_HOOKS,
    OF_A_BIAS,
    OF_A_SHIFT_STATE,
    OF_A_SOFTMAX_BIAS,
    Augmentation,
    Heads,
    NewTokens,
    counted_by,
    regularized,
    through,
)
from kvlens.components.layer_bias import LayerBias, Normalizers, check_batch
from kvlens.components.linear_attention import LinearHeads
from kvlens.components.softmax_attention import SoftmaxHeads
from kvlens.ops.kv_shift import coefficients_from_parameter, initial_shift_parameter, kv_shift
from kvlens.ops.rotary import RotaryTable, rotate
from kvlens.ops.softmax_features import ScoreRule

NO_COPY_ROWS = 128
"""With at most this many tokens over all rows, a product per head takes less time than a copy of W and one product, and its
backward pass, which sums over heads, little more."""
HEADS: dict[str, type[Heads]] = {"linear": LinearHeads, "softmax": SoftmaxHeads}
"""The kinds of attention, by their names in ``cfg.attention``."""


def shifted_heads(cfg: AttentionConfig) -> dict[str, int]:
    """The projections among "k", "v", "q" that are shifted, each with its number of heads."""
    shift = cfg.kv_shift
    if shift is None:
        return {}
    wanted = {"k": (shift.keys, cfg.n_kv_heads), "v": (shift.values, cfg.n_kv_heads), "q": (shift.queries, cfg.n_heads)}
    return {x: n_heads for x, (on, n_heads) in wanted.items() if on}


class KVAttention(Attention):
    """One key-value head per query head."""

    cfg: AttentionConfig
    layer_bias: LayerBias | None = None
    """The attached bias of this layer; set by ``HookedKVTransformer.attach_kv_bias``."""
    hook_k_augmented: HookPoint
    hook_v_augmented: HookPoint
    hook_z_context: HookPoint
    hook_z_bias: HookPoint
    rotary_table: RotaryTable
    decay: Tensor | None
    normalizers: Normalizers | None = None
    """Counts the normalizers below 0 under the attached bias; set with it."""
    observer: Callable[[Tensor, Tensor, Tensor], None] | None = None
    """Called with the queries and all keys and values so far, as softmax scores them; set while a prompt is converted."""

    def __init__(self, cfg: AttentionConfig, attn_type: str = "global", layer_id: int | None = None):
        super().__init__(cfg, attn_type, layer_id)
        for name in KVLENS_HOOKS:
            setattr(self, name, HookPoint())
        self.shifted = shifted_heads(cfg)
        window = 0 if cfg.kv_shift is None else cfg.kv_shift.window
        for x, n_heads in self.shifted.items():
            setattr(self, f"{x}_shift_coef", nn.Parameter(torch.zeros(n_heads, window + 1, dtype=cfg.dtype)))
        self.variant = cfg.attention_variant
        mlps = None if self.variant is None else self.variant.augmented
        self.augment_k = Augmentation(cfg, mlps) if mlps is not None and mlps.keys else None
        self.augment_v = Augmentation(cfg, mlps) if mlps is not None and mlps.values else None
        HEADS[cfg.attention].add_parameters(self, cfg)

    @torch.no_grad()
    def init_kv_parameters(self, generator: torch.Generator | None) -> None:
        """Initialize what kvlens adds: shift coefficients, drawn independently for keys, values and queries (KVSA sec. 2.2),
        augmented keys and values, and the parameters of the heads."""
        shift = self.cfg.kv_shift
        if shift is not None:
            for x, n_heads in self.shifted.items():
                initial = initial_shift_parameter(n_heads, shift.window, shift.parametrization, shift.init, generator)
                getattr(self, f"{x}_shift_coef").copy_(initial)
        for mlp in (self.augment_k, self.augment_v):
            if mlp is not None:
                mlp.init_weights(generator)
        HEADS[self.cfg.attention].init_parameters(self, generator)

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: CacheEntry | None = None,
        additive_attention_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """As in the base: [batch, pos, d_model] from [batch, pos, d_model] or [batch, pos, head, d_model]."""
        entry = past_kv_cache_entry
        if self.layer_bias is not None:
            check_batch(self.layer_bias.n_prompts, query_input.shape[0])
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        mask = None if attention_mask is None else attention_mask[:, -q.shape[1] :].bool().to(q.device)
        mask = None if mask is None or bool(mask.all()) else mask
        shift_state: ShiftState = {}
        shift = self.cfg.kv_shift
        if shift is not None:
            shifted, shift_state = self._shifted(shift, {"q": q, "k": k, "v": v}, getattr(entry, "shift_state", {}), mask)
            q, k, v = shifted["q"], shifted["k"], shifted["v"]
        if self.augment_k is not None:
            k = self.hook_k_augmented(self.augment_k(k, key_input))
        if self.augment_v is not None:
            v = self.hook_v_augmented(self.augment_v(v, value_input))
        tokens = NewTokens(q, k, v, mask, attention_mask, counted_by(attention_mask), additive_attention_mask)
        heads = HEADS[self.cfg.attention](self, tokens, entry).outputs()
        if shift_state and entry is not None and not entry.frozen:
            entry.shift_state = shift_state
        z, z_bias, _ = heads if self.variant is None else regularized(self, heads, tokens)
        if z_bias is not None:
            z = self.hook_z_context(z) + self.hook_z_bias(z_bias)
        return self.output(self.hook_z(z.to(self.W_O.dtype)))

    def _shifted(
        self, shift: KVShiftConfig, projections: dict[str, Tensor], state: ShiftState, mask: Tensor | None
    ) -> tuple[dict[str, Tensor], ShiftState]:
        """The raw q, k, v, each [batch, pos, head, d_head], with those that are shifted replaced (KVSA eq. 4-6), and the new
        shift state.

        ``state`` holds the previous raw rows of a decode cache; empty at the start of a text, where those of an attached bias
        are read (and their hooks fire), or zeros. ``mask`` is True at real tokens, or None.
        """
        projections, after = dict(projections), {}
        for x in self.shifted:
            raw, before = projections[x], state.get(x)
            if before is None and self.layer_bias is not None:
                before = self.layer_bias.last[x].to(raw.device, raw.dtype)
                before = through(getattr(self, f"hook_last_{x}"), before)
            if before is not None and before.shape[2] != raw.shape[2]:  # ungrouped, as below
                before = before.repeat_interleave(raw.shape[2] // before.shape[2], dim=2)
            coef = coefficients_from_parameter(getattr(self, f"{x}_shift_coef"), shift.parametrization)
            coef = through(getattr(self, f"hook_{x}_shift_coef"), coef)
            if raw.shape[2] != coef.shape[0]:  # ungroup_grouped_query_attention
                coef = coef.repeat_interleave(raw.shape[2] // coef.shape[0], dim=0)
            shifted, after[x] = kv_shift(raw, coef, before, mask)
            projections[x] = getattr(self, f"hook_{x}_shifted")(shifted)
        return projections, after

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """x W + b per head; of few tokens, one product per head, without the base's copy of W."""
        if x.dim() != 3 or x.shape[0] * x.shape[1] > NO_COPY_ROWS:
            return super().project(x, weight, bias)
        batch, pos, d_model = x.shape
        rows = x.reshape(1, -1, d_model).expand(weight.shape[0], -1, -1)
        return torch.baddbmm(bias.unsqueeze(1), rows, weight).view(-1, batch, pos, weight.shape[2]).permute(1, 2, 0, 3)

    def alibi_slopes(self, device: torch.device) -> Tensor:
        """The configured slopes, if any."""
        if self.cfg.alibi_slopes is None:
            return super().alibi_slopes(device)
        return self.W_Q.new_tensor(list(self.cfg.alibi_slopes), device=device)

    def waits_for_a_bias(self, hook_point: str) -> bool:
        """Whether the hook point of this name (e.g. ``hook_b_kv``) fires only with a KV bias, and there is none now."""
        if self.layer_bias is not None:
            return False
        if hook_point in OF_A_SHIFT_STATE:
            return True
        of_a_bias = OF_A_BIAS if self.cfg.attention == "linear" else (*OF_A_BIAS, *OF_A_SOFTMAX_BIAS)
        return not self.cfg.trainable_kv_bias and hook_point in of_a_bias

    def features_after(
        self, phi: Float[Tensor, "*layer pos head d_phi"], steps: Int[Tensor, " pos"]
    ) -> Float[Tensor, "*layer pos head d_phi"]:
        """gamma^{steps - 1} R_{-steps} phi: key features as a state holds them so many tokens later, their own included; for
        linear attention."""
        decay = self.cfg.decay_per_head()
        if decay is not None:
            phi = phi * (decay.to(phi) ** (steps[:, None] - 1))[..., None]
        if not self.cfg.rotates_after:
            return phi
        cos, sin = (row[:, None] for row in self.rotary_table.at(steps, phi.dtype))
        return rotate(phi, cos, -sin, self.cfg.rotary_adjacent_pairs)

    def score_rule(self) -> ScoreRule:
        """How softmax attention scores a key in this layer, including stored keys."""
        slopes = self.alibi_slopes(self.W_O.device) if self.cfg.positional_embedding_type == "alibi" else None
        cap = self.cfg.attn_scores_soft_cap
        return ScoreRule(float(self.attn_scale), cap if cap > 0 else None, slopes, self.window)

    @property
    def window(self) -> int | None:
        """Tokens that a query of a local layer sees; None in a global one."""
        return self.cfg.window_size if self.attn_type == "local" else None


class GroupedQueryKVAttention(KVAttention, GroupedQueryAttention):
    """Several query heads per key-value head; the shift has one coefficient vector per key-value head."""
