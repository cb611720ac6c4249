"""The fingerprint of a bridge: Transformers' configuration, and a hash of the weights by Transformers' names."""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from kvlens.bridge.parts import text_config
from kvlens.bridge.softmax import HeadSizes, SoftmaxLayer
from kvlens.kv_bias import Fingerprint
from kvlens.model.fingerprint import hashed_once

FRONT_END = "TransformerBridge"
"""Distinguishes a bias of a bridge from one of a HookedKVTransformer."""
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


def fingerprint_of(bridge: Any, with_weights: bool = True) -> Fingerprint:
    """Structure and current weights. Reads every weight if one has changed since the last time, unless they are left out."""
    cfg, config = bridge.cfg, text_config(bridge.original_model)
    parts = bridge.__dict__["_parts"]
    sizes, attention = sizes_of(parts), {part.layer for part in parts if isinstance(part, SoftmaxLayer)}
    fields = {name: value for name, value in config.to_dict().items() if name not in WITHOUT_EFFECT}
    rest = {
        "architecture": cfg.architecture,
        "front_end": FRONT_END,
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
        weights=hashed_once(bridge, partial(_weights, bridge)) if with_weights else "",
        d_key=None if sizes.d_key == sizes.d_head else sizes.d_key,
    )


def sizes_of(parts: Sequence[Any]) -> HeadSizes:
    """The heads of the attention layers; of a model without them, those of its states."""
    for part in parts:
        if isinstance(part, SoftmaxLayer):
            return part.sizes
    mixer = parts[0].mixer
    return HeadSizes(mixer.n_heads, mixer.n_heads, mixer.d_v, mixer.d_v)


def _weights(bridge: Any) -> dict[str, Tensor]:
    """Each weight once, by the name that it has in Transformers, or in the bridge where it was split there."""
    once: dict[tuple[Any, ...], tuple[str, Tensor]] = {}
    for name, value in bridge.original_model.state_dict().items():
        clean = name.replace("_original_component.", "")
        key = (value.data_ptr(), tuple(value.shape), value.stride())
        if key not in once or clean < once[key][0]:
            once[key] = clean, value
    return dict(once.values())
