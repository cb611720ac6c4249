"""The fingerprint of a model: its structure, and a hash of its weights in float32 (see :mod:`kvlens.kv_bias.fingerprint`)."""

from dataclasses import asdict

import torch
import xxhash
from torch import nn

from kvlens.kv_bias import Fingerprint
from kvlens.model.config import HookedKVTransformerConfig

ROTARY_FIELDS = (
    "rotary_dim",
    "rotary_base",
    "rotary_base_local",
    "rotary_adjacent_pairs",
    "rotary_scaling_factor",
    "use_NTK_by_parts_rope",
    "NTK_by_parts_factor",
    "use_yarn_rope",
    "yarn_factor",
)
BLOCK_FIELDS = (
    "attn_only",
    "act_fn",
    "gated_mlp",
    "normalization_type",
    "eps",
    "parallel_attn_mlp",
    "use_qk_norm",
    "use_normalization_before_and_after",
    "post_embedding_ln",
    "scale_attn_by_inverse_layer_idx",
    "num_experts",
    "experts_per_token",
    "original_architecture",
)
_TRAINED_BIAS = (".attn.b_KV", ".attn.b_D")  # an attached bias replaces them


def fingerprint_of(model: nn.Module, cfg: HookedKVTransformerConfig) -> Fingerprint:
    """Structure and weights as they are now. Reads every weight once (about 10 GB a second)."""
    rotary, linear = cfg.positional_embedding_type == "rotary", cfg.attention == "linear"
    decay = cfg.decay_per_head()
    return Fingerprint(
        attention=cfg.attention,
        n_layers=cfg.n_layers,
        n_heads=cfg.n_heads,
        n_kv_heads=cfg.n_kv_heads,
        d_model=cfg.d_model,
        d_head=cfg.d_head,
        d_phi=cfg.d_phi if linear else 0,
        d_vocab=cfg.d_vocab,
        feature_map=cfg.feature_map if linear else "none",
        normalizer=cfg.normalizer if linear else "softmax",
        attn_scale=float(cfg.attn_scale),
        positional_embedding_type=cfg.positional_embedding_type,
        rotary_placement=cfg.rotary_placement,
        rotary=_words(cfg, ROTARY_FIELDS) if rotary else "none",
        decay="none" if decay is None else ", ".join(f"{g:.9g}" for g in decay.tolist()),
        kv_shift="none" if cfg.kv_shift is None else _shift_words(cfg),
        block=_words(cfg, BLOCK_FIELDS),
        weights=weights_hash(model),
    )


def weights_hash(model: nn.Module) -> str:
    """xxh3-128 over names, shapes and float32 values of the parameters and of the random projections."""
    hasher = xxhash.xxh3_128()
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    tensors.update((name, buffer) for name, buffer in model.named_buffers() if name.endswith("feature_map.projection"))
    for name in sorted(tensors):
        if name.endswith(_TRAINED_BIAS):
            continue
        values = tensors[name].detach().to("cpu", torch.float32).contiguous()
        hasher.update(f"{name}{list(values.shape)}".encode())
        hasher.update(values.numpy().data)
    return hasher.hexdigest()


def _shift_words(cfg: HookedKVTransformerConfig) -> str:
    shift = {k: v for k, v in asdict(cfg.kv_shift).items() if k != "init"}  # type: ignore[arg-type]
    return ", ".join(f"{k} {v}" for k, v in shift.items())


def _words(cfg: HookedKVTransformerConfig, names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} {getattr(cfg, name)}" for name in names)
