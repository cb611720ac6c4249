"""The effect on the loss of a head reading another text's token at one kind of position, with everything else unchanged.

Resampling a head's whole output (:mod:`kvlens.analyses.heads.ablation`) shows that the model needs the head, but not for what.
Here only what it reads at the lag of one kind is swapped: with E the value-side pattern of :mod:`kvlens.analyses.heads.lags`,
v the values of the text before the shift and v' those of another text,

    z_i  ->  z_i - E[i, i - lag] (v_{i - lag} - v'_{i - lag})

The attention itself is unchanged, so the measure works equally for a sharp softmax head and for a linear head that reads a
tenth here and the rest everywhere else. Since z is linear in the tokens, the swaps at all lags add up, in z, to reading the
other text throughout.

Source: Wang et al. 2022 (path patching) and Chan et al. 2022 (resampling), of one edge of the attention pattern.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import KVModel
from kvlens.model import HeadsRead, visit_heads

from .ablation import losses_and_logits, replaced, residuals, standard_error
from .lags import KINDS, at_lag, lags_and_queries, value_side_pattern
from .repeated_tokens import RepeatedTokens
from .shift_roles import ShiftTaps


class SwapCosts(NamedTuple):
    """The increase of the loss, nats, and the standard error of the difference of two kinds; on the diagonal, of one kind.

    NaN for heads that were not measured.
    """

    costs: Float[Tensor, "kind layer head"]
    errors: Float[Tensor, "kind kind layer head"]


class _Layer(NamedTuple):
    """What one layer's heads write, their attention at each kind of position (0 if there is none), and the difference of v.

    ``gate`` multiplies what the heads read; None without one.
    """

    z: Float[Tensor, "text pos head d_head"]
    edges: Float[Tensor, "kind text head query"]
    difference: Float[Tensor, "text pos head d_head"]
    gate: Float[Tensor, "text pos head d_head"] | None


def swap_costs(
    model: KVModel,
    repeated: RepeatedTokens,
    donors: RepeatedTokens,
    taps: list[ShiftTaps],
    heads: Bool[Tensor, "layer head"],
    *,
    batch_size: int | None = None,
) -> SwapCosts:
    """Swap what each head reads at each kind of position, one at a time.

    Args:
        model: a model without an attention variant, in which z would not be linear in v.
        repeated: the texts.
        donors: the same number of texts of the same length.
        taps: the shift coefficients of every layer.
        heads: the heads to measure.
        batch_size: rows per forward pass; None takes what memory allows.

    Returns:
        Changes of the mean loss of the next tokens of the second copy.
    """
    starts, layers = residuals(model, repeated), _layers(model, repeated, donors, taps)
    whole, _ = losses_and_logits(model, starts[-1], len(layers), repeated.next_tokens)
    costs = torch.full((len(KINDS), *heads.shape), torch.nan, dtype=whole.dtype, device=whole.device)
    errors = costs.new_full((len(KINDS), *costs.shape), torch.nan)
    texts = torch.arange(len(repeated.tokens)).repeat(len(KINDS))
    for layer, head in heads.nonzero().tolist():
        z = _swapped(layers[layer], head, repeated)
        effects = replaced(model, repeated, starts[layer], layer, torch.full_like(texts, head), texts, z, batch_size)
        change = torch.cat([loss for _, (loss, _) in effects]).unflatten(0, (len(KINDS), -1)) - whole
        costs[:, layer, head] = change.mean(dim=(1, 2))
        errors[:, :, layer, head] = standard_error(change[:, None] - change)
        errors[:, :, layer, head].diagonal().copy_(standard_error(change))
    return SwapCosts(costs, errors)


def _swapped(own: _Layer, head: int, repeated: RepeatedTokens) -> Float[Tensor, "row pos d_head"]:
    """A head's output after each swap, one row per kind and text."""
    z, difference = own.z[:, :, head], own.difference[:, :, head]
    lags = [lag for lag, _ in lags_and_queries(repeated).values()]
    read = torch.stack([difference.roll(lag, dims=1) for lag in lags])  # values wrapped around from the end have attention 0
    read = own.edges[:, :, head, :, None] * read
    return (z + (read if own.gate is None else read * own.gate[:, :, head])).flatten(0, 1)


def _layers(model: KVModel, repeated: RepeatedTokens, donors: RepeatedTokens, taps: list[ShiftTaps]) -> list[_Layer]:
    others: list[Tensor] = []
    layers: list[_Layer] = []

    def keep(layer: int, read: HeadsRead) -> None:
        others.append(read.values)

    def reduce(layer: int, read: HeadsRead) -> None:
        effective = value_side_pattern(read.pattern, taps[layer])
        edges = [
            at_lag(effective, lag).index_fill(-1, torch.arange(first, device=effective.device), 0)
            for lag, first in lags_and_queries(repeated).values()
        ]
        layers.append(_Layer(read.z, torch.stack(edges), others[layer] - read.values, read.gate))

    visit_heads(model, donors.tokens, keep)
    visit_heads(model, repeated.tokens, reduce)
    return layers
