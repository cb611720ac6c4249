"""One layer's part of a compact KV bias, which softmax attention reads group by group."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.components.hooks import is_hooked
from kvlens.components.layer_bias import LayerBias
from kvlens.kv_bias import KVBias, VirtualKeys
from kvlens.kv_bias.storage import KeyGroups
from kvlens.ops.softmax_attention import SomeHeads


class GroupedLayerBias(NamedTuple):
    """What :class:`LayerBias` is of another bias.

    Attributes:
        parts: the key-value heads of each group, and their part of the bias: views of its rows.
        last_k, last_v, last_q, position_offset: as in :class:`LayerBias`.
        bias: the whole bias; as soon as somebody asked for its padded tensors, it holds those, and no ``groups`` any longer.
        layer: an attention layer, counted among these.
    """

    parts: tuple[tuple[SomeHeads, LayerBias], ...]
    last_k: Float[Tensor, "batch window_k kv_head d_head"]
    last_v: Float[Tensor, "batch window_v kv_head d_head"]
    last_q: Float[Tensor, "batch window_q head d_head"]
    position_offset: int | Int[Tensor, " batch"]
    bias: KVBias
    groups: KeyGroups
    layer: int
    device: torch.device

    @property
    def n_prompts(self) -> int:
        """The size of the axis ``batch``."""
        return self.bias.batch_size or 1

    @classmethod
    def of(cls, bias: KVBias, groups: KeyGroups, layer: int, device: torch.device) -> "GroupedLayerBias":
        """Of one layer among all layers of the model."""
        number = bias.attention_layers.index(layer)
        assert bias.log_scale is not None
        single, offset = bias.batch_size is None, bias.position_offset
        log_scale, *last = (
            x[number][None] if single else x[number] for x in (bias.log_scale, bias.last_k, bias.last_v, bias.last_q)
        )
        offset = offset.to(device) if isinstance(offset, Tensor) else offset
        parts = []
        for group in groups.layers[number]:
            b_kv, b_d, keys, distance = (groups.block(name, group) for name in groups.rows)
            if single:
                b_kv, b_d, keys, distance = (x[None] for x in (b_kv, b_d, keys, distance))
            of_heads = log_scale[:, list(group.heads)]
            part = LayerBias.made(b_kv, b_d, VirtualKeys(keys, distance), of_heads, last, offset)
            parts.append((SomeHeads.of(group.heads, device), part))
        last_k, last_v, last_q = last
        return cls(tuple(parts), last_k, last_v, last_q, offset, bias, groups, number, device)

    def through_hooks(
        self, points: Any, n_heads: int, device: torch.device, dtype: torch.dtype
    ) -> "LayerBias | GroupedLayerBias":
        """As :meth:`LayerBias.through_hooks`; hooks see all heads as wide as in ``bias.b_KV``."""
        if self.bias._groups is not self.groups:
            return LayerBias.of(self.bias, self.bias.attention_layers[self.layer], self.device).through_hooks(
                points, n_heads, device, dtype
            )
        if is_hooked(points.hook_b_kv, points.hook_b_d, points.hook_b_keys):
            return self.whole(as_wide=True).through_hooks(points, n_heads, device, dtype)
        parts = ((heads, part.unhooked_in(device, dtype)) for heads, part in self.parts)
        return self._replace(parts=tuple(parts), device=device)

    def of_keys(self) -> tuple[Tensor, ...]:
        """The tensors that the bias holds now."""
        return tuple(self.bias.stored().values())

    def whole(self, as_wide: bool = False) -> LayerBias:
        """All heads as wide as the layer's widest; with ``as_wide`` as in ``bias.b_KV``."""
        layer = self.bias._layer_of_groups(self.layer, narrow=not as_wide)
        wide = self.parts[0][1].b_d.dtype
        return LayerBias.of(layer, 0, self.device).unhooked_in(self.device, wide)


def layer_bias_of(bias: KVBias, layer: int, device: torch.device) -> LayerBias | GroupedLayerBias:
    """One layer's part of a bias, numbered among all layers of the model, as a model holds it."""
    groups = bias._groups
    return LayerBias.of(bias, layer, device) if groups is None else GroupedLayerBias.of(bias, groups, layer, device)
