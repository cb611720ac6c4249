"""A model with random weights that reads text, small enough to be built for every test."""

import functools
from typing import Any

import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.corpus import train_bpe_tokenizer

SENTENCES = (
    "The widget is purple and the gadget is green.",
    "Return the widget. Return the gadget. Frobnicate both.",
    "Parameters: widget, gadget, color, depth.",
)
PROMPT, TEXT = "The widget is purple.\nThe gadget", " is green and the widget is"


@functools.cache
def tiny_tokenizer():
    return train_bpe_tokenizer(SENTENCES, vocab_size=300)


def tiny_text_model(row: dict[str, Any] | None = None, *, gain: float = 20, **changes: Any) -> HookedKVTransformer:
    """Two layers of three heads, linear attention, RoPE and KV shift, unless a row of :mod:`small_models` or ``changes`` say
    otherwise."""
    defaults = dict(
        n_layers=2,
        d_model=12,
        d_head=4,
        n_ctx=64,
        d_vocab=len(tiny_tokenizer()),
        d_mlp=10,
        act_fn="gelu",
        positional_embedding_type="rotary",
        attention="linear",
        kv_shift=KVShiftConfig(),
        device="cpu",
        seed=1,
    )
    model = HookedKVTransformer(HookedKVTransformerConfig(**{**defaults, **(row or {}), **changes}), tiny_tokenizer())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attn.W_" in name:
                parameter *= gain  # TransformerLens starts so small that attention hardly matters
    return model.requires_grad_(False)


@functools.cache
def linear() -> HookedKVTransformer:
    """One for all tests that leave it as it is."""
    return tiny_text_model()


@functools.cache
def softmax() -> HookedKVTransformer:
    """Likewise, with softmax attention."""
    return tiny_text_model(attention="softmax")
