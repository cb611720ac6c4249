"""Softmax attention of one layer, with all kinds of positions; every tensor on the way passes a hook point.

    q, k, v = x W + b    s_ij = q_i . k_j / scale + positions    z_i = sum_j softmax_j(s_ij) v_j    out = sum_heads z W_O + b_O

Grouped attention stores the key-value heads' weights as ``_W_K``, ``_W_V``, ``_b_K``, ``_b_V``; ``W_K`` and the others are
those, repeated for every query head.

Rotary frequencies are plain, scaled linearly, by parts (Llama 3.1) or by YaRN. A pair of features turns by position /
wavelength, and the wavelengths are base^(2i / rotary_dim). The scaled forms lengthen the long ones (Peng et al. 2023, YaRN,
sec. 3.1 to 3.4). Rounding matters: each form is computed in the order and the precision in which checkpoints are run elsewhere.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear
from transformer_lens import FactoredMatrix
from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry
from transformer_lens.hook_points import HookPoint
from transformer_lens.utilities import get_offset_position_ids
from transformer_lens.utilities.activation_functions import apply_softcap

from kvlens.base.config import NORM_OVER_ALL_HEADS, HookedTransformerConfig
from kvlens.base.layers import Norm
from kvlens.errors import KVLensError


def sin_cos(
    cfg: HookedTransformerConfig, attn_type: str, n_ctx: int, base: float | int, dtype: torch.dtype
) -> tuple[Float[Tensor, "n_ctx rotary_dim"], Float[Tensor, "n_ctx rotary_dim"]]:
    """sin and cos of positions 0 .. n_ctx - 1.

    Args:
        cfg: says which form and its parameters.
        attn_type: "global" or "local": some forms scale only global layers.
        n_ctx: number of rows.
        base: of the frequencies.
        dtype: of the result; computed in float32, or in float64 for float64.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    is_local, dim = attn_type == "local", cfg.rotary_dim or cfg.d_head
    yarn = cfg.use_yarn_rope and not (cfg.yarn_global_attn_only and is_local)
    if cfg.use_NTK_by_parts_rope:
        wavelengths = 1 / _by_parts(cfg, dim, base)
    elif yarn:
        wavelengths = 1 / _yarn(cfg, dim, base, wide)
    else:
        wavelengths = base ** (torch.arange(dim // 2, dtype=wide) / (dim / 2))
        if cfg.rotary_scaling_factor != 1.0 and not is_local:
            wavelengths = wavelengths * cfg.rotary_scaling_factor
    wavelengths = wavelengths.repeat_interleave(2) if cfg.rotary_adjacent_pairs else wavelengths.repeat(2)
    angles = torch.arange(n_ctx, dtype=wide)[:, None] / wavelengths
    sin, cos = angles.sin().to(dtype), angles.cos().to(dtype)
    if yarn and cfg.yarn_attention_factor != 1.0:
        return sin * cfg.yarn_attention_factor, cos * cfg.yarn_attention_factor
    return sin, cos


def _by_parts(cfg: HookedTransformerConfig, dim: int, base: float | int) -> Float[Tensor, " pairs"]:
    """Llama 3.1's frequencies: long waves divided by the factor, short ones kept, those between interpolated."""
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2).float() / dim)
    factor, low, high = cfg.NTK_by_parts_factor, cfg.NTK_by_parts_low_freq_factor, cfg.NTK_by_parts_high_freq_factor
    trained = cfg.NTK_original_ctx_len
    lengths = 2 * math.pi / frequencies
    is_long, is_short = lengths > trained / low, lengths < trained / high
    kept = (trained / lengths - low) / (high - low)
    between = (1 - kept) * frequencies / factor + kept * frequencies
    return torch.where(is_long, frequencies / factor, torch.where(is_short, frequencies, between))


def _yarn(cfg: HookedTransformerConfig, dim: int, base: float | int, wide: torch.dtype) -> Float[Tensor, " pairs"]:
    """YaRN's frequencies: pairs that turn more than ``beta_fast`` times in training are kept, others divided."""
    trained = cfg.yarn_original_max_position_embeddings
    frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=wide) / dim)

    def pair_of(turns: float) -> float:
        return (dim * math.log(trained / (turns * 2 * math.pi))) / (2 * math.log(base))

    first, last = pair_of(cfg.yarn_beta_fast), pair_of(cfg.yarn_beta_slow)
    if cfg.yarn_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    width = (float(last) + 0.001 if first == last else float(last)) - first
    divided = ((torch.arange(dim // 2, dtype=wide) - first) / width).clamp(0, 1)
    return frequencies / cfg.yarn_factor * divided + frequencies * (1 - divided)


ROTARY_ROWS = 2048
"""Rows of the rotary tables at first; they grow with the text, up to ``n_ctx``."""


class Attention(nn.Module):
    """One key-value head per query head.

    Args:
        cfg: a :class:`~kvlens.base.HookedTransformerConfig`.
        attn_type: "global", or "local" for a window of ``cfg.window_size`` tokens.
        layer_id: the layer's number.
    """

    stored = ""
    """Before the names of the stored weights of keys and values."""

    W_K: Any
    W_V: Any
    b_K: Any
    b_V: Any
    mask: Tensor
    IGNORE: Tensor
    rotary_sin: Tensor
    rotary_cos: Tensor

    def __init__(self, cfg: HookedTransformerConfig, attn_type: str = "global", layer_id: int | None = None):
        super().__init__()
        if attn_type not in ("global", "local"):
            raise KVLensError(f"attn_types: expected 'global' or 'local' for each layer, got {attn_type!r}")
        self.cfg, self.attn_type, self.layer_id = cfg, attn_type, layer_id
        self._add_weights(cfg)
        self._add_norms(cfg)
        self.register_buffer("mask", torch.empty((0, 0), dtype=torch.bool))  # both in TransformerLens' state dicts
        self.register_buffer("IGNORE", torch.tensor(-torch.inf))
        self.attn_scale = cfg.attn_scale if cfg.use_attn_scale else 1.0
        if cfg.scale_attn_by_inverse_layer_idx:
            self.attn_scale *= (layer_id or 0) + 1
        self.hook_k, self.hook_q, self.hook_v, self.hook_z = HookPoint(), HookPoint(), HookPoint(), HookPoint()
        self.hook_attn_scores, self.hook_pattern, self.hook_result = HookPoint(), HookPoint(), HookPoint()
        self._ntk_stretch = 1.0
        self.alibi: Tensor | None = None
        if cfg.positional_embedding_type == "shortformer":
            self.hook_attn_input = HookPoint()
        elif cfg.positional_embedding_type == "rotary":
            self.hook_rot_k = HookPoint()
            self.hook_rot_q = HookPoint()
            dim = cfg.rotary_dim or cfg.d_head
            sin, cos = self.calculate_sin_cos_rotary(dim, min(cfg.n_ctx, ROTARY_ROWS), self.rotary_base, cfg.dtype)
            self.register_buffer("rotary_sin", sin)
            self.register_buffer("rotary_cos", cos)

    def _add_weights(self, cfg: HookedTransformerConfig) -> None:
        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=cfg.dtype))

        def bias(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.zeros(*shape, dtype=cfg.dtype))

        n_kv = cfg.n_key_value_heads or cfg.n_heads
        self.W_Q, self.W_O = weight(cfg.n_heads, cfg.d_model, cfg.d_head), weight(cfg.n_heads, cfg.d_head, cfg.d_model)
        self.b_Q, self.b_O = bias(cfg.n_heads, cfg.d_head), bias(cfg.d_model)
        if cfg.use_attention_sinks:
            self.sinks = bias(cfg.n_heads)
        for name in "KV":
            self.register_parameter(f"{self.stored}W_{name}", weight(n_kv, cfg.d_model, cfg.d_head))
        for name in "KV":
            self.register_parameter(f"{self.stored}b_{name}", bias(n_kv, cfg.d_head))

    def _add_norms(self, cfg: HookedTransformerConfig) -> None:
        """Norms of queries and keys: of each head, or of all heads at once (OLMo 2 and 3, OLMoE)."""
        self.q_norm = self.k_norm = None
        if cfg.use_qk_norm:
            self.q_norm, self.k_norm = Norm(cfg, "RMS", cfg.d_head), Norm(cfg, "RMS", cfg.d_head)
        elif cfg.original_architecture in NORM_OVER_ALL_HEADS:
            n_kv = cfg.n_key_value_heads or cfg.n_heads
            self.q_norm, self.k_norm = (Norm(cfg, "RMS", heads * cfg.d_head) for heads in (cfg.n_heads, n_kv))

    def _load_from_state_dict(self, state_dict: Mapping[str, Tensor], prefix: str, *args: object) -> None:
        """Tables and masks follow from the configuration: those of a state dict are left out if they have other sizes."""
        own = {prefix + name: buffer for name, buffer in self.named_buffers(recurse=False)}
        other = {n: b for n, b in own.items() if n in state_dict and state_dict[n].shape != b.shape}
        super()._load_from_state_dict({**state_dict, **other}, prefix, *args)

    @property
    def OV(self) -> FactoredMatrix:
        """W_V W_O of each head."""
        return FactoredMatrix(self.W_V, self.W_O)

    @property
    def QK(self) -> FactoredMatrix:
        """W_Q W_K^T of each head."""
        return FactoredMatrix(self.W_Q, self.W_K.transpose(-2, -1))

    def forward(
        self,
        query_input: Tensor,
        key_input: Tensor,
        value_input: Tensor,
        past_kv_cache_entry: TransformerLensKeyValueCacheEntry | None = None,
        additive_attention_mask: Float[Tensor, "batch 1 1 key_pos"] | None = None,
        attention_mask: Int[Tensor, "batch offset_pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        """The layer's output from [batch, pos, d_model], or from one input per head, [batch, pos, head, d_model].

        Args:
            query_input, key_input, value_input: what each is projected from.
            past_kv_cache_entry: earlier keys and values, to which the new ones are appended.
            additive_attention_mask: added to the scores.
            attention_mask: 1 at real tokens, earlier ones included.
        """
        q, k, v = self.calculate_qkv_matrices(query_input, key_input, value_input)
        past = 0
        if past_kv_cache_entry is not None:
            past = past_kv_cache_entry.past_keys.shape[1]
            k, v = past_kv_cache_entry.append(k, v)
        q, k = self.with_positions(q, k, past, partial(self.apply_rotary, attention_mask=attention_mask))
        scores = self.masked_scores(self.calculate_attention_scores(q, k), past, attention_mask)
        if additive_attention_mask is not None:
            scores = scores + additive_attention_mask
        pattern = self.hook_pattern(self.pattern_of(self.hook_attn_scores(scores)))
        return self.output(self.calculate_z_scores(v, pattern.to(device=v.device, dtype=v.dtype)))

    def calculate_qkv_matrices(self, query_input: Tensor, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [batch, pos, head, d_head], hooked, then normalized and clamped as configured."""
        cfg = self.cfg
        q = self.hook_q(self.project(query_input, self.W_Q, self.b_Q))
        k = self.hook_k(self.project(key_input, *self._stored_weights("K")))
        v = self.hook_v(self.project(value_input, *self._stored_weights("V")))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self._normed(q, self.q_norm), self._normed(k, self.k_norm)
        if cfg.clip_qkv is not None:
            q, k, v = (x.clamp(min=-cfg.clip_qkv, max=cfg.clip_qkv) for x in (q, k, v))
        return q, k, v

    def project(self, x: Tensor, weight: Tensor, bias: Tensor) -> Float[Tensor, "batch pos head d_head"]:
        """x W + b per head, of [batch, pos, d_model] or of one input per head, [batch, pos, head, d_model]."""
        if x.dim() == 4:
            return torch.einsum("bphm,hmd->bphd", x, weight) + bias
        rows = weight.transpose(1, 2).reshape(-1, weight.shape[1])
        return linear(x, rows, bias.flatten()).unflatten(-1, bias.shape)

    def _stored_weights(self, name: str) -> tuple[Tensor, Tensor]:
        """W and b of keys ("K") or values ("V") by key-value head, or by query head where these are ungrouped."""
        stored = "" if self.cfg.ungroup_grouped_query_attention else self.stored
        return getattr(self, f"{stored}W_{name}"), getattr(self, f"{stored}b_{name}")

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        return norm(x.reshape(-1, x.shape[-1]) if self.cfg.use_qk_norm else x.flatten(2)).reshape(x.shape)

    def with_positions(
        self, q: Tensor, k: Tensor, past: int, rotated: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys as scored: rotated from ``past`` and from 0, and queries scaled by Qwen 1's log n.

        Stored keys are rotated at every pass.
        """
        if self.cfg.positional_embedding_type == "rotary":
            q, k = self.hook_rot_q(rotated(q, past)), self.hook_rot_k(rotated(k, 0))
        if self.cfg.use_logn_attn and not self.training:
            q = self.scaled_by_log_n(q, past)
        return q, k

    def calculate_attention_scores(
        self, q: Float[Tensor, "batch pos head d_head"], k: Float[Tensor, "batch key_pos kv_head d_head"]
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """q.k / scale, capped softly if configured."""
        k = self.per_query_head(k)
        return apply_softcap(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / self.attn_scale, self.cfg.attn_scores_soft_cap)

    def masked_scores(
        self, scores: Float[Tensor, "batch head pos key_pos"], past: int, attention_mask: Tensor | None
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """Scores plus ALiBi's distances, -inf where a query does not see a key."""
        if self.cfg.positional_embedding_type == "alibi":
            n_queries, n_keys = scores.shape[-2:]
            scores = scores + self.alibi_bias(n_keys, scores.device)[:, n_keys - n_queries : n_keys, :n_keys]
        if self.cfg.attention_dir == "causal":
            return self.apply_causal_mask(scores, past, attention_mask)
        return scores

    def apply_causal_mask(
        self, attn_scores: Tensor, past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch head pos key_pos"]:
        """-inf for later keys, for those outside the window of a local layer, and for padding."""
        n_keys = attn_scores.shape[-1]
        query = torch.arange(past_kv_pos_offset, n_keys, device=attn_scores.device)[:, None]
        key = torch.arange(n_keys, device=attn_scores.device)
        visible = key <= query
        if self.attn_type == "local" and self.cfg.window_size is not None:
            visible = visible & (key > query - self.cfg.window_size)
        if attention_mask is not None:
            visible = visible & attention_mask[:, None, None].bool().to(attn_scores.device)
        return torch.where(visible, attn_scores, self.IGNORE.to(attn_scores.device))

    def pattern_of(self, scores: Float[Tensor, "batch head pos key_pos"]) -> Float[Tensor, "batch head pos key_pos"]:
        """The softmax over keys, and over the head's sink if it has one; zeros in rows without a visible key."""
        if self.cfg.use_attention_sinks:
            sink = self.sinks.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1).to(scores.dtype)
            scores = torch.cat([scores, sink], dim=-1)
            pattern = (scores - scores.max(dim=-1, keepdim=True).values).softmax(dim=-1)[..., :-1]
        else:
            pattern = scores.softmax(dim=-1)
        return torch.where(pattern.isnan(), torch.zeros_like(pattern), pattern)

    def calculate_z_scores(
        self, v: Float[Tensor, "batch key_pos kv_head d_head"], pattern: Float[Tensor, "batch head pos key_pos"]
    ) -> Float[Tensor, "batch pos head d_head"]:
        """sum_j pattern_ij v_j, hooked."""
        return self.hook_z((pattern @ self.per_query_head(v).transpose(1, 2)).transpose(1, 2))

    def output(self, z: Float[Tensor, "batch pos head d_head"]) -> Float[Tensor, "batch pos d_model"]:
        """z W_O + b_O; with ``use_attn_result`` each head's part passes ``hook_result`` first."""
        z = z.to(self.W_O.dtype)
        if self.cfg.use_attn_result:
            return self.hook_result((z[..., None] * self.W_O).sum(dim=-2)).sum(dim=2) + self.b_O
        return linear(z.flatten(2), self.W_O.flatten(0, 1).T, self.b_O)

    def per_query_head(self, x: Tensor) -> Tensor:
        """Keys or values, repeated for the query heads that share them."""
        n = self.cfg.n_heads // x.shape[2]
        return x if n == 1 else x.repeat_interleave(n, dim=2)

    @property
    def rotary_base(self) -> float | int:
        """The base of this layer's rotary angles: local layers may have their own."""
        local = self.cfg.rotary_base_local if self.attn_type == "local" else None
        return self.cfg.rotary_base if local is None else local

    def calculate_sin_cos_rotary(
        self, rotary_dim: int, n_ctx: int, base: float | int = 10000, dtype: torch.dtype = torch.float32
    ) -> tuple[Float[Tensor, "n_ctx rotary_dim"], Float[Tensor, "n_ctx rotary_dim"]]:
        """sin and cos of the first ``n_ctx`` positions (``rotary_dim`` is the configuration's)."""
        return sin_cos(self.cfg, self.attn_type, n_ctx, base, dtype)

    def apply_rotary(
        self, x: Float[Tensor, "batch pos head d_head"], past_kv_pos_offset: int = 0, attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch pos head d_head"]:
        """``x`` with its first ``rotary_dim`` features rotated; its first row has position ``past_kv_pos_offset``.

        With a mask, positions count the tokens that it shows.
        """
        cos, sin = self.rotary_rows(past_kv_pos_offset, x.shape[1], attention_mask)
        return self.turned(x.to(cos.device), cos, sin)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first features of ``x`` rotated by an angle whose cosine and sine are given; the others as they are."""
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        return torch.cat([turned * cos + self.rotate_every_two(turned) * sin, rest], dim=-1)

    def rotate_every_two(self, x: Float[Tensor, "... rotary_dim"]) -> Float[Tensor, "... rotary_dim"]:
        """(x_1, x_2) -> (-x_2, x_1) for each pair of features."""
        if self.cfg.rotary_adjacent_pairs:
            return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
        half = x.shape[-1] // 2
        return torch.cat([-x[..., half:], x[..., :half]], dim=-1)

    def rotary_rows(self, first: int, n: int, attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """cos and sin for ``n`` tokens after ``first`` earlier ones: [batch or 1, pos, 1, rotary_dim]."""
        self.grow_rotary(first + n)
        if attention_mask is None:
            return self.rotary_cos[None, first : first + n, None], self.rotary_sin[None, first : first + n, None]
        rows = get_offset_position_ids(first, attention_mask).to(self.rotary_cos.device)
        return self.rotary_cos[rows, None], self.rotary_sin[rows, None]

    def grow_rotary(self, n: int) -> None:
        """Make sure that the tables have rows for ``n`` positions.

        Raises:
            KVLensError: ``n`` exceeds ``n_ctx``.
        """
        cfg, rows, base, stretches = self.cfg, self.rotary_cos.shape[0], self.rotary_base, False
        dim = cfg.rotary_dim or cfg.d_head
        if cfg.use_dynamic_ntk_rope and not self.training:
            stretch = _ntk_stretch(n, cfg.train_seq_length or cfg.n_ctx)
            base *= stretch ** (dim / (dim - 2))
            stretches, self._ntk_stretch = stretch != self._ntk_stretch, stretch
        if n <= rows and not stretches:
            return
        if n > cfg.n_ctx:
            raise KVLensError(f"position {n - 1} lies beyond n_ctx={cfg.n_ctx}, the size of this model's rotary tables")
        with torch.inference_mode(False), torch.no_grad():  # rows made during generation must be usable in training
            size = max(rows, n if stretches else min(cfg.n_ctx, max(n, 2 * rows)))
            sin, cos = self.calculate_sin_cos_rotary(dim, size, base, self.rotary_cos.dtype)
            self.rotary_sin, self.rotary_cos = sin.to(self.rotary_sin.device), cos.to(self.rotary_cos.device)

    def scaled_by_log_n(self, q: Float[Tensor, "batch pos head d_head"], past: int) -> Float[Tensor, "batch pos head d_head"]:
        """Queries beyond the trained length n times log_n(position), positions counted from 1 (Qwen 1)."""
        trained = self.cfg.train_seq_length or self.cfg.n_ctx
        if past + q.shape[1] <= trained:
            return q
        position = torch.arange(past + 1, past + q.shape[1] + 1, device=q.device, dtype=torch.float32)
        scale = torch.where(position > trained, position.log() / math.log(trained), 1.0)
        return q * scale.to(q.dtype)[:, None, None]

    def alibi_slopes(self, device: torch.device) -> Float[Tensor, " head"]:
        """2^(-8/h), its square, ..., for h heads (Press et al. 2022, for powers of two)."""
        first = 2 ** (-8 / self.cfg.n_heads)
        return first * (first ** torch.arange(self.cfg.n_heads, device=device))

    def alibi_bias(self, n: int, device: torch.device) -> Float[Tensor, "head pos key_pos"]:
        """minus slope times distance, for at least ``n`` tokens; kept for later passes."""
        if self.alibi is None or self.alibi.shape[-1] < n or self.alibi.device != device:
            position = torch.arange(n, device=device)
            backwards = (position[None, :] - position[:, None]).clamp(max=0).float()
            self.alibi = self.alibi_slopes(device)[:, None, None] * backwards
        return self.alibi


def _per_query_head(name: str) -> Any:
    """A property: the stored weight of this name, repeated for the query heads that share it."""

    def get(attn: Attention) -> Tensor:
        weight = getattr(attn, f"_{name}")
        return weight.repeat_interleave(attn.cfg.n_heads // weight.shape[0], dim=0)

    def put(attn: Attention, value: nn.Parameter) -> None:
        setattr(attn, f"_{name}", value)

    return property(get, put)


class GroupedQueryAttention(Attention):
    """Several query heads per key-value head."""

    stored = "_"
    W_K, W_V, b_K, b_V = (_per_query_head(name) for name in ("W_K", "W_V", "b_K", "b_V"))


def _ntk_stretch(n: int, trained: int) -> float:
    """How far Qwen 1 stretches the base for a text of ``n`` tokens: 1 up to the trained length, then 3, 7, 15, ..."""
    if n <= trained:
        return 1.0
    return float(max(2 ** math.ceil(math.log(n / trained, 2) + 1) - 1, 1))
