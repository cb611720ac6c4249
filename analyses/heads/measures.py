"""All measures of heads that come from one forward pass over repeated tokens.

Patterns are reduced to scores layer by layer, and never kept; direct attribution needs only each head's output and what lies
between the heads and the logits.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.errors import IndirectHeads
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import HeadsRead, Layer, StreamReading, direct_path, heads_per_layer, output_weights

from ..layers import stack_layers
from ..stream.logit_attribution import residual_directions
from .lags import PatternScores, pattern_scores
from .repeated_tokens import RepeatedTokens
from .shift_roles import ShiftTaps, layer_taps, shifted_projections
from .weights import wide_dtype


class HeadMeasures(NamedTuple):
    """Measures of every head from one run of the text, means over its sequences.

    Attributes:
        scores: of the repeated text.
        control: of the same text whose first copy has other tokens, so that only a head that goes by position attends alike.
        attribution: to the right next token's logit; NaN in models whose heads do not write to the residual stream directly.
        taps: the shift coefficients as used.
    """

    scores: PatternScores
    control: PatternScores
    attribution: Float[Tensor, "layer head"]
    taps: list[ShiftTaps]


def measure_heads(model: KVModel, repeated: RepeatedTokens, others: Int[Tensor, "batch piece"]) -> HeadMeasures:
    """Run the text and its control, as many sequences at a time as memory allows, and average over all of them.

    Args:
        model: whose heads are measured.
        repeated: the text.
        others: the tokens that are the first copy in the control.
    """
    scores, attribution, taps = _measured(model, repeated)
    return HeadMeasures(scores, _measured(model, repeated.control(others))[0], attribution, taps)


def _measured(model: KVModel, repeated: RepeatedTokens) -> tuple[PatternScores, Tensor, list[ShiftTaps]]:
    parts = repeated.split(max(1, NUMBERS_PER_PASS // _numbers_per_sequence(model, repeated)))
    scores, attributions, taps = zip(*(_measure_part(model, part) for part in parts), strict=True)
    shares = [len(part.tokens) / len(repeated.tokens) for part in parts]
    mean = PatternScores(*(_weighted(shares, tensors) for tensors in zip(*scores, strict=True)))
    return mean, _weighted(shares, attributions), taps[0]


def _numbers_per_sequence(model: KVModel, repeated: RepeatedTokens) -> int:
    """The numbers of one layer's pattern, scores and temporaries; every layer's z; the widest activations."""
    pos, cfg = repeated.tokens.shape[1], model.cfg
    return pos * (6 * cfg.n_heads * pos + cfg.n_layers * cfg.n_heads * cfg.d_head + 4 * max(cfg.d_mlp or 0, cfg.d_model))


def _weighted(shares: Sequence[float], tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([share * x for share, x in zip(shares, tensors, strict=True)]).sum(dim=0)


def _measure_part(model: KVModel, repeated: RepeatedTokens) -> tuple[PatternScores, Tensor, list[ShiftTaps]]:
    """Run one forward pass; patterns are reduced to scores immediately and never kept."""
    coefficients: dict[str, Tensor] = {}
    outputs: list[Tensor] = []
    taps: list[ShiftTaps] = []
    scores: list[PatternScores] = []

    def keep(x: Tensor, hook: Any) -> None:
        coefficients[hook.name] = x

    def score(layer: int, read: HeadsRead) -> None:
        used = {x: coefficients[f"blocks.{layer}.attn.hook_{x}_shift_coef"] for x in shifted_projections(model)}
        taps.append(layer_taps(model, layer, used, wide_dtype(model)))
        scores.append(pattern_scores(read.pattern, repeated, taps[-1]))
        outputs.append(read.z)

    shifts = [f"blocks.{i}.attn.hook_{x}_shift_coef" for i in range(model.cfg.n_layers) for x in shifted_projections(model)]
    with model.hooks(fwd_hooks=[(name, keep) for name in shifts]):
        path: StreamReading | None = None
        with contextlib.suppress(IndirectHeads):  # after all layers have been visited
            path = direct_path(model, repeated.tokens, score)
    if path is None:
        attribution = scores[0].raw.new_full((len(scores), max(heads_per_layer(model))), torch.nan)
    else:
        positions = slice(repeated.second, repeated.tokens.shape[1] - 1)
        attribution = stack_layers(_logit_attribution(model, path, outputs, positions, repeated.next_tokens))
    return _stacked(scores), attribution, taps


def _stacked(scores: Sequence[PatternScores]) -> PatternScores:
    """The scores of all layers, zeros for heads that a layer does not have."""
    return PatternScores(*(stack_layers(of_layers) for of_layers in zip(*scores, strict=True)))


def _logit_attribution(
    model: KVModel,
    path: StreamReading,
    outputs: Sequence[Float[Tensor, "batch pos _ _"]],
    positions: slice,
    targets: Int[Tensor, "batch position"],
) -> list[Float[Tensor, " _"]]:
    """Mean over batch and positions of what each head adds to the centered logit of the target, layer by layer.

    With the scale of every norm frozen, and without later layers and biases, the direct contribution of z_h to the logit of
    token t is

        z_h W_O . d_t / s

    with d_t and s from :mod:`kvlens.analyses.stream.logit_attribution`. The directions are pulled back to d_head numbers per
    head and position, so no head's output is expanded to d_model numbers. If there is a norm between the heads and the
    residual stream (Gemma 2, OLMo 2), its scale is frozen like that of the final norm, and its gain and centering are part of
    the path.

    Args:
        model: the model that was run.
        path: what lay between its heads and its logits in that run (:func:`kvlens.model.direct_path`).
        outputs: z of every layer.
        positions: the positions whose logits are attributed.
        targets: the token at each position whose logit is attributed.

    Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (direct paths); TransformerLens,
    ``logit_attrs``.
    """
    dtype = wide_dtype(model)
    direction = residual_directions(model, targets) / path.scale[:, positions].to(dtype)
    rows = []
    for number, (layer, z, of) in enumerate(zip(model.layers(), outputs, path.layers, strict=True)):
        into_stream = direction if of.scale is None else _in_front_of(layer, direction, of.scale[:, positions].to(dtype))
        into_head = torch.einsum("bpm,hdm->bphd", into_stream, output_weights(model, number).to(dtype))
        written = z[:, positions].to(dtype)
        written = written if of.factor is None else written * of.factor[:, positions].to(dtype)
        rows.append((written * into_head).sum(dim=-1).mean(dim=(0, 1)))
    return rows


def _in_front_of(layer: Layer, direction: Tensor, scale: Tensor) -> Tensor:
    """Pull ``direction`` back through the norm behind a layer's heads, with its scale frozen, from its output to its input."""
    _, norm = layer.norms()
    assert norm is not None
    direction = direction * norm.gain
    return (direction - direction.mean(dim=-1, keepdim=True) if norm.centers else direction) / scale
