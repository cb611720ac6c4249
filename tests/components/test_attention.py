"""One forward pass for every kind of attention, and nothing of a pass left behind in the layer."""

import pytest
import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig, KVShiftConfig
from kvlens.base import Attention
from kvlens.components import KVAttention

SIZES = dict(n_layers=2, n_heads=4, d_model=24, d_head=6, n_ctx=40, d_vocab=17, act_fn="gelu", seed=0, device="cpu")
KINDS = {
    "linear": dict(attention="linear", positional_embedding_type="rotary"),
    "linear, shift, gqa": dict(attention="linear", n_key_value_heads=2, kv_shift=KVShiftConfig()),
    "softmax": {},
    "softmax, shift": dict(kv_shift=KVShiftConfig()),
    "softmax, fused, gqa": dict(n_key_value_heads=2, softmax_form="fused"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_one_forward_serves_every_kind(kind):
    attn = HookedKVTransformer(HookedKVTransformerConfig(**SIZES, **KINDS[kind])).blocks[0].attn
    ours = [c for c in type(attn).__mro__ if c.__module__.startswith("kvlens.")]
    assert [c for c in ours if "forward" in vars(c)] == [KVAttention, Attention]
    assert len(ours) == (4 if attn.cfg.n_key_value_heads else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_leaves_nothing_in_the_layer(kind):
    model = HookedKVTransformer(HookedKVTransformerConfig(**SIZES, **KINDS[kind]))
    held = [dict(vars(block.attn)) for block in model.blocks]
    with torch.no_grad():
        model(torch.arange(9)[None])
    for block, before in zip(model.blocks, held, strict=True):
        assert vars(block.attn).keys() == before.keys()
        assert all(vars(block.attn)[name] is value for name, value in before.items())
