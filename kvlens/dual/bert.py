"""The attention variants inside a Hugging Face BERT classifier (DUAL app. E.5, table 1).

Every self-attention of a loaded ``BertForSequenceClassification`` is replaced by one with the same projections and a variant of
:class:`kvlens.model.AttentionVariantConfig`; nothing is downloaded. BERT sees all tokens, so a query's negatives are chosen
among all, and the regularised forms are those of self-attention. Ridge is causal here and is refused.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kvlens.errors import KVLensError
from kvlens.model import AttentionVariantConfig, Augmented
from kvlens.ops.attention_variants import augment, lowest_scored, mean_of_negatives

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu, "tanh": torch.tanh}


class VariantSelfAttention(nn.Module):
    """BERT's self-attention with a variant.

    Args:
        plain: the attention module that it replaces; its projections and dropout are kept, and trained.
        variant: the variant.
        seed: seed for the augmentation's initial weights.
    """

    def __init__(self, plain: Any, variant: AttentionVariantConfig, seed: int = 0):
        super().__init__()
        self.query, self.key, self.value, self.dropout = plain.query, plain.key, plain.value, plain.dropout
        self.n_heads, self.d_head, self.variant = plain.num_attention_heads, plain.attention_head_size, variant
        generator, augmented = torch.Generator().manual_seed(seed), variant.augmented
        self.augment_key = _mlp(plain, augmented, generator) if augmented is not None and augmented.keys else None
        self.augment_value = _mlp(plain, augmented, generator) if augmented is not None and augmented.values else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As ``BertSelfAttention.forward``: [batch, pos, hidden] and the pattern [batch, head, pos, key_pos]."""
        q, k, v = (f(hidden_states).unflatten(-1, (self.n_heads, self.d_head)) for f in (self.query, self.key, self.value))
        k, v = self._augmented(k, self.augment_key), self._augmented(v, self.augment_value)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [batch, head, pos, d_head]
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.d_head)
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=q.device).expand(1, 1, *scores.shape[-2:])
        if attention_mask is not None:
            visible = attention_mask if attention_mask.dtype == torch.bool else attention_mask > torch.finfo(q.dtype).min / 2
            scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        pattern = self.dropout(scores.softmax(dim=-1))
        z = pattern @ v
        negative, regularised = self.variant.negative, self.variant.regularised
        if negative is not None:
            mean = mean_of_negatives(
                v, lowest_scored(scores, visible.expand(*scores.shape[:1], 1, *scores.shape[2:]), negative.k)
            )
            z = z - negative.beta * (mean if negative.per == "query" else pattern @ mean)
        if regularised is not None:
            own = pattern.diagonal(dim1=-2, dim2=-1)[..., None] * v if regularised.form == "one_step" else v
            z = (z - regularised.alpha * own) / (1 - regularised.alpha if regularised.form == "normalised" else 1)
        return z.transpose(1, 2).flatten(2), pattern

    def _augmented(self, x: Tensor, weights: nn.ParameterList | None) -> Tensor:
        settings = self.variant.augmented
        if weights is None or settings is None:
            return x
        return augment(x, list(weights), ACTIVATIONS[settings.activation], settings.parallel)


def swap_self_attention(model: Any, variant: AttentionVariantConfig | dict[str, Any], seed: int = 0) -> Any:
    """Give every layer of a ``BertForSequenceClassification`` the variant, in place; return the model.

    Args:
        model: a loaded Hugging Face model; its attention is set to the eager form, whose mask is additive.
        variant: an :class:`AttentionVariantConfig`, or a dict of its fields.
        seed: of the initial weights of augmented keys and values.

    Raises:
        KVLensError: ridge attention, or a model that was swapped before.
    """
    variant = variant if isinstance(variant, AttentionVariantConfig) else AttentionVariantConfig(**variant)
    if variant.ridge is not None:
        raise KVLensError("swap_self_attention: ridge attention is solved causally, but BERT's tokens also see later ones")
    layers = model.bert.encoder.layer
    if any(isinstance(layer.attention.self, VariantSelfAttention) for layer in layers):
        raise KVLensError("swap_self_attention: this model already has a variant; load it again")
    model.set_attn_implementation("eager")
    for number, layer in enumerate(layers):
        plain = layer.attention.self
        swapped = VariantSelfAttention(plain, variant, seed + number)
        layer.attention.self = swapped.to(plain.query.weight.device, plain.query.weight.dtype)
    return model


def _mlp(plain: Any, settings: Augmented, generator: torch.Generator) -> nn.ParameterList:
    """As in a HookedKVTransformer: variance 1 / fan-in, 2 / fan-in after the activation; a parallel branch ends with 0."""
    d, inner = plain.attention_head_size, settings.width or 2 * plain.attention_head_size
    widths = [d, *[inner] * (settings.depth - 1), d]
    weights = []
    for layer in range(settings.depth):
        a, b = widths[layer], widths[layer + 1]
        drawn = torch.randn(plain.num_attention_heads, a, b, generator=generator)
        weights.append(nn.Parameter(drawn * ((1.0 if layer == 0 else 2.0) / a) ** 0.5))
    if settings.parallel is not None:
        nn.init.zeros_(weights[-1])
    return nn.ParameterList(weights)
