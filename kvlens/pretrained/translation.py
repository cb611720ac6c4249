"""Models of Transformers as ours: one table says where each architecture keeps its weights and how it differs from Llama.

:func:`translate` makes a configuration from Transformers' own, :func:`convert` puts the weights under our names, without
copying them. What a family does not have (biases, mostly) is left out of the result.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError
from kvlens.pretrained.rope_parameters import refused, rotary_fields

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Family:
    """Where a family's weights are, and what its configuration leaves unsaid; the defaults are Llama's.

    Attributes:
        embed, positions, final_norm, layers: modules of the model.
        ln1, ln2: norms of a layer, before attention and MLP (behind them in OLMo 2 and 3); ``ln2`` None where ln1 serves both.
        ln1_post, ln2_post: those behind, in Gemma 2 and 3.
        qkv: the projections, or the one that holds all three; ``fused`` says how.
        fused: "rows": all queries, then keys, then values; "heads": each head's three together.
        out, mlp_in, mlp_out, gate: the other projections of a layer; ``gate`` None in MLPs without.
        gate_up: one projection for gate and input, in this order.
        experts: the layer's mixture of experts.
        transposed: weights are stored [d_in, d_out].
        norm_offset: added to norm weights (Gemma stores w - 1).
        qk_norm: queries and keys are normalized.
        always_grouped: keys and values are stored as grouped even if every query head has its own.
        norm: "LN", "RMS", or "none": a layer norm without weights.
        longest: the context length, if the configuration's own is longer (it can be set to that).
        fields: further fields of our configuration.
    """

    embed: str = "model.embed_tokens"
    positions: str | None = None
    final_norm: str = "model.norm"
    layers: str = "model.layers"
    ln1: str = "input_layernorm"
    ln2: str | None = "post_attention_layernorm"
    ln1_post: str | None = None
    ln2_post: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    fused: Literal["rows", "heads"] = "rows"
    out: str = "self_attn.o_proj"
    mlp_in: str = "mlp.up_proj"
    mlp_out: str = "mlp.down_proj"
    gate: str | None = "mlp.gate_proj"
    gate_up: str | None = None
    experts: str | None = None
    transposed: bool = False
    norm_offset: float = 0.0
    qk_norm: bool = False
    always_grouped: bool = False
    norm: Literal["LN", "RMS", "none"] = "RMS"
    longest: int | None = None
    fields: Mapping[str, object] = field(default_factory=dict)


_NEVER_BOS = {"default_prepend_bos": False}
_QWEN = {"final_rms": True, "tokenizer_prepends_bos": True, **_NEVER_BOS}
_GPT2 = dict(embed="transformer.wte", final_norm="transformer.ln_f", layers="transformer.h", ln1="ln_1", norm="LN", gate=None)
_GEMMA = dict(norm_offset=1.0, always_grouped=True)
_GEMMA_2 = dict(ln1_post="post_attention_layernorm", ln2="pre_feedforward_layernorm", ln2_post="post_feedforward_layernorm")
_GEMMA_2_FIELDS = {"final_rms": True, "use_normalization_before_and_after": True}
_BEHIND = dict(ln1="post_attention_layernorm", ln2="post_feedforward_layernorm", qk_norm=True)
_EXPERTS = dict(experts="mlp", always_grouped=True)
_NEOX_MLP = dict(mlp_in="mlp.dense_h_to_4h", mlp_out="mlp.dense_4h_to_h", gate=None, norm="LN", fused="heads")
_ALL_NEW = {"norm_topk_prob": True}

FAMILIES: dict[str, Family] = {
    "ApertusForCausalLM": Family(
        ln1="attention_layernorm",
        ln2="feedforward_layernorm",
        gate=None,
        qk_norm=True,
        fields={"final_rms": True, "use_qk_norm": True},
    ),
    "BloomForCausalLM": Family(
        **{**_NEOX_MLP, "embed": "transformer.word_embeddings", "final_norm": "transformer.ln_f", "layers": "transformer.h"},  # type: ignore[arg-type]
        qkv=("self_attention.query_key_value",),
        out="self_attention.dense",
        fields={"act_fn": "gelu_fast", "post_embedding_ln": True, "positional_embedding_type": "alibi", **_NEVER_BOS},
    ),
    "GPT2LMHeadModel": Family(
        **_GPT2,  # type: ignore[arg-type]
        positions="transformer.wpe",
        ln2="ln_2",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_in="mlp.c_fc",
        mlp_out="mlp.c_proj",
        transposed=True,
    ),
    "GPTJForCausalLM": Family(
        **_GPT2,  # type: ignore[arg-type]
        ln2=None,
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.out_proj",
        mlp_in="mlp.fc_in",
        mlp_out="mlp.fc_out",
        fields={"parallel_attn_mlp": True, "rotary_adjacent_pairs": True, "positional_embedding_type": "rotary"},
    ),
    "GPTNeoForCausalLM": Family(
        **_GPT2,  # type: ignore[arg-type]
        positions="transformer.wpe",
        ln2="ln_2",
        qkv=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        out="attn.attention.out_proj",
        mlp_in="mlp.c_fc",
        mlp_out="mlp.c_proj",
        fields={"use_attn_scale": False},
    ),
    "GPTNeoXForCausalLM": Family(
        **{**_NEOX_MLP, "embed": "gpt_neox.embed_in", "final_norm": "gpt_neox.final_layer_norm", "layers": "gpt_neox.layers"},  # type: ignore[arg-type]
        qkv=("attention.query_key_value",),
        out="attention.dense",
        fields=_NEVER_BOS,
    ),
    "GemmaForCausalLM": Family(**_GEMMA, fields={"final_rms": True}),  # type: ignore[arg-type]
    "Gemma2ForCausalLM": Family(**_GEMMA, **_GEMMA_2, fields=_GEMMA_2_FIELDS),  # type: ignore[arg-type]
    "Gemma3ForCausalLM": Family(**_GEMMA, **_GEMMA_2, qk_norm=True, fields={**_GEMMA_2_FIELDS, "use_qk_norm": True}),  # type: ignore[arg-type]
    "GptOssForCausalLM": Family(**_EXPERTS, fields={"final_rms": True, "use_attention_sinks": True}),  # type: ignore[arg-type]
    "LlamaForCausalLM": Family(fields={"final_rms": True}),
    "MistralForCausalLM": Family(always_grouped=True, longest=2048),
    "MixtralForCausalLM": Family(**_EXPERTS, fields=_ALL_NEW),  # type: ignore[arg-type]
    "OPTForCausalLM": Family(
        embed="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions",
        final_norm="model.decoder.final_layer_norm",
        layers="model.decoder.layers",
        ln1="self_attn_layer_norm",
        ln2="final_layer_norm",
        out="self_attn.out_proj",
        mlp_in="fc1",
        mlp_out="fc2",
        gate=None,
        norm="LN",
    ),
    "OlmoForCausalLM": Family(norm="none"),
    "Olmo2ForCausalLM": Family(**_BEHIND),  # type: ignore[arg-type]
    "Olmo3ForCausalLM": Family(**_BEHIND, always_grouped=True),  # type: ignore[arg-type]
    "OlmoeForCausalLM": Family(**_EXPERTS, qk_norm=True),  # type: ignore[arg-type]
    "PhiForCausalLM": Family(
        final_norm="model.final_layernorm",
        ln2=None,
        out="self_attn.dense",
        mlp_in="mlp.fc1",
        mlp_out="mlp.fc2",
        gate=None,
        norm="LN",
        fields={"parallel_attn_mlp": True, **_NEVER_BOS},
    ),
    "Phi3ForCausalLM": Family(qkv=("self_attn.qkv_proj",), gate_up="mlp.gate_up_proj"),
    "mingpt": Family(
        embed="tok_emb",
        positions="pos_emb",
        final_norm="ln_f",
        layers="blocks",
        ln1="ln1",
        ln2="ln2",
        qkv=("attn.query", "attn.key", "attn.value"),
        out="attn.proj",
        mlp_in="mlp.0",
        mlp_out="mlp.2",
        gate=None,
        norm="LN",
    ),
    "Qwen2ForCausalLM": Family(always_grouped=True, fields=_QWEN),
    "Qwen3ForCausalLM": Family(qk_norm=True, longest=2048, fields={**_QWEN, "use_qk_norm": True}),
}
"""The families, by Transformers' names of their classes, and minGPT."""

SUPPORTED_ARCHITECTURES = tuple(name for name in FAMILIES if name != "mingpt")
"""Architectures of Transformers that are translated."""
SAME_TEXT_MODEL = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}
"""Classes of models of images and text, whose text model is another class'."""
BAICHUAN_M1 = "BaichuanM1ForCausalLM"
"""The one that Transformers does not have, in :mod:`kvlens.pretrained.baichuan`."""

ACTIVATION_NAMES = {
    **{name: name for name in ("relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "relu2")},
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_new",
}
"""Activations by Transformers' names, and by ours."""


def unsupported(architecture: str, where: str) -> KVLensError:
    """Make the error for an architecture that cannot be built from its config."""
    return KVLensError(
        f"from_pretrained: {where} has the architecture {architecture}, which HookedTransformer does "
        "not compute. Supported: "
        f"{', '.join(sorted((*SUPPORTED_ARCHITECTURES, BAICHUAN_M1)))}; "
        "KVTransformerBridge runs others in transformers' own model"
    )


def architecture_of(model_class: type) -> str:
    """The family of a class of Transformers (``config.architectures`` is None in a model made in memory)."""
    for parent in model_class.__mro__:
        known = SAME_TEXT_MODEL.get(parent.__name__, parent.__name__)
        if known in SUPPORTED_ARCHITECTURES:
            return known
    raise unsupported(model_class.__name__, "the model")


def translate(hf_config: PreTrainedConfig, architecture: str, n_ctx: int | None = None) -> dict[str, Any]:
    """The fields of our configuration that say what Transformers' does, for a model of this architecture.

    ``n_ctx`` replaces the model's own context length; windows of Qwen's that are no shorter than that are left out.

    Raises:
        KVLensError: an activation or a scaling of rotary positions that our model does not compute.
    """
    family, d_model, n_heads = FAMILIES[architecture], hf_config.hidden_size, hf_config.num_attention_heads
    n_kv = getattr(hf_config, "num_key_value_heads", None) or n_heads
    own = getattr(hf_config, "max_position_embeddings", None) or 2048  # BLOOM's says nothing
    fields: dict[str, Any] = {
        "d_model": d_model,
        "d_head": getattr(hf_config, "head_dim", None) or d_model // n_heads,
        "n_heads": n_heads,
        "n_key_value_heads": n_kv if family.always_grouped or n_kv != n_heads else None,
        "n_layers": hf_config.num_hidden_layers,
        "n_ctx": n_ctx or min(own, family.longest or own),
        "d_mlp": _first(hf_config, "intermediate_size", "ffn_dim", "n_inner") or 4 * d_model,
        "d_vocab": hf_config.vocab_size,
        "eps": _first(hf_config, "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon") or 1e-5,
        "act_fn": _activation(hf_config, architecture),
        "normalization_type": "RMS" if family.norm == "RMS" else "LN",
        "gated_mlp": bool(family.gate or family.gate_up or family.experts),
        "original_architecture": architecture,
        "tie_word_embeddings": bool(getattr(hf_config, "tie_word_embeddings", False)),
        **_of_layers(hf_config, architecture),
        **_of_parts(hf_config, architecture),
    }
    fields |= family.fields
    if architecture.startswith("Qwen") and fields.get("use_local_attn") and fields["window_size"] >= fields["n_ctx"]:
        fields |= {"use_local_attn": False, "window_size": None, "attn_types": None}
    if getattr(hf_config, "rope_parameters", None):
        kinds = set(fields.get("attn_types") or ()) if fields.get("use_local_attn") else set()
        fields["positional_embedding_type"] = "rotary"
        fields |= rotary_fields(hf_config, architecture, kinds or {"global"}, fields["d_head"])
    return fields


def _first(hf_config: PreTrainedConfig, *names: str) -> Any:
    return next((value for name in names if (value := getattr(hf_config, name, None)) is not None), None)


def _activation(hf_config: PreTrainedConfig, architecture: str) -> str:
    known = {**ACTIVATION_NAMES, **({"xielu": "xielu"} if architecture == "ApertusForCausalLM" else {})}  # learned there alone
    names = ("activation_function", "hidden_activation", "hidden_act")
    name = next((n for n in names if hasattr(hf_config, n)), "no activation")
    given = getattr(hf_config, name, "gelu")
    if given not in known:
        raise refused(architecture, name, given, f"it has {', '.join(known)}")
    return known[given]


def _of_layers(hf_config: PreTrainedConfig, architecture: str) -> dict[str, object]:
    """Say which layers see a window only."""
    n, types = hf_config.num_hidden_layers, getattr(hf_config, "layer_types", None)
    if architecture == "GPTNeoForCausalLM":
        return {"use_local_attn": True, "window_size": hf_config.window_size, "attn_types": list(hf_config.attention_layers)}
    window = getattr(hf_config, "sliding_window", None)
    if window is None or (
        types is None and architecture not in ("MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM")
    ):
        return {}
    types = ["sliding_attention"] * n if types is None else types
    if "sliding_attention" not in types:
        return {}
    attn_types = ["local" if kind == "sliding_attention" else "global" for kind in types]
    return {"use_local_attn": True, "window_size": window, "attn_types": attn_types}


def _of_parts(hf_config: PreTrainedConfig, architecture: str) -> dict[str, object]:
    """What some configurations say of attention, experts and logits."""
    fields: dict[str, Any] = {
        "clip_qkv": getattr(hf_config, "clip_qkv", None),
        "attn_scores_soft_cap": getattr(hf_config, "attn_logit_softcapping", None) or -1.0,
        "output_logits_soft_cap": getattr(hf_config, "final_logit_softcapping", None) or -1.0,
    }
    if architecture == "GPT2LMHeadModel":
        fields["use_attn_scale"] = hf_config.scale_attn_weights
        fields["scale_attn_by_inverse_layer_idx"] = hf_config.scale_attn_by_inverse_layer_idx
    if architecture == "GPTJForCausalLM":
        fields["rotary_dim"] = hf_config.rotary_dim
    if architecture == "GPTNeoXForCausalLM":
        fields["parallel_attn_mlp"] = hf_config.use_parallel_residual
    if hasattr(hf_config, "query_pre_attn_scalar"):
        fields["attn_scale"] = hf_config.query_pre_attn_scalar**0.5
    if FAMILIES[architecture].experts:
        fields["num_experts"] = _first(hf_config, "num_local_experts", "num_experts")
        fields["experts_per_token"] = hf_config.num_experts_per_tok
        fields["norm_topk_prob"] = getattr(hf_config, "norm_topk_prob", False)
    return fields


def convert(tensors: Mapping[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """Weights by our names, as views of ``tensors``, the state dict of a model of Transformers.

    Args:
        tensors: by Transformers' names; a tied unembedding may be left out.
        cfg: our configuration, with ``original_architecture``; layers beyond ``cfg.n_layers`` are left out.
    """
    architecture = str(cfg.original_architecture)
    family = FAMILIES[architecture]
    tensors = {name.replace("model.language_model.", "model."): tensor.detach() for name, tensor in tensors.items()}
    embedding = tensors[f"{family.embed}.weight"]
    head = tensors.get("lm_head.weight", tensors.get("embed_out.weight", embedding))
    gemma = architecture.startswith("Gemma")
    weights = {
        "embed.W_E": embedding * torch.tensor(cfg.d_model**0.5, dtype=cfg.dtype) if gemma else embedding,
        "unembed.W_U": head.T,
        **_norm(tensors, family.final_norm, "ln_final", family, cfg),
        **_named(tensors, {f"{family.embed}_layernorm.weight": "embed.ln.w", f"{family.embed}_layernorm.bias": "embed.ln.b"}),
        **_named(tensors, {"lm_head.bias": "unembed.b_U"}),
    }
    if family.positions is not None:
        table = tensors[f"{family.positions}.weight"]
        first = 2 if cfg.original_architecture == "OPTForCausalLM" else 0
        weights["pos_embed.W_pos"] = table[first : first + cfg.n_ctx]
    for layer in range(cfg.n_layers):
        source = f"{family.layers}.{layer}."
        own = {name.removeprefix(source): tensor for name, tensor in tensors.items() if name.startswith(source)}
        weights |= {f"blocks.{layer}.{name}": weight for name, weight in _layer(own, family, cfg)}
    return weights


def _named(tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> dict[str, Tensor]:
    return {ours: tensors[theirs] for theirs, ours in names.items() if theirs in tensors}


def _norm(
    tensors: Mapping[str, Tensor], theirs: str, ours: str, family: Family, cfg: HookedTransformerConfig
) -> dict[str, Tensor]:
    if family.norm == "none" and f"{theirs}.weight" not in tensors:
        return {f"{ours}.w": torch.ones(cfg.d_model, dtype=cfg.dtype), f"{ours}.b": torch.zeros(cfg.d_model, dtype=cfg.dtype)}
    norm = _named(tensors, {f"{theirs}.weight": f"{ours}.w", f"{theirs}.bias": f"{ours}.b"})
    if family.norm_offset:
        norm[f"{ours}.w"] = norm[f"{ours}.w"].float() + family.norm_offset
    return norm


def _layer(tensors: Mapping[str, Tensor], family: Family, cfg: HookedTransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """The weights of a layer, by the ends of our names."""
    norms = {"ln1": family.ln1, "ln2": family.ln2 or family.ln1, "ln1_post": family.ln1_post, "ln2_post": family.ln2_post}
    if family.qk_norm:
        norms |= {"attn.q_norm": "self_attn.q_norm", "attn.k_norm": "self_attn.k_norm"}
    for ours, theirs in norms.items():
        if theirs is not None:
            yield from _norm(tensors, theirs, ours, family, cfg).items()
    yield from _projections(tensors, family, cfg)
    out = tensors[f"{family.out}.weight"]
    out = out if family.transposed else out.T
    yield "attn.W_O", out.unflatten(0, (cfg.n_heads, -1))
    yield from _named(tensors, {f"{family.out}.bias": "attn.b_O", "self_attn.sinks": "attn.sinks"}).items()
    yield from _mlp(tensors, family, cfg) if family.experts is None else _experts(tensors, family.experts, cfg)


def _projections(tensors: Mapping[str, Tensor], family: Family, cfg: HookedTransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """W and b of queries, keys and values: [head, d_model, d_head] and [head, d_head]."""
    n_kv = cfg.n_key_value_heads or cfg.n_heads
    stored = "_" if cfg.n_key_value_heads is not None else ""
    heads = {"Q": cfg.n_heads, f"{stored}K": n_kv, f"{stored}V": n_kv}
    for kind, name in (("weight", "W"), ("bias", "b")):
        names = [f"{projection}.{kind}" for projection in family.qkv]
        if not tensors.keys() >= set(names):
            continue
        given = [tensors[name].T if family.transposed and kind == "weight" else tensors[name] for name in names]
        for (which, n), part in zip(heads.items(), _split(given, list(heads.values()), family.fused, cfg), strict=True):
            by_head = part.unflatten(0, (n, -1)) if part.dim() == (1 if kind == "bias" else 2) else part
            prefix, letter = which[:-1], which[-1]
            yield f"attn.{prefix}{name}_{letter}", by_head.transpose(1, 2) if kind == "weight" else by_head


def _split(given: list[Tensor], heads: list[int], fused: str, cfg: HookedTransformerConfig) -> list[Float[Tensor, "..."]]:
    """The rows of queries, keys and values: as given, or cut out of one matrix (then by head, if fused by head)."""
    if len(given) == 3:
        return given
    if fused == "heads":
        by_head = given[0].unflatten(0, (cfg.n_heads, 3, -1))
        return [by_head[:, i] for i in range(3)]
    return list(given[0].split([n * cfg.d_head for n in heads]))


def _mlp(tensors: Mapping[str, Tensor], family: Family, cfg: HookedTransformerConfig) -> Iterator[tuple[str, Tensor]]:
    def matrix(name: str) -> Tensor:
        return tensors[f"{name}.weight"] if family.transposed else tensors[f"{name}.weight"].T

    if family.gate_up is not None:
        gate, up = matrix(family.gate_up).split(cfg.d_mlp, dim=1)
        yield "mlp.W_gate", gate
        yield "mlp.W_in", up
    else:
        yield "mlp.W_in", matrix(family.mlp_in)
        if family.gate is not None:
            yield "mlp.W_gate", matrix(family.gate)
    yield "mlp.W_out", matrix(family.mlp_out)
    yield from _named(tensors, {f"{family.mlp_in}.bias": "mlp.b_in", f"{family.mlp_out}.bias": "mlp.b_out"}).items()
    learned = {f"mlp.act_fn.{name}": f"mlp.act_fn.{name}" for name in ("alpha_p", "alpha_n", "beta")}  # xIELU
    yield from _named(tensors, learned).items()


def _experts(tensors: Mapping[str, Tensor], name: str, cfg: HookedTransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """Experts are rows of one tensor: [expert, gate then up, d_model], in GPT-OSS [expert, d_model, gate and up in turn]."""
    gpt_oss = cfg.original_architecture == "GptOssForCausalLM"
    router = f"{name}.router" if gpt_oss else f"{name}.gate"
    yield from _named(tensors, {f"{router}.{kind}": f"mlp.W_gate.{kind}" for kind in ("weight", "bias")}).items()
    for kind in ("weight", "bias"):
        ending = "" if kind == "weight" else "_bias"
        both, down = (tensors.get(f"{name}.experts.{part}{ending}") for part in ("gate_up_proj", "down_proj"))
        if both is None or down is None:
            continue
        gate, up = (both[..., ::2], both[..., 1::2]) if gpt_oss else both.split(cfg.d_mlp, dim=1)
        for expert in range(len(gate)):
            for ours, part in (("W_gate", gate[expert]), ("W_in", up[expert]), ("W_out", down[expert])):
                yield f"mlp.experts.{expert}.{ours}.{kind}", part.T if gpt_oss and kind == "weight" else part


def translate_config(
    hf_config: PreTrainedConfig,
    architecture: str,
    longest: int | None,
    *,
    first_n_layers: int | None,
    n_ctx: int | None,
    **options: object,
) -> HookedTransformerConfig:
    """The configuration of a model, of its first layers, or for another context length; ``options`` are further fields.

    Raises:
        KVLensError: a field that cannot be expressed, or sizes that the model does not have.
    """
    check_first_n_layers_and_n_ctx(first_n_layers, hf_config.num_hidden_layers, n_ctx)
    fields = translate(hf_config, architecture)
    own_n_ctx = min(fields["n_ctx"], longest or fields["n_ctx"])
    if n_ctx is not None and n_ctx > own_n_ctx:
        if fields.get("positional_embedding_type", "standard") == "standard":
            raise KVLensError(f"from_pretrained: the model learned {own_n_ctx} positions, n_ctx={n_ctx} asks for more")
        logger.warning("n_ctx=%d is longer than the model's own %d positions: untrained there", n_ctx, own_n_ctx)
    fields = translate(hf_config, architecture, n_ctx or own_n_ctx)
    fields |= {name: value for name, value in options.items() if value is not None}
    if first_n_layers is not None:
        fields["n_layers"] = first_n_layers
    return HookedTransformerConfig(**fields, init_weights=False)


def check_first_n_layers_and_n_ctx(first_n_layers: int | None, n_layers: int, n_ctx: int | None) -> None:
    """Raise unless ``first_n_layers`` is one of the model's numbers of layers and ``n_ctx`` a length; None leaves them open."""
    if first_n_layers is not None and not 1 <= first_n_layers <= n_layers:
        raise KVLensError(f"from_pretrained: first_n_layers must be 1 to {n_layers} (the model's layers), got {first_n_layers}")
    if n_ctx is not None and n_ctx < 1:
        raise KVLensError(f"from_pretrained: n_ctx must be at least 1, got {n_ctx}")


@torch.no_grad()
def convert_weights(hf_model: PreTrainedModel, cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    """The weights under our names, detached, in one dtype and on one device; what a model lacks (biases) is left out."""
    devices = {weight.device for weight in hf_model.parameters()}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return {
        name: weight.to(device=device, dtype=cfg.dtype if weight.is_floating_point() else weight.dtype)
        for name, weight in convert(hf_model.state_dict(), cfg).items()
    }


def alibi_slopes(n_heads: int) -> list[float] | None:
    """The slopes of ALiBi where the number of heads is not a power of two, for which TransformerLens has another series.

    Source: Press et al. 2022, the code that comes with the paper: the series of the next lower power of two, then every
    second slope of the series of the next higher one.
    """
    lower = 2 ** int(math.log2(n_heads))
    if lower == n_heads:
        return None
    further = [2.0 ** (-4 * odd / lower) for odd in range(1, 2 * (n_heads - lower), 2)]
    return [2.0 ** (-8 * i / lower) for i in range(1, lower + 1)] + further
