"""Real models whose queries and keys are made longer, so that their scores reach thousands."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from tiny_hf import tiny_hf_model, tiny_tokenizer

from kvlens import HookedKVTransformer

REAL = ["gpt2", "neox", "llama", "qwen2", "qwen3", "docs-gpt2", "facts-gpt2", "stories260K"]
"""Tiny random ones, those that ship with kvlens, and one from a llama2.c file."""


def real_model(kind: str, dtype: torch.dtype, data: Path | None = None) -> HookedKVTransformer:
    """One of ``REAL``, to be changed at will; ``data`` is the folder of stories260K's files, which no other kind needs."""
    return deepcopy(_loaded(kind, dtype, data))


@cache
def _loaded(kind: str, dtype: torch.dtype, data: Path | None) -> HookedKVTransformer:
    if kind == "stories260K":
        assert data is not None
        return HookedKVTransformer.from_llama2c(data / "stories260K.bin", data / "tok512.bin", dtype=dtype)
    if kind in ("docs-gpt2", "facts-gpt2"):
        return HookedKVTransformer.from_zoo(kind, dtype=dtype)
    return HookedKVTransformer.from_pretrained(kind, hf_model=tiny_hf_model(kind), tokenizer=tiny_tokenizer(), dtype=dtype)


def scaled_up(model: HookedKVTransformer, which: str, factor: float = 20.0) -> HookedKVTransformer:
    """The model with its queries ("Q") or keys ("K") or both that much longer, after the norm that some models put there."""
    for block in model.blocks:
        attn = block.attn
        for x in which:
            grouped = "_" if x == "K" and model.cfg.n_key_value_heads is not None else ""
            norm = {"Q": "q_norm", "K": "k_norm"}[x]
            weights = [getattr(attn, norm).w] if model.cfg.use_qk_norm else [getattr(attn, f"{grouped}{n}_{x}") for n in "Wb"]
            for weight in weights:
                weight.data.mul_(factor)
    return model
