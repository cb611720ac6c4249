"""Checks of the numbers and names in a configuration, before anything is built."""

import functools
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal

from torch import Tensor

from kvlens.arguments import check_device
from kvlens.base import HookedTransformerConfig
from kvlens.checks import MOST, Within, ensure
from kvlens.errors import KVLensError

SIZE, POSITIVE = Annotated[int, Within(1, 2**31 - 1)], Annotated[float, Within(above=0)]
RANGES: dict[str, Any] = {
    "n_layers": Annotated[
        int, Within(1, 10_000)
    ],  # each layer is a Python module: more would take minutes, and is probably a typing error
    **dict.fromkeys(("d_model", "d_head", "n_ctx"), SIZE),
    **dict.fromkeys(
        ("d_mlp", "n_key_value_heads", "window_size", "num_experts", "experts_per_token", "rotary_dim"), SIZE | None
    ),
    **dict.fromkeys(("n_heads", "d_vocab", "d_vocab_out"), SIZE | Literal[-1]),  # -1: d_model // d_head, and the tokenizer's
    "n_devices": SIZE,
    "eps": POSITIVE,
    "attn_scale": POSITIVE | Literal[-1],  # -1: sqrt(d_head)
    "clip_qkv": POSITIVE | None,
    "seed": Annotated[int, Within(-(2**63), 2**64 - 1)] | None,
    "normalization_type": Literal["LN", "LNPre", "RMS", "RMSPre"] | None,
    "attention_dir": Literal["causal", "bidirectional"],
    "init_mode": Literal["gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP"],
}
"""Types of fields whose TransformerLens annotation is not specific enough."""
OTHERS = ("device", "dtype", "n_params", "kv_shift", "attention_variant")
"""Fields that are checked elsewhere and may be given in several forms."""


def check_sizes(cfg: HookedTransformerConfig) -> None:
    """Raise KVLensError unless every field of ``cfg`` is valid. Called before TransformerLens reads it."""
    kinds = {**_annotations(cfg.__class__), **RANGES}  # type: ignore[arg-type]
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.name in OTHERS or value is field.default:
            continue
        value = ensure(field.name, kinds[field.name], value)
        is_huge = isinstance(value, int) and abs(value) > MOST and field.name != "seed"
        setattr(cfg, field.name, float(value) if is_huge else value)
    check_device("device", cfg.device)
    if cfg.attn_only and cfg.parallel_attn_mlp:
        raise KVLensError("parallel_attn_mlp needs MLPs: with attn_only=True there are none")
    if cfg.use_normalization_before_and_after and cfg.normalization_type not in (None, "RMS", "RMSPre"):
        raise KVLensError(
            "use_normalization_before_and_after: TransformerLens supports only RMS normalization after a layer; "
            f"normalization_type is {cfg.normalization_type!r}"
        )


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_weights_have_these_sizes(cfg: HookedTransformerConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise KVLensError if stored weights do not match ``cfg``, before a model of that size is built."""
    layers = {int(found[1]) for found in map(re.compile(r"blocks\.([0-9]{1,6})\.").match, tensors) if found}
    if layers != set(range(min(cfg.n_layers, len(layers) + 1))):
        raise KVLensError(f"{where} hold {len(layers)} layers, but the configuration has n_layers={cfg.n_layers}")
    wanted: dict[str, Sequence[int | None]] = {
        "embed.W_E": (cfg.d_vocab, cfg.d_model),
        "unembed.W_U": (cfg.d_model, cfg.d_vocab_out),
        "blocks.0.mlp.W_in": (cfg.d_model, cfg.d_mlp),
        "pos_embed.W_pos": (cfg.n_ctx, cfg.d_model),
    }
    for layer in layers if cfg.layers_differ else (0,):
        of_layer = cfg.of_layer(layer)
        wanted[f"blocks.{layer}.attn.W_Q"] = (of_layer.n_heads, cfg.d_model, of_layer.d_head)
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            raise KVLensError(
                f"{where} do not fit the configuration: {name} is {list(tensors[name].shape)}, expected {list(shape)}"
            )
