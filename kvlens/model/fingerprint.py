"""The fingerprint of a model: its structure, and a hash of its weights in float32 (see :mod:`kvlens.kv_bias.fingerprint`)."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import asdict, fields
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from kvlens.kv_bias import Fingerprint
from kvlens.model.config import HookedKVTransformerConfig

NAMED = {f.name for f in fields(Fingerprint)} | {"n_key_value_heads"}
WITHOUT_EFFECT = {
    *("model_name", "tokenizer_name", "n_ctx", "seed", "dtype", "n_devices", "n_params", "trust_remote_code", "d_vocab_out"),
    *("init_weights", "init_mode", "initializer_range", "from_checkpoint", "tie_word_embeddings", "default_prepend_bos"),
    *("checkpoint_index", "checkpoint_label_type", "checkpoint_value", "tokenizer_prepends_bos", "layer_norm_folding"),
    *("use_attn_result", "use_split_qkv_input", "use_attn_in", "use_hook_mlp_in", "use_hook_tokens", "uses_rms_norm"),
    *("ungroup_grouped_query_attention", "linear_attention_form", "softmax_form", "accumulation_dtype", "trainable_kv_bias"),
    *("load_in_4bit", "quantization_method", "train_seq_length"),
}
"""Fields of the configuration that change no activation, or only how it is computed. All others count, even new ones."""
HASHED_AT_ONCE = 2**22
"""Numbers that are copied to float32 at once for hashing, 16 MiB."""
_TRAINED_BIAS = (".attn.b_KV", ".attn.b_D")  # an attached bias replaces them
_FOUND: ContextVar[dict[tuple[int, str], tuple[Any, Any]] | None] = ContextVar("weights_unchanged", default=None)


@contextlib.contextmanager
def weights_unchanged() -> Iterator[None]:
    """Inside the block, in this thread, no weight of a model changes, so that each model's weights are hashed and checked once.

    For work that attaches or converts many biases: reading all weights costs as much time as a dozen tokens.
    """
    before = _FOUND.get()
    token = _FOUND.set({} if before is None else before)
    try:
        yield
    finally:
        _FOUND.reset(token)


def of_weights(model: nn.Module, what: str, find: Callable[[], Any]) -> Any:
    """``find()``, which reads the weights of ``model``; inside :func:`weights_unchanged` what it returned the first time."""
    found = _FOUND.get()
    if found is None:
        return find()
    key = (id(model), what)
    if key not in found:
        found[key] = (model, find())  # the model is kept, so that no other gets its id
    return found[key][1]


def fingerprint_of(model: nn.Module, cfg: HookedKVTransformerConfig) -> Fingerprint:
    """Structure and current weights. Reads every weight once (about 10 GB per second)."""
    linear = cfg.attention == "linear"
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
        decay="none" if decay is None else ", ".join(f"{g:.9g}" for g in decay.tolist()),
        kv_shift="none" if cfg.kv_shift is None else _shift_words(cfg),
        rest=_rest(cfg),
        weights=weights_hash(model.state_dict()),
    )


def weights_hash(state: Mapping[str, Tensor]) -> str:
    """xxh3-128 over names, shapes and float32 values of the weights and random projections in ``state_dict``."""
    hasher = xxhash.xxh3_128()
    for name in sorted(name for name in state if is_weight(name) and not name.endswith(_TRAINED_BIAS)):
        values = state[name].detach()
        hasher.update(f"{name}{list(values.shape)}".encode())
        for part in values.flatten().split(HASHED_AT_ONCE):
            hasher.update(part.to("cpu", torch.float32).numpy().data)
    return hasher.hexdigest()


def is_weight(name: str) -> bool:
    """Whether a name in the state dict is a weight rather than a table that TransformerLens recomputes."""
    return name.rsplit(".", 1)[-1] not in ("mask", "IGNORE", "rotary_sin", "rotary_cos")


def _shift_words(cfg: HookedKVTransformerConfig) -> str:
    shift = {k: v for k, v in asdict(cfg.kv_shift).items() if k != "init"}  # type: ignore[arg-type]
    return ", ".join(f"{k} {v}" for k, v in shift.items())


def _rest(cfg: HookedKVTransformerConfig) -> str:
    plain = cfg.to_json()
    if cfg.attention_variant is None:  # a newer field: older biases stay valid
        del plain["attention_variant"]
    return "; ".join(f"{name} {plain[name]}" for name in sorted(plain) if name not in NAMED | WITHOUT_EFFECT)
