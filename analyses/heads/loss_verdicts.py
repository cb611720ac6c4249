"""The name of a head by the loss, if ablations and swaps were measured (:mod:`kvlens.analyses.heads.swaps`).

If the kernel cannot be sharp, a head may attend nearly everywhere and still carry the answer with a small part of its
attention. Its pattern alone does not show that, but swaps do: the head reads another text's token at the lag of one kind, and
nowhere else.

A change of the loss is significant if it is more than :data:`COSTLY` and more than :data:`MARGIN` standard errors, up or down.
A head whose ablation is significant is named by the swap with the largest change, if that is at least :data:`PART` of the
change by the ablation (it may be larger, since what a head reads elsewhere can have the opposite effect): by the name of the
kind if the loss rises, by "negative" and the name if it falls. Kinds whose swaps differ by at most :data:`MARGIN` standard
errors of the difference are named together. Otherwise, if the ablation raises the loss, the head keeps the name of its pattern
if that swap is significant, or is "other": the model needs it, but not for any one of these kinds of position. If the ablation
lowers the loss it is "harmful": the model does better without it. If nothing is significant the name is that of the pattern; an
inconclusive head is "none" if the ablation changes the loss by less than :data:`COSTLY`, its noise included.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

NO_VERDICT = "none"
INCONCLUSIVE = "inconclusive"
OTHER = "other"
HARMFUL = "harmful"
NEGATIVE = "negative "
TIE = " / "
COSTLY = 0.1
"""The smallest significant change of the loss, in nats per token of the second copy."""
MARGIN = 2.0
"""Standard errors."""
PART = 1 / 3


class Losses(NamedTuple):
    """Changes by ablations and swaps, with standard errors (of the difference of two swaps; on the diagonal, of one)."""

    ablation: Float[Tensor, "layer head"]
    ablation_error: Float[Tensor, "layer head"]
    swaps: Float[Tensor, "kind layer head"]
    swap_errors: Float[Tensor, "kind kind layer head"]


class Named(NamedTuple):
    """A name, and the kinds of position that it refers to."""

    name: str
    kinds: tuple[str, ...]


def tied(names: Mapping[str, str], kinds: tuple[str, ...]) -> str:
    """The name of one kind, or those of several that cannot be distinguished."""
    return TIE.join(names[kind] for kind in kinds)


def name_by_loss(
    names: Mapping[str, str],
    by_pattern: Named,
    ablation: tuple[float, float],
    swaps: Mapping[str, float],
    errors: Mapping[tuple[str, str], float],
) -> Named:
    """The name of one head.

    Args:
        names: kind -> name of a head of that kind.
        by_pattern: the name by its pattern.
        ablation: the increase of the loss without the head, and its standard error.
        swaps: the increase for each kind considered; NaN if not measured because the ablation changes almost nothing.
        errors: two kinds -> standard error of their difference; the same kind twice -> that of its swap.
    """
    cost, error = ablation
    if any(math.isnan(loss) for loss in swaps.values()):
        return _unchanged(by_pattern, cost, error)
    counts = abs(cost) > max(COSTLY, MARGIN * error)
    raising, lowering = (
        {kind: sign * loss for kind, loss in swaps.items() if sign * loss > max(COSTLY, MARGIN * errors[kind, kind])}
        for sign in (1, -1)
    )
    enough = PART * abs(cost) if counts else 0.0
    kinds = _largest(raising, errors, enough)
    if kinds:
        return Named(tied(names, kinds), kinds)
    if counts and cost > 0:
        return by_pattern if set(by_pattern.kinds) & set(raising) else Named(OTHER, ())
    kinds = _largest(lowering, errors, enough)
    if kinds:
        return Named(NEGATIVE + tied(names, kinds), kinds)
    if counts:
        return Named(HARMFUL, ())
    return _unchanged(by_pattern, cost, error)


def _unchanged(by_pattern: Named, cost: float, error: float) -> Named:
    """The name if no change of the loss is significant: that of the pattern, as far as the noise of the ablation allows."""
    if by_pattern.name == INCONCLUSIVE and abs(cost) + MARGIN * error <= COSTLY:
        return Named(NO_VERDICT, ())
    return Named(INCONCLUSIVE, ()) if by_pattern.name == NO_VERDICT and abs(cost) > COSTLY else by_pattern


def _largest(changes: Mapping[str, float], errors: Mapping[tuple[str, str], float], enough: float) -> tuple[str, ...]:
    """The kind of the largest change, with those not significantly different; none if it is below ``enough``."""
    top = max(changes, key=lambda kind: changes[kind], default=None)
    if top is None or changes[top] < enough:
        return ()
    return tuple(k for k in changes if k == top or changes[top] - changes[k] <= MARGIN * errors[top, k])
