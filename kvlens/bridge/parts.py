"""The parts of a bridge's layers that read a prompt: one in most layers, attention and a state in Falcon-H1's.

Softmax attention that the bridge computes itself, step by step, can read a KV bias, and recurrent layers that have a mixer
(:mod:`kvlens.mixers`). A component of another class raises an error; what one of these classes computes in its own way, the
comparison with Transformers finds (:mod:`kvlens.bridge.comparison`).

Below them stand the norms around the parts, measured and not read: families write the gain of a norm in ways of their own (as
1 + w, in float32, as a weight of another name), but a norm is linear up to its scale, so its gain, its bias and whether it
subtracts the mean follow from what it makes of three vectors. Last is the fingerprint of it all: Transformers' configuration,
and a hash of the weights by Transformers' names.
"""

import json
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components import (
    JointQKVAttentionBridge,
    JointQKVPositionEmbeddingsAttentionBridge,
    MLAAttentionBridge,
    PositionEmbeddingsAttentionBridge,
)
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent
from transformers import PreTrainedConfig, PreTrainedModel

from kvlens.bridge.native import add_hook_points, rotated_point
from kvlens.bridge.recurrent import RecurrentLayer, ShiftedMLP
from kvlens.bridge.softmax import HeadSizes, SoftmaxLayer
from kvlens.bridge.table import SUPPORTED
from kvlens.errors import KVLensError
from kvlens.kv_bias import Fingerprint, KVBias
from kvlens.mixers import has_mixer
from kvlens.model.fingerprint import weights_hash, while_unchanged
from kvlens.model.protocol import Block, Ends, LinearNorm, Norms
from kvlens.model.protocol import Part as LayerPart
from kvlens.pretrained.translation import SUPPORTED_ARCHITECTURES

NATIVE = (
    *("GPTJAttention", "OPTAttention"),
    *("OlmoHybridAttention", "KimiLinearAttention", "NemotronHAttention", "JambaAttention"),
)
"""Modules of Transformers to which the bridge leaves attention, and that kvlens opens up (:mod:`kvlens.bridge.native`)."""
RECURRENT = ("linear_attn", "mixer", "mamba", "conv")
"""What the bridge calls a recurrent layer within its block; in Nemotron-H, whatever the block has."""
TOKENWISE = ("NemotronHMLP", "NemotronHMoE")
"""Modules of Transformers that a block may have instead of attention, and that read no other token."""
SHIFTED_MLPS = ("RwkvChannelMixing",)
"""Modules that are a layer's MLP and mix its input with that of the token before."""
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


BridgePart = SoftmaxLayer | RecurrentLayer | ShiftedMLP | TokenwiseLayer


def layers_of(bridge: TransformerBridge) -> list[Block]:
    """The layers of a KVTransformerBridge."""
    found = []
    for number, parts in groupby(bridge.__dict__["_parts"], key=lambda part: part.layer):
        block = bridge.blocks[number]
        norms = partial(norms_around, bridge, number)
        heads = [part for part in parts if not isinstance(part, ShiftedMLP)]
        modules = partial(_norms_of, block)
        found.append(Block(heads, _mlp_of(block), block.hook_out, norms, modules, _mlp_of(block, "in")))
    return found


def _mlp_of(block: GeneralizedComponent, end: str = "out") -> nn.Module | None:
    """What the output of a block's MLP comes out of, or what it reads goes into: the MLP, a norm behind it, or its projections
    where Transformers has no module around it (OPT)."""
    mlp = getattr(block, "mlp", None)
    if mlp is None:
        return None
    behind = _first_of(block.original_component, BEHIND_MLP) if end == "out" else None
    return behind or (mlp if mlp.name is not None else getattr(mlp, end))


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The part of a Transformers configuration that describes the language model."""
    config = model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def refuse_encoders(family: str, config: PreTrainedConfig) -> None:
    """Raise KVLensError where a decoder reads an encoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise _no_way(family, NO_STACK)


def parts_of_bridge(bridge: TransformerBridge) -> list[BridgePart]:
    """What reads a bias in the layers of ``bridge``, layer by layer, attention before a state in the same layer.

    Raises:
        KVLensError: an architecture, or a layer of it, that is not supported yet.
    """
    family = bridge.cfg.architecture
    model = bridge.original_model
    refuse_encoders(family, model.config)
    if not bridge.adapter.supports_causal_loss:
        raise _no_way(family, "its attention is not causal: a prompt's keys would depend on the text behind it")
    config = text_config(model)
    _check_rotary(family, config)
    return [part for layer in range(len(bridge.blocks)) for part in _parts(bridge, family, config, layer)]


def _parts(bridge: TransformerBridge, family: str, config: PreTrainedConfig, layer: int) -> list[BridgePart]:
    block = bridge.blocks[layer]
    name: str = next((name for name in RECURRENT if getattr(block, name, None) is not None), "")
    recurrent = getattr(block, name) if name else None
    attn = getattr(block, "attn", None)
    held = "" if recurrent is None else type(recurrent.original_component).__name__
    if recurrent is not None and has_mixer(recurrent.original_component):
        if attn is None:
            part = RecurrentLayer(recurrent, layer)
            mlp = getattr(block, "mlp", None)
            shifted = mlp is not None and type(mlp.original_component).__name__ in SHIFTED_MLPS
            return [part, ShiftedMLP(mlp, part)] if shifted else [part]
        return [_attention(bridge, family, config, layer, attn, None), RecurrentLayer(recurrent, layer, name)]
    if recurrent is not None and held in TOKENWISE:
        return [TokenwiseLayer(recurrent, layer, bridge.cfg.d_model)]
    return [_attention(bridge, family, config, layer, recurrent if held in NATIVE else attn, recurrent)]


def _attention(
    bridge: TransformerBridge,
    family: str,
    config: PreTrainedConfig,
    layer: int,
    attn: GeneralizedComponent | None,
    recurrent: GeneralizedComponent | None,
) -> SoftmaxLayer:
    """The attention of a layer, ``attn``; or, in the place of it, ``recurrent``, for which there is no mixer."""
    if attn is None or not _is_shown(attn):
        held = type(attn if recurrent is None else recurrent.original_component).__name__
        raise _no_way(family, f"layer {layer} ({held}) has neither a mixer in kvlens nor queries and scores in a known place")
    module = attn.original_component
    clamped, gated = getattr(getattr(module, "config", None), "clip_qkv", None), getattr(attn, "hook_gate", None)
    if clamped is not None or gated is not None:
        what = "clamps queries, keys and values (clip_qkv)" if gated is None else "gates its output"
        raise _no_way(family, f"layer {layer} {what} behind its hook points")
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


def _is_shown(attn: GeneralizedComponent) -> bool:
    """Whether a component shows its scores and pattern, some of them opened up for it."""
    if type(attn.original_component).__name__ in NATIVE:
        add_hook_points(attn)
    elif isinstance(attn, JointQKVPositionEmbeddingsAttentionBridge):
        show_rotated(attn)
    else:
        return type(attn) is JointQKVAttentionBridge or isinstance(attn, PositionEmbeddingsAttentionBridge | MLAAttentionBridge)
    return True


def show_rotated(attn: GeneralizedComponent) -> None:
    """Give rotary attention with one projection for queries, keys and values (GPT-NeoX, Phi-3) ``hook_rot_q`` and
    ``hook_rot_k``, [batch, pos, head or kv_head, d_head], which TransformerLens' component lacks."""
    attn.hook_rot_q, attn.hook_rot_k = rotated_point(), rotated_point()
    attn.__dict__["_apply_rotary_pos_emb"] = partial(_rotated, attn)


def _rotated(attn: GeneralizedComponent, *given: Tensor) -> tuple[Tensor, Tensor]:
    q, k = type(attn)._apply_rotary_pos_emb(attn, *given)
    return attn.hook_rot_q(q), attn.hook_rot_k(k)


def _settle_latent(bridge: TransformerBridge, attn: GeneralizedComponent) -> None:
    """Latent attention (DeepSeek-V3): values' own size in the configuration and at ``hook_z``, where TransformerLens takes
    Transformers' ``head_dim``, the rotated part of a key."""
    bridge.cfg.d_head = attn.original_component.v_head_dim
    attn.o.hook_in.hook_conversion.d_head = bridge.cfg.d_head


def _window(family: str, config: PreTrainedConfig, layer: int) -> int | None:
    """How many tokens a query of a layer sees, including its own; None for all."""
    kinds = getattr(config, "layer_types", None)
    kind = kinds[layer] if kinds else None
    window = getattr(config, "sliding_window", None)
    if kind in (None, "sliding_attention") or config.model_type in WINDOW_IN_FULL_ATTENTION:
        return window
    if kind not in FULL_ATTENTION:
        raise _no_way(family, f"layer {layer} is of kind {kind!r}")
    return None


def _check_rotary(family: str, config: PreTrainedConfig) -> None:
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


PROBE = 1e3
"""Size of the vectors that a norm is tried with: against it, what it adds to the variance is below float64's rounding."""


BEFORE = ("input_layernorm", "ln_1", "self_attn_layer_norm")
"""What Transformers calls the norm before the attention."""
BEFORE_MLP = ("ln_2", "final_layer_norm", "post_attention_layernorm")
"""... before the MLP, where none stands behind."""
BEHIND_MLP = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""... and behind it."""


def measured(module: nn.Module, like: Tensor) -> tuple[Float[Tensor, " d_model"], Float[Tensor, " d_model"], bool]:
    """The norm that a module computes on vectors of the residual stream, without hooks, up to its scale.

    Args:
        module: a bridge component around a norm, or around nothing (no norm).
        like: a weight of the model, for device and dtype if the norm has no weights.

    Returns:
        gain, bias and whether it centers, of x -> (x - mean(x)) * gain + bias; in float64.
    """
    norm = getattr(module, "original_component", module)
    weights = next(norm.parameters(), like)
    d_model = like.shape[0]

    def apply(x: Tensor) -> Tensor:
        result: Tensor = norm(x.to(weights)[None, None])[0, 0]
        return result.double().cpu()

    sign = torch.ones(d_model, dtype=torch.float64)
    sign[1::2] = -1
    sign = sign - sign.mean()  # an odd number of dimensions leaves a mean
    there, back, raised = (apply(PROBE * x) for x in (sign, -sign, sign + 1))
    size = sign.square().mean().sqrt()
    centers = bool(torch.allclose(raised, there, rtol=1e-3, atol=1e-3 * float(there.abs().max())))
    return (there - back) / 2 * size / sign, (there + back) / 2, centers


def ends_of(model: TransformerBridge) -> Ends:
    """Return the ends of a KVTransformerBridge; the scale follows from what the final norm makes of x."""
    w_u, b_u = model.W_U, getattr(model, "b_U", None)
    factor = getattr(model.original_model.config, "lm_head_multiplier", 1.0)
    w_u = w_u if factor == 1 else w_u * factor
    gain, added, centers = measured(model.ln_final, w_u)
    module = model.ln_final.original_component
    b_u = torch.zeros(w_u.shape[1], device=w_u.device) if b_u is None else b_u
    weight, bias = gain.to(w_u), added.to(w_u) if float(added.abs().max()) > 1e-6 else None

    def scale(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        centered = x - x.mean(dim=-1, keepdim=True) if centers else x
        y = module(x.to(next(module.parameters(), w_u))).double()
        y = y if bias is None else y - bias.double()
        return (centered * weight.double()).norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True)

    return Ends(model.blocks[0].hook_in, getattr(model, "pos_embed", None), w_u, b_u, weight, bias, centers, scale)


def norms_around(model: TransformerBridge, layer: int) -> tuple[LinearNorm | None, LinearNorm | None]:
    """The norms before and after a layer's heads, by what they compute; None where there are none."""
    like, found = model.W_U, _norms_of(model.blocks[layer])

    def linear(norm: nn.Module) -> LinearNorm:
        gain, _, centers = measured(norm, like)
        return LinearNorm(gain.to(like), centers)

    before, behind = (None if norm is None else linear(norm) for norm in found[:2])
    return before, behind


def _norms_of(block: GeneralizedComponent) -> Norms:
    """The norms of a block, by their names in Transformers.

    ``post_attention_layernorm`` comes after the attention in blocks that have a norm after the MLP too (Gemma 2 and 3, OLMo 2),
    but in GLM-4 0414; in others it stands before the MLP, and where there is no norm for the MLP it reads what the heads do.
    """
    held = block.original_component
    before, behind = _first_of(held, BEFORE), _first_of(held, ("post_self_attn_layernorm",))
    if hasattr(held, "post_feedforward_layernorm"):
        return Norms(before, held.post_attention_layernorm, _first_of(held, ("pre_feedforward_layernorm",)))
    return Norms(before, behind, _first_of(held, BEFORE_MLP) or before)


def _first_of(held: object, names: Sequence[str]) -> nn.Module | None:
    return next((getattr(held, name) for name in names if hasattr(held, name)), None)


WITHOUT_EFFECT = {
    *("_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("id2label", "label2id", "output_attentions", "output_hidden_states", "return_dict", "tie_word_embeddings"),
    *("initializer_range", "bos_token_id", "eos_token_id", "pad_token_id", "problem_type", "task_specific_params"),
    *("chunk_size_feed_forward", "max_position_embeddings", "n_positions", "n_ctx", "attn_pdrop", "resid_pdrop"),
    *("embd_pdrop", "attention_dropout", "router_aux_loss_coef", "output_router_logits", "summary_type"),
    *("summary_use_proj", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "pretraining_tp"),
    *("is_encoder_decoder", "_attn_implementation", "beside", "checksum", "use_attn_in", "use_attn_result"),
    *("use_hook_mlp_in", "use_split_qkv_input"),
}
"""Fields of a Transformers configuration that change no activation of a text model. All others count."""


def fingerprint_of(bridge: TransformerBridge, with_weights: bool = True) -> Fingerprint:
    """Structure and current weights. Reads every weight if one has changed since the last time, unless they are left out."""
    cfg, config = bridge.cfg, text_config(bridge.original_model)
    parts = bridge.__dict__["_parts"]
    sizes, attention = sizes_of(parts), {part.layer for part in parts if isinstance(part, SoftmaxLayer)}
    fields = {name: value for name, value in config.to_dict().items() if name not in WITHOUT_EFFECT}
    rest = {
        "architecture": cfg.architecture,
        "front_end": "TransformerBridge",  # a bias of a HookedKVTransformer has none
        "weights_processed": bool(getattr(bridge, "_weights_processed", False)),
        **fields,
    }
    return Fingerprint(
        attention="softmax",
        n_layers=cfg.n_layers,
        n_heads=sizes.n_heads,
        n_kv_heads=sizes.n_kv_heads,
        d_model=cfg.d_model,
        d_head=sizes.d_head,
        d_phi=0,
        d_vocab=cfg.d_vocab,
        feature_map="none",
        normalizer="softmax",
        attn_scale=0.0,  # by layer, and implied by the configuration
        positional_embedding_type=cfg.positional_embedding_type,
        rotary_placement=None,
        decay="none",
        kv_shift="none",
        heads=tuple(
            (sizes.n_heads, sizes.n_kv_heads, sizes.d_head, 0) if n in attention else (0,) * 4 for n in range(cfg.n_layers)
        ),
        rest="; ".join(f"{name} {json.dumps(value, sort_keys=True, default=str)}" for name, value in sorted(rest.items())),
        weights=while_unchanged(bridge, (), lambda: weights_hash(_weights(bridge))) if with_weights else "",
        d_key=None if sizes.d_key == sizes.d_head else sizes.d_key,
    )


def sizes_of(parts: Sequence[BridgePart]) -> HeadSizes:
    """The heads of the attention layers; of a model without them, those of its states."""
    for part in parts:
        if isinstance(part, SoftmaxLayer):
            return part.sizes
    mixer = next(part.mixer for part in parts if isinstance(part, RecurrentLayer))
    return HeadSizes(mixer.n_heads, mixer.n_heads, mixer.d_v, mixer.d_v)


def _weights(bridge: TransformerBridge) -> dict[str, Tensor]:
    """Each weight once, by the name that it has in Transformers, or in the bridge where it was split there."""
    once: dict[tuple[object, ...], tuple[str, Tensor]] = {}
    for name, value in bridge.original_model.state_dict().items():
        clean = name.replace("_original_component.", "")
        key = (value.data_ptr(), tuple(value.shape), value.stride())
        if key not in once or clean < once[key][0]:
            once[key] = clean, value
    return dict(once.values())
