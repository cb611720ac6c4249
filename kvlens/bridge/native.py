"""Softmax attention that the bridge leaves to Transformers, made to show its queries, keys, scores and pattern.

While something is hooked to one of these, the module's call of Transformers' attention interface comes here, and is computed
step by step as Transformers' eager attention does; else nothing changes.

| hook point | shape |
|---|---|
| ``hook_rot_q``, ``hook_rot_k`` | [batch, head or kv_head, pos, d_key], as they are scored |
| ``hook_values`` | [batch, kv_head, pos, d_head] |
| ``hook_attn_scores``, ``hook_pattern`` | [batch, head, pos, key], masked scores and their softmax |
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import LinearBridge
from transformers import AttentionInterface

from kvlens.components import is_hooked
from kvlens.errors import KVLensError

NAME = "kvlens_hooked"
VALUES = "hook_values"
POINTS = ("hook_rot_q", "hook_rot_k", VALUES, "hook_attn_scores", "hook_pattern")
OWNER = "_kvlens_component"
WITHOUT_EFFECT = {"cache_position", "output_attentions", "position_ids", "use_cache"}
"""Keywords that reach Transformers' attention functions and change nothing in them."""


def add_hook_points(component: nn.Module) -> None:
    """Give a bridge component that leaves attention to its Transformers module the hook points of the table above.

    A component without its projections (Nemotron-H's, which is made for a Mamba layer) gets those too: q, k, v and o.
    """
    held: Any = component
    if "o" not in held._modules:
        for name in "qkvo":
            projection = LinearBridge(name=f"{name}_proj")
            projection.set_original_component(getattr(held.original_component, f"{name}_proj"))
            setattr(held.original_component, f"{name}_proj", projection)
            held.add_module(name, projection)
    for name in POINTS:
        if not isinstance(getattr(held, name, None), HookPoint):
            setattr(held, name, HookPoint())
    held.original_component.__dict__[OWNER] = held
    # a component hands attributes that it does not know on to the module; a bound method follows when the model is copied
    held.__dict__["forward"] = _HookedForward(held).forward


class _HookedForward:
    """The forward pass of a component that :func:`add_hook_points` was given."""

    def __init__(self, component: Any):
        self.component, self.forward_of_bridge = component, component.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not is_hooked(*(getattr(self.component, name) for name in POINTS)):
            return self.forward_of_bridge(*args, **kwargs)
        config = self.component.original_component.config
        before = config._attn_implementation
        config._attn_implementation = NAME
        try:
            return self.forward_of_bridge(*args, **kwargs)
        finally:
            config._attn_implementation = before


def hooked_attention(
    module: Any,
    query: Float[Tensor, "batch head pos d_key"],
    key: Float[Tensor, "batch kv_head key d_key"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Float[Tensor, "batch pos head d_head"], None]:
    """Transformers' eager attention with hook points; what a cache brings is not hooked again.

    Raises:
        KVLensError: a keyword that this attention does not understand, such as a soft cap.
    """
    unknown = sorted(name for name, value in others.items() if name not in WITHOUT_EFFECT and value is not None)
    if unknown:
        raise KVLensError(
            f"{type(module).__name__} calls its attention with {', '.join(unknown)}, which kvlens' hooked attention does not "
            "understand; use a configuration without it"
        )
    held = module.__dict__[OWNER]
    n, group = query.shape[2], query.shape[1] // key.shape[1]
    query, new, new_value = held.hook_rot_q(query), held.hook_rot_k(key[:, :, -n:]), held.hook_values(value[:, :, -n:])
    key = torch.cat([key[:, :, :-n], new], dim=2).repeat_interleave(group, dim=1)
    value = torch.cat([value[:, :, :-n], new_value], dim=2)
    scores = _masked(query @ key.transpose(2, 3) * scaling, attention_mask)
    pattern = held.hook_attn_scores(scores).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    pattern = held.hook_pattern(nn.functional.dropout(pattern, dropout, module.training))
    return (pattern @ value.repeat_interleave(group, dim=1)).transpose(1, 2).contiguous(), None


def _masked(scores: Float[Tensor, "batch head pos key"], mask: Tensor | None) -> Float[Tensor, "batch head pos key"]:
    """Scores under a mask as Transformers' eager or fused attention gets it: to be added, True where seen, or none."""
    if mask is None:
        n, n_keys = scores.shape[-2:]
        mask = torch.ones(n, n_keys, dtype=torch.bool, device=scores.device).tril(n_keys - n)
    if mask.dtype == torch.bool:
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return scores + mask


AttentionInterface.register(NAME, hooked_attention)
