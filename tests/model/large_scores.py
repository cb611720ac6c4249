"""Real models whose queries and keys are made longer, so that their scores reach thousands."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer, HookedKVTransformerConfig

REAL = ["gpt2", "gpt_neox", "llama", "qwen2", "qwen3", "docs-gpt2", "facts-gpt2", "stories260K"]
"""Tiny random ones, those that ship with kvlens, and one from a llama2.c file."""


@contextmanager
def scaled_up(
    kind: str, dtype: torch.dtype, which: str, data: Path | None = None, factor: float = 20.0
) -> Iterator[HookedKVTransformer]:
    """One of ``REAL`` with its queries ("Q") or keys ("K") or both that much longer, after the norm that some models put there.

    It is loaded once, and afterwards as it was. ``data`` is the folder of stories260K's files, which no other kind needs.
    """
    model = _loaded(kind, dtype, data)
    weights = [weight.data for block in model.blocks for x in which for weight in _weights(model.cfg, block.attn, x)]
    before = [weight.clone() for weight in weights]
    for weight in weights:
        weight.mul_(factor)
    try:
        yield model
    finally:
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)


def _weights(cfg: HookedKVTransformerConfig, attn: torch.nn.Module, x: str) -> list[torch.Tensor]:
    """Whatever makes queries or keys longer by the factor that it is multiplied by."""
    if cfg.use_qk_norm:
        return [getattr(attn, {"Q": "q_norm", "K": "k_norm"}[x]).w]
    grouped = "_" if x == "K" and cfg.n_key_value_heads is not None else ""
    return [getattr(attn, f"{grouped}{n}_{x}") for n in "Wb"]


@cache
def _loaded(kind: str, dtype: torch.dtype, data: Path | None) -> HookedKVTransformer:
    if kind == "stories260K":
        assert data is not None
        return HookedKVTransformer.from_llama2c(data / "stories260K.bin", data / "tok512.bin", dtype=dtype)
    if kind in ("docs-gpt2", "facts-gpt2"):
        return HookedKVTransformer.from_zoo(kind, dtype=dtype)
    return HookedKVTransformer.from_pretrained(kind, hf_model=tiny_hf_model(kind), tokenizer=tiny_tokenizer(), dtype=dtype)
