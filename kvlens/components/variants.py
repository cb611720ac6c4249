"""The attention variants of DUAL sec. 4, for both kinds of attention: how they change keys and values, and z.

    augmented     k, v pass through MLPs before the heads, or an MLP of the block's      hook_k_augmented, hook_v_augmented
                  input is added to them
    negative      pattern @ v minus the mean value of the lowest-scored tokens           hook_z_negative (that mean)
    regularised   z_i minus alpha times the token's own value, or its own share of z     hook_z_own (what alpha multiplies)
    ridge         z from a linear solve instead of a pattern; each kind of attention provides its kernel

A converted prompt is still exact under the first and the third: b_KV holds augmented keys and values, and a token's own value
belongs to the text. Without a variant every function here returns its input.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kvlens.components.heads import HeadOutputs, NewTokens
from kvlens.ops.attention_variants import augment, lowest_scored, mean_of_negatives

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


class Augmentation(nn.Module):
    """For keys or values: one MLP per key-value head (DUAL eq. 14), or c times one beside the projection (app. E.5)."""

    def __init__(self, cfg: Any):
        super().__init__()
        self.settings = settings = cfg.attention_variant.augmented
        n, beside = cfg.n_kv_heads, settings.parallel is not None
        inner = settings.width or 2 * cfg.d_head * (n if beside else 1)
        widths = [cfg.d_model if beside else cfg.d_head, *[inner] * (settings.depth - 1), cfg.d_head]
        heads = [*[1 if beside else n] * (settings.depth - 1), n]  # beside the projection, heads share all but the last layer
        shapes = [(head, a, b) for head, (a, b) in zip(heads, itertools.pairwise(widths), strict=True)]
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape, dtype=cfg.dtype)) for shape in shapes)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None) -> None:
        """Normal with variance 1 / fan-in (2 / fan-in after the activation); the last layer beside a projection is 0."""
        for layer, weight in enumerate(self.weights):
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * ((1.0 if layer == 0 else 2.0) / weight.shape[1]) ** 0.5)
        if self.settings.parallel is not None:
            self.weights[-1].zero_()

    def forward(self, x: Float[Tensor, "batch pos kv_head d_head"], block_input: Tensor) -> Tensor:
        """g(x), or x + c g(block_input): of the input as the projections read it, the same for all heads or one for each."""
        weights = [w if len(w) == 1 else w.repeat_interleave(x.shape[2] // len(w), dim=0) for w in self.weights]  # as the shift
        activation, parallel = ACTIVATIONS[self.settings.activation], self.settings.parallel
        if parallel is None:
            return augment(x, weights, activation)
        return x + parallel * augment(block_input if block_input.dim() == 4 else block_input[:, :, None], weights, activation)


def augmented(attn: Any, k: Tensor, v: Tensor, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values after their MLPs, or with those of the projections' inputs."""
    if attn.augment_k is not None:
        k = attn.hook_k_augmented(attn.augment_k(k, key_input))
    if attn.augment_v is not None:
        v = attn.hook_v_augmented(attn.augment_v(v, value_input))
    return k, v


def read_values(attn: Any, pattern: Tensor, scores: Tensor, visible: Tensor | None, v: Tensor, entry: Any) -> Tensor:
    """pattern @ v minus the negatives' mean value: [batch, pos, head, d_head].

    Args:
        attn: the layer's attention.
        pattern: [batch, head, pos, key_pos], as hooked.
        scores: the scores by which negatives are chosen.
        visible: True where a query sees a key, broadcastable to ``scores``; None where the score is not -inf.
        v: [batch, key_pos, kv_head, d_head].
        entry: the layer's decode cache entry, which stores the means of labels; None without a cache.
    """
    values = attn.per_query_head(v).transpose(1, 2)
    pattern = pattern.to(v.device, v.dtype)
    z = pattern @ values
    negative = None if attn.variant is None else attn.variant.negative
    if negative is None:
        return z.transpose(1, 2)
    visible = scores > -torch.inf if visible is None else visible
    mean = mean_of_negatives(values, lowest_scored(scores, visible, negative.k))
    mean = attn.hook_z_negative(mean.transpose(1, 2)).transpose(1, 2)
    if negative.per == "label":
        mean = pattern @ _all_means(mean, entry)
    return (z - negative.beta * mean).transpose(1, 2)


def regularized(attn: Any, heads: HeadOutputs, tokens: NewTokens) -> HeadOutputs:
    """z_i - alpha v_i, the same over 1 - alpha, or z_i - alpha p_ii v_i; only the text's part of z is reduced."""
    settings = None if attn.variant is None else attn.variant.regularised
    if settings is None:
        return heads
    own = tokens.v.repeat_interleave(tokens.q.shape[2] // tokens.v.shape[2], dim=2).to(heads.z_context.dtype)
    if settings.form == "one_step":
        assert heads.own_share is not None
        own = heads.own_share[..., None].to(own.dtype) * own
    z = heads.z_context - settings.alpha * attn.hook_z_own(own)
    if settings.form != "normalised":
        return heads._replace(z_context=z)
    rest = 1.0 - settings.alpha
    return heads._replace(z_context=z / rest, z_bias=None if heads.z_bias is None else heads.z_bias / rest)


def _all_means(mean: Tensor, entry: Any) -> Tensor:
    """mean_{N_j} v of all tokens so far; those of earlier tokens are stored, since their queries are no longer available."""
    if entry is None:
        return mean
    before = entry.negative_means
    mean = mean if before is None else torch.cat([before, mean], dim=2)
    if not entry.frozen:
        entry.negative_means = mean
    return mean
