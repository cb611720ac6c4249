"""The models that the dual tests go through: one of each kind of attention that has a dual model, in float64."""

from typing import Any

import torch
from small_models import linear_model, small_model
from tiny_hf import tiny_hf_model

from kvlens import HookedKVTransformer, KVShiftConfig

LINEAR: dict[str, dict[str, Any]] = {
    "rope after, shift 2": {},
    "rope before": dict(rotary_placement="before", kv_shift=None),
    "taylor": dict(feature_map="taylor", kv_shift=None),
    "no normalizer, gqa, decay": dict(
        n_heads=6, d_model=36, n_key_value_heads=2, normalizer="none", decay="retnet", feature_map="identity"
    ),
    "augmented values": dict(attention_variant={"augmented": {"values": True}}),
    "learned positions, values shifted": dict(
        positional_embedding_type="standard", kv_shift=KVShiftConfig(keys=False), feature_map="relu"
    ),
}
SOFTMAX: dict[str, dict[str, Any]] = {
    "learned positions": {},
    "rotary, gqa, shift": dict(
        n_heads=6, d_model=36, n_key_value_heads=2, positional_embedding_type="rotary", kv_shift=KVShiftConfig(queries=True)
    ),
    # four heads: their slopes are powers of 2, so that TransformerLens' float32 products of slope and distance are exact
    "alibi": dict(positional_embedding_type="alibi", n_heads=4, d_model=24),
    "rotary": dict(positional_embedding_type="rotary"),
    "augmented": dict(attention_variant={"augmented": {"keys": True, "values": True, "depth": 2}}),
}


def model_of(name: str) -> HookedKVTransformer:
    """One of the models above, or ``hf gpt2``, ``hf llama`` ..., ``zoo docs-linear`` ...; float64, without gradients."""
    if name.startswith("hf "):
        kind = name.removeprefix("hf ")
        model = HookedKVTransformer.from_pretrained(kind, hf_model=tiny_hf_model(kind), tokenizer=None, dtype="float64")
        return model.requires_grad_(False)
    if name.startswith("zoo "):
        return HookedKVTransformer.from_zoo(name.removeprefix("zoo "), dtype=torch.float64).requires_grad_(False)
    if name in LINEAR:
        return linear_model(**LINEAR[name]).requires_grad_(False)
    return small_model(dtype=torch.float64, **SOFTMAX[name]).requires_grad_(False)


def text_for(model: HookedKVTransformer, pos: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, model.cfg.d_vocab, (pos,), generator=torch.Generator().manual_seed(seed))
