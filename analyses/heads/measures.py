"""All measures of heads that come from one forward pass over repeated tokens.

Patterns are reduced to scores layer by layer, and never kept; the logits are not computed, because direct attribution needs
only each head's output and the scale of the final norm.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer

from ..passes import MEMORY_PER_PASS
from .attribution import frozen_scales, head_logit_attribution
from .lags import PatternScores, pattern_scores
from .repeated_tokens import RepeatedTokens
from .shift_roles import ShiftTaps, layer_taps, shifted_projections
from .weights import wide_dtype


class HeadMeasures(NamedTuple):
    """Measures of every head from one run of the text, means over its sequences."""

    scores: PatternScores
    attribution: Float[Tensor, "layer head"]
    taps: list[ShiftTaps]


def measure_heads(model: HookedKVTransformer, repeated: RepeatedTokens) -> HeadMeasures:
    """Run the text, as many sequences at a time as memory allows, and average over all of them."""
    parts = repeated.split(max(1, MEMORY_PER_PASS // _bytes_per_sequence(model, repeated)))
    measured = [_measure_part(model, part) for part in parts]
    shares = [len(part.tokens) / len(repeated.tokens) for part in parts]
    scores = PatternScores(*(_weighted(shares, tensors) for tensors in zip(*(m.scores for m in measured), strict=True)))
    return HeadMeasures(scores, _weighted(shares, [m.attribution for m in measured]), measured[0].taps)


def _bytes_per_sequence(model: HookedKVTransformer, repeated: RepeatedTokens) -> int:
    """Bytes of one layer's pattern, scores and temporaries; every layer's z; the widest activations."""
    pos, cfg = repeated.tokens.shape[1], model.cfg
    return 4 * pos * (6 * cfg.n_heads * pos + cfg.n_layers * cfg.n_heads * cfg.d_head + 4 * max(cfg.d_mlp or 0, cfg.d_model))


def _weighted(shares: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([share * x for share, x in zip(shares, tensors, strict=True)]).sum(dim=0)


def _measure_part(model: HookedKVTransformer, repeated: RepeatedTokens) -> HeadMeasures:
    """Run one forward pass without logits; patterns are reduced to scores immediately and never kept."""
    cache: dict[str, Tensor] = {}
    taps: list[ShiftTaps] = []
    scores: list[PatternScores] = []

    def keep(x: Tensor, hook: Any) -> None:
        cache[hook.name] = x

    def score(pattern: Tensor, hook: Any) -> None:
        layer = len(scores)
        used = {x: cache[f"blocks.{layer}.attn.hook_{x}_shift_coef"] for x in shifted_projections(model)}
        taps.append(layer_taps(model, used, wide_dtype(model)))
        scores.append(pattern_scores(pattern, repeated, taps[-1]))

    kept = [*frozen_scales(model), *_kept_in_layers(model)]
    patterns = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    model.run_with_hooks(
        repeated.tokens,
        attention_mask=torch.ones_like(repeated.tokens),  # a pad token in the text is a token, not padding
        return_type=None,
        fwd_hooks=[*((name, keep) for name in kept), *((name, score) for name in patterns)],
    )
    positions = slice(repeated.second, repeated.tokens.shape[1] - 1)
    attribution = head_logit_attribution(model, cache, positions, repeated.next_tokens)
    return HeadMeasures(PatternScores(*(torch.stack(x) for x in zip(*scores, strict=True))), attribution, taps)


def _kept_in_layers(model: HookedKVTransformer) -> Iterator[str]:
    for layer in range(model.cfg.n_layers):
        yield f"blocks.{layer}.attn.hook_z"
        for x in shifted_projections(model):
            yield f"blocks.{layer}.attn.hook_{x}_shift_coef"
