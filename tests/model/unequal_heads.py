"""A model whose layers differ in heads, and the same function as a model of equal heads, some of them empty.

    d_head: zeros in further columns of W_Q, W_K, W_V, W_O change no score q.k / scale, if q and k are multiplied by the root of
            the ratio of the scales
    heads:  a head whose W_V is 0 adds nothing

so that an analysis must give the same for the heads that both have.
"""

from typing import Any

import torch

from kvlens import HookedKVTransformer, HookedKVTransformerConfig

SIZES: dict[str, Any] = dict(n_layers=3, d_model=16, d_mlp=24, n_ctx=64, d_vocab=40, act_fn="gelu", seed=3, device="cpu")
HEADS: dict[str, Any] = dict(
    n_heads_by_layer=[4, 2, 4], n_key_value_heads_by_layer=[2, 1, 2], d_head_by_layer=[4, 8, 4], d_head=8
)


def unequal(**changes: Any) -> HookedKVTransformer:
    """A model with 4 / 2 heads of 4 dimensions in the first and last layer, and 2 / 1 of 8 in the middle."""
    fields = {**SIZES, **HEADS, "dtype": torch.float64, "initializer_range": 0.3, **changes}
    return HookedKVTransformer(HookedKVTransformerConfig(**fields))


@torch.no_grad()
def with_empty_heads(model: HookedKVTransformer) -> HookedKVTransformer:
    """The same function with 4 / 2 heads of 8 dimensions in every layer."""
    fields = {
        f: getattr(model.cfg, f) for f in (*SIZES, "kv_shift", "dtype", "attention", "normalizer", "feature_map", "attn_scale")
    }
    same = HookedKVTransformer(HookedKVTransformerConfig(**fields, d_head=8, n_heads=4, n_key_value_heads=2))
    weights = model.state_dict()
    for name, into in same.state_dict().items():
        given = weights[name]
        if given.shape == into.shape or name.endswith(("mask", "IGNORE")):
            into.copy_(given)
            continue
        into.zero_()
        into[tuple(map(slice, given.shape))] = given
        if name.endswith(("_Q", "_K")):
            into.mul_((same.cfg.attn_scale / model.cfg.of_layer(int(name.split(".")[1])).attn_scale) ** 0.5)
    return same
