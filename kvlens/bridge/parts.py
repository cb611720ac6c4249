"""The parts of a bridge's layers that read a prompt: one in most layers, attention and a state in Falcon-H1's.

Softmax attention that the bridge computes itself, step by step, can read a KV bias, and recurrent layers that have a mixer
(:mod:`kvlens.mixers`). A component of another class raises an error; what one of these classes computes in its own way, the
comparison with Transformers finds (:mod:`kvlens.bridge.comparison`).
"""

from functools import partial
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components import (
    JointQKVAttentionBridge,
    JointQKVPositionEmbeddingsAttentionBridge,
    MLAAttentionBridge,
    PositionEmbeddingsAttentionBridge,
)

from kvlens.bridge.native import add_hook_points
from kvlens.bridge.norms import norms_around
from kvlens.bridge.recurrent import RecurrentLayer
from kvlens.bridge.softmax import HeadSizes, SoftmaxLayer
from kvlens.bridge.table import SUPPORTED
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.mixers import has_mixer
from kvlens.model.protocol import Layer
from kvlens.model.protocol import Part as LayerPart
from kvlens.pretrained.translation import SUPPORTED_ARCHITECTURES

NATIVE = ("OlmoHybridAttention", "KimiLinearAttention", "NemotronHAttention", "JambaAttention")
"""Modules of Transformers to which the bridge leaves attention, and that kvlens opens up (:mod:`kvlens.bridge.native`)."""
RECURRENT = ("linear_attn", "mixer", "mamba", "conv")
"""What the bridge calls a recurrent layer within its block; in Nemotron-H, whatever the block has."""
TOKENWISE = ("NemotronHMLP", "NemotronHMoE")
"""Modules of Transformers that a block may have instead of attention, and that read no other token."""
FULL_ATTENTION = ("full_attention", "hybrid")
"""Kinds of layer in which a query sees every token before it; a hybrid one has a state beside attention."""
NO_STACK = "it is no stack of decoder blocks"
VARIABLE_ROTARY = ("dynamic", "longrope")
WINDOW_IN_FULL_ATTENTION = ("minimax",)
"""Model types whose window, where they have one, applies to the layers that they call full attention."""


class TokenwiseLayer(LayerPart):
    """A layer that is an MLP or experts alone, as in Nemotron-H: it reads no other token, so a prompt leaves nothing in it.

    Args:
        component: the bridge's component around it.
        layer: its number.
        d_model: of the residual stream.
    """

    def __init__(self, component: nn.Module, layer: int, d_model: int):
        self.component, self.layer, self.d_model = component, layer, d_model

    def hook_points(self) -> dict[str, HookPoint]:
        """None."""
        return {}

    def join(self, bias: KVBias, positions: Int[Tensor, "#batch pos"]) -> list[RemovableHandle]:
        """Nothing to do."""
        return []

    def observe(self, seen: dict[tuple[int, str], Tensor]) -> list[RemovableHandle]:
        """Nothing to see."""
        return []

    def output_weights(self) -> Float[Tensor, "0 1 d_model"]:
        """There are none, as the layer has no heads."""
        return torch.zeros(0, 1, self.d_model)


BridgePart = SoftmaxLayer | RecurrentLayer | TokenwiseLayer


def layers_of(bridge: Any) -> list[Layer]:
    """The layers of a KVTransformerBridge."""
    found = []
    for number, parts in groupby(bridge.__dict__["_parts"], key=lambda part: part.layer):
        block = bridge.blocks[number]
        norms = partial(norms_around, bridge, number)
        found.append(Layer(list(parts), getattr(block, "mlp", None), block.hook_out, norms))
    return found


def text_config(model: nn.Module) -> Any:
    """The part of a Transformers configuration that describes the language model."""
    config: Any = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def refuse_encoders(family: str, config: Any) -> None:
    """Raise KVLensError where a decoder reads an encoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise _no_way(family, NO_STACK)


def parts_of_bridge(bridge: Any) -> list[BridgePart]:
    """What reads a bias in the layers of ``bridge``, layer by layer, attention before a state in the same layer.

    Raises:
        KVLensError: an architecture, or a layer of it, that is not supported yet.
    """
    family = bridge.cfg.architecture
    model = bridge.original_model
    refuse_encoders(family, model.config)
    if not hasattr(bridge, "blocks"):
        raise _no_way(family, NO_STACK)
    if not bridge.adapter.supports_causal_loss:
        raise _no_way(family, "its attention is not causal: a prompt's keys would depend on the text behind it")
    config = text_config(model)
    _check_rotary(family, config)
    return [part for layer in range(len(bridge.blocks)) for part in _parts(bridge, family, config, layer)]


def _parts(bridge: Any, family: str, config: Any, layer: int) -> list[BridgePart]:
    block = bridge.blocks[layer]
    name: str = next((name for name in RECURRENT if getattr(block, name, None) is not None), "")
    recurrent: Any = getattr(block, name) if name else None
    attn: Any = getattr(block, "attn", None)
    held = "" if recurrent is None else type(recurrent.original_component).__name__
    if recurrent is not None and has_mixer(recurrent.original_component):
        if attn is None:
            return [RecurrentLayer(recurrent, layer)]
        return [_attention(bridge, family, config, layer, attn, None), RecurrentLayer(recurrent, layer, name)]
    if held in TOKENWISE:
        return [TokenwiseLayer(recurrent, layer, bridge.cfg.d_model)]
    return [_attention(bridge, family, config, layer, recurrent if held in NATIVE else attn, recurrent)]


def _attention(bridge: Any, family: str, config: Any, layer: int, attn: Any, recurrent: Any) -> SoftmaxLayer:
    """The attention of a layer, ``attn``; or, in the place of it, ``recurrent``, for which there is no mixer."""
    if not _is_shown(attn):
        if recurrent is not None:
            held = type(recurrent.original_component).__name__
            raise _no_way(family, f"kvlens has no mixer for layer {layer} ({held})")
        if attn is None:
            raise _no_way(family, f"layer {layer} has neither attention nor a recurrent state")
        raise _no_way(
            family, f"layer {layer} ({type(attn).__name__}) shows neither its queries nor its scores in a known place"
        )
    module: Any = attn.original_component
    if getattr(getattr(module, "config", None), "clip_qkv", None) is not None:
        raise _no_way(family, f"layer {layer} clamps queries, keys and values behind their hook points (clip_qkv)")
    if getattr(attn, "hook_gate", None) is not None:
        raise _no_way(family, f"layer {layer} gates its output in a place that has no known way")
    cfg = bridge.cfg
    n_kv_heads = getattr(cfg, "n_key_value_heads", None) or cfg.n_heads
    if isinstance(attn, MLAAttentionBridge):
        _settle_latent(bridge, attn)
        n_kv_heads = cfg.n_heads
    d_head = int(getattr(module, "v_head_dim", getattr(module, "head_dim", cfg.d_head)))
    if d_head != cfg.d_head:
        raise _no_way(family, f"layer {layer} has heads of {d_head} dimensions, the configuration of {cfg.d_head}")
    sizes = HeadSizes(cfg.n_heads, n_kv_heads, d_head, int(getattr(module, "qk_head_dim", d_head)))
    return SoftmaxLayer(attn, layer, sizes, _window(family, config, layer), "mixer" if attn is recurrent else "attn")


def _is_shown(attn: Any) -> bool:
    """Whether a component shows its scores and pattern, some of them opened up for it."""
    if attn is None:
        return False
    if type(attn.original_component).__name__ in NATIVE:
        add_hook_points(attn)
    elif isinstance(attn, JointQKVPositionEmbeddingsAttentionBridge):
        show_rotated(attn)
    else:
        return type(attn) is JointQKVAttentionBridge or isinstance(attn, PositionEmbeddingsAttentionBridge | MLAAttentionBridge)
    return True


def show_rotated(attn: Any) -> None:
    """Give rotary attention with one projection for queries, keys and values (GPT-NeoX, Phi-3) ``hook_rot_q`` and
    ``hook_rot_k``, [batch, head or kv_head, pos, d_head], which TransformerLens' component lacks."""
    attn.hook_rot_q, attn.hook_rot_k = HookPoint(), HookPoint()
    attn.__dict__["_apply_rotary_pos_emb"] = partial(_rotated, attn)


def _rotated(attn: Any, *given: Tensor) -> tuple[Tensor, Tensor]:
    q, k = type(attn)._apply_rotary_pos_emb(attn, *given)
    return attn.hook_rot_q(q), attn.hook_rot_k(k)


def _settle_latent(bridge: Any, attn: Any) -> None:
    """Latent attention (DeepSeek-V3): values' own size in the configuration and at ``hook_z``, where TransformerLens takes
    Transformers' ``head_dim``, the rotated part of a key."""
    bridge.cfg.d_head = attn.original_component.v_head_dim
    attn.o.hook_in.hook_conversion.d_head = bridge.cfg.d_head


def _window(family: str, config: Any, layer: int) -> int | None:
    """How many tokens a query of a layer sees, including its own; None for all."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds else None
    window = getattr(config, "sliding_window", None)
    if kind in (None, "sliding_attention") or config.model_type in WINDOW_IN_FULL_ATTENTION:
        return window
    if kind not in FULL_ATTENTION:
        raise _no_way(family, f"layer {layer} is of kind {kind!r}")
    return None


def _check_rotary(family: str, config: Any) -> None:
    """Raise where angles depend on the length of the text: a prompt's keys would turn as the text grows."""
    rotary = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for one in [rotary, *(each for each in rotary.values() if isinstance(each, dict))]:
        kind = one.get("rope_type", one.get("type"))
        if kind in VARIABLE_ROTARY:
            raise _no_way(family, f"its rotary positions ({kind}) change with the length of the text")


def _no_way(family: str, why: str) -> KVLensError:
    other = "; HookedKVTransformer.from_pretrained builds it with one" if family in SUPPORTED_ARCHITECTURES else ""
    return KVLensError(
        f"KVTransformerBridge: {family} has no way to read a KV bias yet: {why}. Models that have one: {SUPPORTED}, and others "
        f"whose layers the bridge computes in the same way; a plain TransformerBridge runs this one without a bias{other}"
    )
