"""Numbers and names of a configuration that cannot describe a model, said in words before anything is built."""

import functools
import math
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from kvlens._tl import SUPPORTED_ACTIVATIONS, HookedTransformerConfig
from kvlens.arguments import MOST, check_choice, check_device
from kvlens.errors import KVLensError, nearest
from kvlens.signature import fitting

NORMALIZATIONS = (None, "LN", "LNPre", "RMS", "RMSPre")
COUNTED = ("n_layers", "d_model", "d_head", "n_heads", "n_ctx")
COUNTED_OR_NONE = ("d_mlp", "n_key_value_heads", "window_size", "num_experts", "experts_per_token", "rotary_dim")
MOST_LAYERS = 10_000
"""Each is a module of Python: more would be minutes of building, and is a slip of the hand."""
VOCABULARIES = ("d_vocab", "d_vocab_out")
SIZES = (*COUNTED, *COUNTED_OR_NONE, *VOCABULARIES, "eps", "attn_scale", "seed", "n_devices")
"""Fields whose kind :func:`check_sizes` asks together with their range."""
OTHERS = ("device", "dtype", "n_params", "kv_shift", "attention_variant")
"""Fields that others read, and that may be given in several ways."""
INIT_MODES = ("gpt2", "xavier_uniform", "xavier_normal", "kaiming_uniform", "kaiming_normal", "muP")


def check_kinds(cfg: HookedTransformerConfig) -> None:
    """Raise KVLensError unless every field of ``cfg`` is of the kind that its annotation says."""
    kinds = _annotations(cfg.__class__)
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.name in (*SIZES, *OTHERS) or value is field.default:
            continue
        value = fitting(field.name, kinds[field.name], value)
        setattr(cfg, field.name, float(value) if isinstance(value, int) and abs(value) > MOST else value)
    check_device("device", cfg.device)
    check_choice("init_mode", cfg.init_mode, INIT_MODES)
    if cfg.clip_qkv is not None and cfg.clip_qkv <= 0:
        raise KVLensError(f"clip_qkv must be a positive number or None, got {cfg.clip_qkv!r}")


@functools.cache
def _annotations(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def check_sizes(cfg: HookedTransformerConfig) -> None:
    """Raise KVLensError unless every size of ``cfg`` is one that a model can have. Called before TransformerLens reads it."""
    for name in COUNTED:
        default = name == "n_heads" and cfg.n_heads == -1  # TransformerLens then takes d_model // d_head
        if not default and not _is_count(getattr(cfg, name)):
            raise KVLensError(f"{name} must be a whole number of at least 1, got {getattr(cfg, name)!r}")
    if cfg.n_layers > MOST_LAYERS:
        raise KVLensError(f"n_layers must be at most {MOST_LAYERS}, got {cfg.n_layers}")
    for name in COUNTED_OR_NONE:
        if getattr(cfg, name) is not None and not _is_count(getattr(cfg, name)):
            raise KVLensError(f"{name} must be a whole number of at least 1, or None, got {getattr(cfg, name)!r}")
    for name in VOCABULARIES:
        if getattr(cfg, name) != -1 and not _is_count(getattr(cfg, name)):
            raise KVLensError(
                f"{name} must be a whole number of at least 1, or -1 to take the tokenizer's, got {getattr(cfg, name)!r}"
            )
    if cfg.n_heads == -1 and cfg.d_model < cfg.d_head:
        raise KVLensError(f"d_model={cfg.d_model} is below d_head={cfg.d_head}: there is no room for a head; give n_heads")
    if cfg.n_heads == -1 and cfg.d_model % cfg.d_head:
        raise KVLensError(f"d_model={cfg.d_model} is no multiple of d_head={cfg.d_head}: give n_heads")
    if not _is_number(cfg.eps) or cfg.eps <= 0:
        raise KVLensError(f"eps must be a positive number, got {cfg.eps!r}")
    if not _is_number(cfg.attn_scale) or (cfg.attn_scale <= 0 and cfg.attn_scale != -1):
        raise KVLensError(f"attn_scale must be a positive number, or -1 for sqrt(d_head), got {cfg.attn_scale!r}")
    if cfg.seed is not None and (
        not isinstance(cfg.seed, int) or isinstance(cfg.seed, bool) or not -(2**63) <= cfg.seed < 2**64
    ):
        raise KVLensError(f"seed must be a whole number of at most 64 bits, got {cfg.seed!r}")
    _check_names(cfg)


def _check_names(cfg: HookedTransformerConfig) -> None:
    if cfg.normalization_type not in NORMALIZATIONS:
        known = ", ".join(repr(kind) for kind in NORMALIZATIONS)
        raise KVLensError(f"normalization_type: unknown value {cfg.normalization_type!r}, expected one of {known}")
    if cfg.attention_dir not in ("causal", "bidirectional"):
        raise KVLensError(f"attention_dir: unknown value {cfg.attention_dir!r}, expected 'causal' or 'bidirectional'")
    if not cfg.attn_only and cfg.act_fn not in SUPPORTED_ACTIVATIONS:
        raise KVLensError(
            f"act_fn: unknown value {cfg.act_fn!r}, expected one of {', '.join(SUPPORTED_ACTIVATIONS)}"
            f"{nearest(cfg.act_fn, SUPPORTED_ACTIVATIONS)}; a model without MLPs has attn_only=True"
        )
    if cfg.attn_only and cfg.parallel_attn_mlp:
        raise KVLensError("parallel_attn_mlp needs MLPs: with attn_only=True there are none")
    if cfg.positional_embedding_type == "relative_positional_bias":
        raise KVLensError("relative_positional_bias (T5) belongs to TransformerLens' encoder-decoder; here it cannot be built")
    if cfg.use_normalization_before_and_after and cfg.normalization_type not in (None, "RMS", "RMSPre"):
        raise KVLensError(
            "use_normalization_before_and_after: TransformerLens norms again behind a block by RMS only; "
            f"normalization_type is {cfg.normalization_type!r}"
        )
    if cfg.n_devices != 1 and not (_is_count(cfg.n_devices) and torch.cuda.device_count() >= cfg.n_devices):
        raise KVLensError(f"n_devices={cfg.n_devices!r}: this machine has {torch.cuda.device_count()} CUDA devices")


def check_weights_have_these_sizes(cfg: HookedTransformerConfig, tensors: Mapping[str, Tensor], where: str) -> None:
    """Raise KVLensError where stored weights cannot be those of ``cfg``, before a model of its size is built."""
    layers = {int(found[1]) for found in map(re.compile(r"blocks\.([0-9]{1,6})\.").match, tensors) if found}
    if layers != set(range(min(cfg.n_layers, len(layers) + 1))):
        raise KVLensError(f"{where} hold {len(layers)} layers, the configuration asks for n_layers={cfg.n_layers}")
    wanted: dict[str, Sequence[int | None]] = {
        "embed.W_E": (cfg.d_vocab, cfg.d_model),
        "unembed.W_U": (cfg.d_model, cfg.d_vocab_out),
        "blocks.0.attn.W_Q": (cfg.n_heads, cfg.d_model, cfg.d_head),
        "blocks.0.mlp.W_in": (cfg.d_model, cfg.d_mlp),
        "pos_embed.W_pos": (cfg.n_ctx, cfg.d_model),
    }
    for name, shape in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(shape):
            raise KVLensError(
                f"{where} do not fit the configuration: {name} is {list(tensors[name].shape)}, expected {list(shape)}"
            )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**31


def _is_number(value: Any) -> bool:
    # a float of numpy's compares to a bool of numpy's
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and bool(value <= MOST)
