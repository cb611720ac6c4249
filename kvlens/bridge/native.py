"""Softmax attention that the bridge leaves to Transformers, made to show its queries, keys, scores and pattern.

While something is hooked to one of these, or a bias is read, the module's call of Transformers' attention interface comes
here, and is computed step by step as Transformers' eager attention does; else nothing changes.

| hook point | shape |
|---|---|
| ``hook_rot_q``, ``hook_rot_k`` | [batch, pos, head or kv_head, d_key], as they are scored |
| ``hook_values`` | [batch, kv_head, pos, d_head] |
| ``hook_attn_scores``, ``hook_pattern`` | [batch, head, pos, key], masked scores and their softmax |
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.conversion_utils.conversion_steps import RearrangeTensorConversion
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import LinearBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import AttentionInterface

from kvlens.errors import KVLensError

NAME = "kvlens_hooked"
VALUES_HOOK = "hook_values"
ROTATED = ("hook_rot_q", "hook_rot_k")
NATIVE_POINTS = (*ROTATED, VALUES_HOOK, "hook_attn_scores", "hook_pattern")
OWNER = "_kvlens_layer"
"""The attribute of a Transformers module that holds its :class:`kvlens.bridge.softmax.SoftmaxLayer`."""
WITHOUT_EFFECT = {"cache_position", "output_attentions", "output_router_logits", "position_ids", "use_cache"}
"""Keywords that reach Transformers' attention functions and change nothing in them."""


def add_hook_points(component: GeneralizedComponent) -> None:
    """Give a bridge component that leaves attention to its Transformers module the hook points of the table above.

    A component without its projections (Nemotron-H's, which is made for a Mamba layer) gets those too: q, k, v and o.
    """
    if "o" not in component._modules:
        for name in "qkvo":
            projection = LinearBridge(name=f"{name}_proj")
            projection.set_original_component(getattr(component.original_component, f"{name}_proj"))
            setattr(component.original_component, f"{name}_proj", projection)
            component.add_module(name, projection)
    for name in NATIVE_POINTS:
        if not isinstance(getattr(component, name, None), HookPoint):
            setattr(component, name, rotated_point() if name in ROTATED else HookPoint())


def rotated_point() -> HookPoint:
    """A point that [batch, head, pos, d_key] passes, and whose hooks see [batch, pos, head, d_key], as TransformerLens' do."""
    point = HookPoint()
    point.hook_conversion = RearrangeTensorConversion("batch head pos d_key -> batch pos head d_key")
    return point


def hooked_attention(
    module: nn.Module,
    query: Float[Tensor, "batch head pos d_key"],
    key: Float[Tensor, "batch kv_head key d_key"],
    value: Float[Tensor, "batch kv_head key d_head"],
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **others: object,
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
    layer, n, group = module.__dict__[OWNER], query.shape[2], query.shape[1] // key.shape[1]
    held = layer.attn
    own_scaling = getattr(module, "scaling", scaling)
    query = held.hook_rot_q(query * (scaling / own_scaling))  # as other families score them: OPT's come scaled
    new = layer.keys(held.hook_rot_k(key[:, :, -n:])), layer.values(value[:, :, -n:])
    key, value = (torch.cat([x[:, :, :-n], of_pass], dim=2) for x, of_pass in zip((key, value), new, strict=True))
    key, value = (x.repeat_interleave(group, dim=1) for x in layer.extended(key, value))
    scores = query @ key.transpose(2, 3) * own_scaling
    scores = scores if attention_mask is None else scores + attention_mask
    pattern = held.hook_attn_scores(scores).softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    pattern = held.hook_pattern(nn.functional.dropout(pattern, dropout, module.training))
    return (pattern @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, hooked_attention)
