"""One layer's part of a KV bias, and how its attention reads it."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens._tl import HookPoint
from kvlens.components.hooks import is_hooked, through
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias, SoftmaxFeatures, VirtualKeys
from kvlens.ops.softmax_attention import ScaledFeatures
from kvlens.ops.softmax_features import ScoreRule


class LayerBias(NamedTuple):
    """b_KV, b_D and the shift state of one layer. The leading axis is the batch of prompts, 1 for a single prompt.

    ``features`` is the feature map stored in a softmax bias, with its ``log_scale`` (b_KV and b_D then have one row per
    key-value head, or per query head if single heads were selected). None for linear attention, which uses the model's own
    feature map.
    """

    b_kv: Float[Tensor, "batch head d_phi d_head"]
    b_d: Float[Tensor, "batch head d_phi"]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]
    layer: int = 0
    features: SoftmaxFeatures | None = None
    log_scale: Float[Tensor, "batch kv_head"] | None = None

    @classmethod
    def of(cls, bias: KVBias, layer: int, device: torch.device) -> "LayerBias":
        """Views of ``bias``, so that a bias in training is read with its current values; they are moved when read.

        ``layer`` is an attention layer, numbered among all layers of the model.
        """
        if bias.recurrent is not None:
            layer = bias.attention_layers.index(layer)
        offset = bias.position_offset
        tensors = (bias.b_KV, bias.b_D, bias.last_k, bias.last_v, bias.last_q)
        b_kv, b_d, last_k, last_v, last_q = (t[layer] if bias.batch_size is not None else t[layer][None] for t in tensors)
        log_scale = bias.log_scale
        if log_scale is not None:
            log_scale = log_scale[layer] if bias.batch_size is not None else log_scale[layer][None]
        offset = offset.to(device) if isinstance(offset, Tensor) else offset
        return cls(b_kv, b_d, last_k, last_v, last_q, offset, layer, bias.features, log_scale)

    def phi(
        self,
        q: Float[Tensor, "batch pos head d_key"],
        rule: ScoreRule,
        positions: Int[Tensor, "#batch pos"] | None,
        b_kv: Float[Tensor, "#batch some_head d_phi d_head"],
        b_d: Float[Tensor, "#batch some_head d_phi"],
    ) -> ScaledFeatures:
        """Features of the queries, for b_KV and b_D as they will be read (after their hooks)."""
        assert self.features is not None
        assert self.log_scale is not None
        return self.features.read(self.layer, q, rule, positions, self.log_scale.to(q), b_kv, b_d)

    def in_window(self, rule: ScoreRule, positions: Int[Tensor, "#batch pos"]) -> tuple["LayerBias", int]:
        """Without the first virtual keys, as many as no query at ``positions`` of the text sees, and how many those are.

        One key always stays. Where ``rule`` has no window, nothing changes.
        """
        if rule.window is None or not isinstance(self.features, VirtualKeys):
            return self, 0
        distance = self.features.distance[self.layer]
        seen = (distance + positions.min().to(distance) < rule.window).flatten(0, -2).any(dim=0)
        first = int(seen.long().argmax()) if bool(seen.any()) else len(seen) - 1
        if first == 0:
            return self, 0
        keys = self.features.keys[self.layer]
        features = VirtualKeys(keys[None, ..., first:, :], distance[None, ..., first:])
        return self._replace(b_kv=self.b_kv[..., first:, :], b_d=self.b_d[..., first:], features=features, layer=0), first


def read_bias(attn: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor | None] | None:
    """(b_KV, b_D) of a layer after their hooks: the attached bias, otherwise the trained one, otherwise None.

    b_D is None under normalizer "none". Hooks see query heads. A softmax bias has one row per key-value head, and so has the
    result unless a hook made the query heads of a group differ.
    """
    cfg = attn.cfg
    if attn.layer_bias is not None:
        b_kv, b_d = attn.layer_bias.b_kv, attn.layer_bias.b_d
    elif cfg.trainable_kv_bias:
        b_kv, b_d = attn.b_KV[None], attn.b_D[None]
    else:
        return None
    b_kv, b_d = (b.to(attn.W_O.device, dtype) for b in (b_kv, b_d))
    unused = cfg.attention == "linear" and cfg.normalizer == "none"
    if not is_hooked(attn.hook_b_kv, attn.hook_b_d):
        return b_kv, None if unused else b_d
    grouped = b_kv.shape[1] < cfg.n_heads
    b_kv = by_query_head(attn.hook_b_kv, b_kv, cfg.n_heads)
    if unused:
        return b_kv, None
    b_d = by_query_head(attn.hook_b_d, b_d, cfg.n_heads)
    return _grouped_where_equal(b_kv, b_d, cfg.n_kv_heads) if grouped else (b_kv, b_d)


def by_query_head(hook: HookPoint, b: Tensor, n_heads: int) -> Tensor:
    """``b`` with one row per query head, after ``hook``."""
    b = b.repeat_interleave(n_heads // b.shape[1], dim=1)
    hooked = through(hook, b)
    if hooked.shape[1:] != b.shape[1:]:
        expected = f"[batch or 1, {', '.join(map(str, b.shape[1:]))}]"
        raise KVLensError(
            f"{hook.name}: a hook returned shape {list(hooked.shape)}, expected {expected}, with one row per query head as in "
            "bias.per_query_head()"
        )
    return hooked


def _grouped_where_equal(b_kv: Tensor, b_d: Tensor, n_kv_heads: int) -> tuple[Tensor, Tensor]:
    """Reduce rows per query head to one per key-value head if those of each group are equal, so that they read as unhooked."""
    if b_kv.requires_grad or b_d.requires_grad:
        return b_kv, b_d  # each query head has a gradient of its own
    groups = [b.unflatten(1, (n_kv_heads, -1)) for b in (b_kv, b_d)]
    if not all(torch.equal(b, b[:, :, :1].expand_as(b)) for b in groups):
        return b_kv, b_d
    return groups[0][:, :, 0], groups[1][:, :, 0]
