"""Baichuan-M1-type checkpoints: a pre-norm transformer in which each key and value is mixed with its predecessor (KV shift).

The architecture is not part of transformers (its code comes with the weights); none of that code is needed or run here.
Contents of the files, per layer ``model.layers.{l}``:

- ``self_attn.W_pack`` projects to queries, keys and values at once, in this order, head by head, without biases;
- ``self_attn.conv_k``, ``conv_v`` (1, 1, n_kv, 1, conv_window): the KV shift, before RoPE, column 0 = the oldest token; the
  other forms of :mod:`kvlens.pretrained.shift_import` (``K`` and ``V``, ``alpha`` and ``beta``) are taken in their place;
- RoPE over the whole head, halves paired as in GPT-NeoX, base ``rope_theta``, also in sliding-window layers;
- the layers in ``sliding_window_layers`` see ``sliding_window`` tokens, the current one included, which is what
  ``window_size`` means. They may have their own ``num_swa_attention_heads`` and ``num_swa_key_value_heads``: the published
  Baichuan-M1-14B has 20 and 2 there, 40 and 8 in the others. A head has hidden_size / heads dimensions, twice as many there
  (``n_heads_by_layer``, ``n_key_value_heads_by_layer``, ``d_head_by_layer``);
- ``mlp`` is SwiGLU (``gate_proj``, ``up_proj``, ``down_proj``); the norms are RMS norms;
- the logits are taken against ``lm_head.weight`` with every row scaled to length 1 ("NormHead"), at every forward pass,
  so the stored rows may have any length. Tied embeddings are scaled in the head only.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from kvlens.base import HookedTransformerConfig
from kvlens.errors import KVLensError
from kvlens.pretrained.shift_import import import_shift_coefficients, is_shift_coefficient
from kvlens.pretrained.translation import BAICHUAN_M1, check_first_n_layers_and_n_ctx

logger = logging.getLogger(__name__)

MODEL_TYPE = "baichuan_m1"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
OF_LAYER = (
    *("input_layernorm", "self_attn.W_pack", "self_attn.o_proj"),
    *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""The weights of a layer, beside those of the shift."""
_REFUSE = "from_pretrained: this Baichuan-M1 checkpoint "


def is_baichuan_m1(config: Mapping[str, Any]) -> bool:
    """Say whether a ``config.json``, read as a dict, is that of a Baichuan-M1-type model."""
    return config.get("model_type") == MODEL_TYPE or BAICHUAN_M1 in (config.get("architectures") or ())


def baichuan_m1_config(
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype,
    first_n_layers: int | None,
    n_ctx: int | None,
    **options: Any,
) -> HookedTransformerConfig:
    """Translate a Baichuan-M1 ``config.json`` to the base's configuration (which says nothing of the shift).

    Args:
        config: the file as a dict, or ``hf_model.config.to_dict()``.
        dtype: dtype of the weights.
        first_n_layers: keep only this many layers.
        n_ctx: context length; None uses ``max_position_embeddings``.
        options: further fields of the configuration; None leaves the default.

    Raises:
        KVLensError: a field is missing or not a positive integer, or the model has a feature that this architecture is not
            known to have.
    """
    sizes = {name: _positive(config, name) for name in (*_SIZES, "max_position_embeddings")}
    local = _sliding_window_layers(config, sizes["num_hidden_layers"])
    _check_known_features(config)
    check_first_n_layers_and_n_ctx(first_n_layers, sizes["num_hidden_layers"], n_ctx)
    if n_ctx is not None and n_ctx > sizes["max_position_embeddings"]:
        logger.warning("n_ctx=%d is longer than the model's own %d positions", n_ctx, sizes["max_position_embeddings"])
    n_layers = first_n_layers or sizes["num_hidden_layers"]
    attn_types = ["local" if layer in local else "global" for layer in range(n_layers)]
    heads = {"global": _heads(config, "num_")}
    heads["local"] = _heads({**config, **_own_heads_of_windows(config)}, "num_swa_") if local else heads["global"]
    n_heads, n_kv_heads = ([heads[kind][i] for kind in attn_types] for i in range(2))
    return HookedTransformerConfig(
        n_layers=n_layers,
        d_model=sizes["hidden_size"],
        d_head=sizes["hidden_size"] // min(n_heads),
        d_head_by_layer=[sizes["hidden_size"] // n for n in n_heads],
        n_heads_by_layer=n_heads,
        n_key_value_heads_by_layer=None if n_kv_heads == n_heads else n_kv_heads,
        d_mlp=sizes["intermediate_size"],
        d_vocab=sizes["vocab_size"],
        n_ctx=n_ctx or sizes["max_position_embeddings"],
        act_fn="silu",
        gated_mlp=True,
        normalization_type="RMS",
        eps=config.get("rms_norm_eps", 1e-6),
        positional_embedding_type="rotary",
        rotary_base=_rotary_base(config),
        use_local_attn=bool(local),
        attn_types=attn_types if local else None,
        window_size=_positive(config, "sliding_window") if local else None,
        original_architecture=BAICHUAN_M1,
        dtype=dtype,
        **{name: value for name, value in options.items() if value is not None},
    )


def is_baichuan_m1_weight(name: str, left_out: range) -> bool:
    """Say whether a tensor is to be read: of no layer that is ``left_out`` (rotary frequencies are recomputed)."""
    layer = re.match(r"model\.layers\.([0-9]{1,6})\.", name)
    return (layer is None or int(layer[1]) not in left_out) and not name.endswith("inv_freq")


def convert_baichuan_m1_weights(
    tensors: Mapping[str, Tensor], cfg: HookedTransformerConfig, *, tied: bool, conv_window: int
) -> dict[str, Tensor]:
    """Bring the weights under ``HookedTransformer``'s names, without the shift, in ``cfg.dtype``.

    The biases that the model does not have are left out: ``load_and_process_state_dict`` fills them with zeros.

    Args:
        tensors: the checkpoint's, by its own names.
        cfg: what :func:`baichuan_m1_config` returned.
        tied: whether the head shares the embedding's weights where the checkpoint stores no ``lm_head.weight``.
        conv_window: how many coefficients the shift has; see :func:`conv_window_of`.

    Raises:
        KVLensError: a tensor is missing, unknown or quantized, or shift coefficients are of another shape than the
            configuration says.
    """
    _check_shift(tensors, cfg, conv_window)
    tensors = {name: tensor for name, tensor in tensors.items() if not is_shift_coefficient(name)}
    head = "lm_head.weight" if "lm_head.weight" in tensors or not tied else "model.embed_tokens.weight"
    _check_tensors(tensors, cfg.n_layers, head)
    tensors = {name: tensor.detach().to(cfg.dtype) for name, tensor in tensors.items()}
    weights = {
        "embed.W_E": tensors["model.embed_tokens.weight"],
        "ln_final.w": tensors["model.norm.weight"],
        "unembed.W_U": normalize(tensors[head], dim=1).T,
    }
    for layer in range(cfg.n_layers):
        source = f"model.layers.{layer}."
        of_layer = {name.removeprefix(source): tensor for name, tensor in tensors.items() if name.startswith(source)}
        weights |= {f"blocks.{layer}.{name}": weight for name, weight in _convert_layer(of_layer, cfg.of_layer(layer)).items()}
    return weights


def _convert_layer(tensors: Mapping[str, Tensor], cfg: HookedTransformerConfig) -> dict[str, Tensor]:
    n_kv_heads = cfg.n_key_value_heads or cfg.n_heads
    grouped = "_" if cfg.n_key_value_heads is not None else ""  # TransformerLens' mark of weights per key-value head
    q, k, v = _unpack(tensors["self_attn.W_pack.weight"], cfg.n_heads, n_kv_heads)
    return {
        "ln1.w": tensors["input_layernorm.weight"],
        "attn.W_Q": q,
        f"attn.{grouped}W_K": k,
        f"attn.{grouped}W_V": v,
        "attn.W_O": rearrange(
            tensors["self_attn.o_proj.weight"], "d_model (head d_head) -> head d_head d_model", head=cfg.n_heads
        ),
        "ln2.w": tensors["post_attention_layernorm.weight"],
        "mlp.W_gate": tensors["mlp.gate_proj.weight"].T,
        "mlp.W_in": tensors["mlp.up_proj.weight"].T,
        "mlp.W_out": tensors["mlp.down_proj.weight"].T,
    }


def _unpack(
    packed: Float[Tensor, "head_and_d_head d_model"], n_heads: int, n_kv_heads: int
) -> tuple[Float[Tensor, "head d_model d_head"], ...]:
    """W_Q, W_K, W_V out of ``W_pack``: query heads first, then key heads, then value heads."""
    heads = rearrange(
        packed, "(head d_head) d_model -> head d_model d_head", head=n_heads + 2 * n_kv_heads, d_model=packed.shape[1]
    )
    return heads.split([n_heads, n_kv_heads, n_kv_heads])


def _check_shift(tensors: Mapping[str, Tensor], cfg: HookedTransformerConfig, conv_window: int) -> None:
    """Raise unless every layer has shift coefficients for keys and values, without which it would compute something else."""
    found = import_shift_coefficients(tensors)
    names = {f"blocks.{layer}.attn.{x}_shift_coef": cfg.of_layer(layer) for layer in range(cfg.n_layers) for x in "kv"}
    for name, of_layer in names.items():
        expected = [of_layer.n_key_value_heads or of_layer.n_heads, conv_window]
        if name not in found:
            raise KVLensError(f"{_REFUSE}lacks the shift coefficients of {name} (conv_k for keys, conv_v for values)")
        if list(found[name].shape) != expected:
            raise KVLensError(
                f"{_REFUSE}has shift coefficients [kv_head, taps] of shape {list(found[name].shape)} for {name}; its "
                f"configuration gives {expected}"
            )


def _check_tensors(tensors: Mapping[str, Tensor], n_layers: int, head: str) -> None:
    """Raise where weights are missing, unknown or quantized; of another shape they do not fit into the model that is built."""
    expected = {"model.embed_tokens.weight", "model.norm.weight", head}
    expected |= {f"model.layers.{layer}.{name}.weight" for layer in range(n_layers) for name in OF_LAYER}
    missing, unknown = sorted(expected - tensors.keys()), sorted(tensors.keys() - expected)
    if missing or unknown:
        raise KVLensError(
            f"{_REFUSE}lacks {len(missing)} weights of its configuration {missing[:3]} and holds {len(unknown)} that are not "
            f"known of the architecture {unknown[:3]}"
        )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits < 16:
            raise KVLensError(f"{_REFUSE}stores {name} as {tensor.dtype}: a quantized model cannot be converted")


def _positive(config: Mapping[str, object], name: str) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise KVLensError(f"{_REFUSE}needs a positive integer {name} in its config.json, got {value!r}")
    return value


def conv_window_of(config: Mapping[str, object]) -> int:
    """How many tokens a key is mixed from, itself included (kvlens' shift window and 1 more)."""
    return _positive({"conv_window": 2, **config}, "conv_window")


def _sliding_window_layers(config: Mapping[str, Any], n_layers: int) -> list[int]:
    layers = list(config.get("sliding_window_layers") or [])
    if not all(isinstance(layer, int) and 0 <= layer < n_layers for layer in layers):
        raise KVLensError(f"{_REFUSE}names sliding_window_layers {layers}; expected numbers from 0 to {n_layers - 1}")
    return layers


def _own_heads_of_windows(config: Mapping[str, object]) -> dict[str, object]:
    """The numbers of heads in sliding-window layers, which are the others' where they are not given."""
    names = ("attention_heads", "key_value_heads")
    return {f"num_swa_{name}": config.get(f"num_swa_{name}") or config[f"num_{name}"] for name in names}


def _heads(config: Mapping[str, Any], prefix: str) -> tuple[int, int]:
    """Query and key-value heads of the layers whose fields begin with ``prefix``."""
    n_heads, n_kv_heads = (_positive(config, f"{prefix}{name}") for name in ("attention_heads", "key_value_heads"))
    if config["hidden_size"] % n_heads or n_heads % n_kv_heads:
        raise KVLensError(
            f"{_REFUSE}has {prefix}attention_heads={n_heads}, of which hidden_size={config['hidden_size']} must be a multiple, "
            f"and which must be one of {prefix}key_value_heads={n_kv_heads}"
        )
    return n_heads, n_kv_heads


def _check_known_features(config: Mapping[str, Any]) -> None:
    """Raise for features that would change the output and are not known in this architecture."""
    if config.get("hidden_act", "silu") != "silu":
        raise KVLensError(f"{_REFUSE}has hidden_act={config['hidden_act']!r}; expected 'silu'")
    scaling = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind != "default":
        raise KVLensError(f"{_REFUSE}scales its rotary angles by {kind!r}, which is not supported for this architecture")
    if config.get("quantization_config"):
        raise KVLensError(f"{_REFUSE}is quantized ({config['quantization_config']}); its weights cannot be converted")


def _rotary_base(config: Mapping[str, Any]) -> float:
    base = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta")
    if not base:
        raise KVLensError(f"{_REFUSE}needs rope_theta in its config.json, got {base!r}")
    return base
