"""Models with hand-written weights: the induction heads of KVSA th. 1-3, as HookedKVTransformers.

All are attention-only, without norms; parameters not described below are zero. ``embeddings`` are W_E, one row per token.

- :func:`shifted_head`: one layer, width d. Keys shifted by one, values not, all projections the identity.
- :func:`two_layer_head`: two layers, width 2d, no shift. The stream starts as (x_s, 0). The first has only ALiBi, of slope
  p1, and writes what it copies into the second half; the second layer compares the first half of the query with the second half
  of the keys and copies first halves. Both layers have two heads, since a model's ALiBi slopes are the same in all layers: head
  0 (slope p1) is active in the first, head 1 (slope m) in the second, and the other ones write nothing.
- :func:`landscape_model`: one layer, width 2T, in which only the shift coefficients are free. Embeddings are in the first half
  of the stream, the head writes to the second, and the unembedding reads the second: the residual connection does not reach the
  logits.

What the first of two layers copies: with r = e^{-p1}, a query s gives its t-th predecessor weight proportional to r^t. A head
that cannot see its own token therefore writes x_{s-1} with weight 1 - O(r) and leaks O(r) of earlier tokens: this is th. 1,
which :data:`BLIND_HOOK` implements. Ordinary causal attention gives its own token the largest weight, 1 - r + O(r^{s+1}), and
its predecessor only weight r. Its key must be (y_s - (1 - r) x_s) / (r (1 - r)), where y_s is what was written. That is
x_{s-1} + O(r) as well, for s > 0 (so texts start with a token whose embedding is 0), but divides the rounding error of y_s
by r.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.model import HookedKVTransformer, HookedKVTransformerConfig
from kvlens.model.config import KVShiftConfig


def _hide_own_token(attn_scores: Float[Tensor, "batch head query key"], hook: object) -> Float[Tensor, "batch head query key"]:
    own = torch.eye(attn_scores.shape[-1], dtype=torch.bool, device=attn_scores.device)
    return attn_scores.masked_fill(own, -torch.inf)


BLIND_HOOK = ("blocks.0.attn.hook_attn_scores", _hide_own_token)
"""With it the first layer sees only strictly earlier tokens; the first token then sees nothing and gets 0, its x_{-1}."""


@torch.no_grad()
def shifted_head(embeddings: Float[Tensor, "token d"], sigma: float, slope: float) -> HookedKVTransformer:
    """One layer whose ``blocks.0.hook_attn_out`` is IH(x), exactly (KVSA th. 2)."""
    d = embeddings.shape[1]
    model = model_of_zeros(embeddings, d, d, 1, sigma, slopes=[slope], kv_shift=KVShiftConfig(window=1))
    attn = model.blocks[0].attn
    for weight in (attn.W_Q, attn.W_K, attn.W_V, attn.W_O):
        weight[0] = torch.eye(d)
    set_shift(model, alpha_1=0.0, beta_1=1.0)
    return model


@torch.no_grad()
def two_layer_head(
    embeddings: Float[Tensor, "token d"], sigma: float, slope: float, p1: float, *, sees_itself: bool
) -> HookedKVTransformer:
    """Two layers without shift; the first d features of ``blocks.1.hook_attn_out`` are IH(x) + O(e^{-p1}) (KVSA th. 1).

    Args:
        embeddings: W_E of width d; the model has width 2d.
        sigma: temperature of the second layer.
        slope: ALiBi slope m of the second layer.
        p1: ALiBi slope of the first layer.
        sees_itself: build the keys for an ordinary first layer; otherwise for one that runs with :data:`BLIND_HOOK`.

    Returns:
        The model.
    """
    d = embeddings.shape[1]
    model = model_of_zeros(embeddings, 2 * d, d, 2, sigma, slopes=[p1, slope])
    copy, match = model.blocks[0].attn, model.blocks[1].attn
    first, second = slice(None, d), slice(d, None)
    one = torch.eye(d, dtype=embeddings.dtype)
    copy.W_V[0, first] = one
    copy.W_O[0, :, second] = one
    match.W_Q[1, first] = one
    match.W_K[1, second] = one
    match.W_V[1, first] = one
    match.W_O[1, :, first] = one
    if sees_itself:
        r = math.exp(-p1)
        match.W_K[1, second] /= r * (1 - r)
        match.W_K[1, first] = -one / r
    return model


@torch.no_grad()
def landscape_model(embeddings: Float[Tensor, "token d"]) -> HookedKVTransformer:
    """The head of KVSA th. 3: orthonormal embeddings, identity weights, no positions, trainable shift coefficients only."""
    d = embeddings.shape[1]
    model = model_of_zeros(embeddings, 2 * d, d, 1, sigma=1.0, kv_shift=KVShiftConfig(window=1))
    attn = model.blocks[0].attn
    first, second = slice(None, d), slice(d, None)
    for weight in (attn.W_Q, attn.W_K, attn.W_V):
        weight[0, first] = torch.eye(d)
    attn.W_O[0, :, second] = torch.eye(d)
    model.unembed.W_U[second] = embeddings.T
    model.requires_grad_(False)
    for coefficients in (attn.k_shift_coef, attn.v_shift_coef):
        coefficients.requires_grad_(True)
    return model


@torch.no_grad()
def set_shift(model: HookedKVTransformer, alpha_1: float, beta_1: float) -> None:
    """Set a one-layer, one-head model's coefficients to (alpha_1, 1 - alpha_1) for keys, (beta_1, 1 - beta_1) for values."""
    attn = model.blocks[0].attn
    for parameter, current in ((attn.k_shift_coef, alpha_1), (attn.v_shift_coef, beta_1)):
        parameter.copy_(torch.tensor([[current, 1 - current]], dtype=parameter.dtype))


def model_of_zeros(
    embeddings: Tensor,
    d_model: int,
    d_head: int,
    n_layers: int,
    sigma: float,
    slopes: Sequence[float] | None = None,
    kv_shift: KVShiftConfig | None = None,
    n_heads: int = 1,
    **settings: Any,
) -> HookedKVTransformer:
    """Attention only, no norm, every parameter 0 except W_E, which has ``embeddings`` in its first features."""
    n_tokens, d = embeddings.shape
    config = HookedKVTransformerConfig(
        n_layers=n_layers,
        n_heads=n_heads if slopes is None else len(slopes),
        d_model=d_model,
        d_head=d_head,
        d_vocab=n_tokens,
        n_ctx=1,  # n_ctx has no effect without positions, or with ALiBi
        attn_only=True,
        normalization_type=None,
        positional_embedding_type="none" if slopes is None else "alibi",
        alibi_slopes=slopes,
        attn_scale=sigma,
        kv_shift=kv_shift,
        dtype=embeddings.dtype,
        device="cpu",
        init_weights=False,
        **settings,
    )
    model = HookedKVTransformer(config)
    for parameter in model.parameters():
        parameter.zero_()
    model.embed.W_E[:, :d] = embeddings
    return model
