"""The name of a head by the loss, where ablations and swaps were measured (:mod:`kvlens.analyses.heads.swaps`).

Where a kernel cannot be sharp, a head may look nearly everywhere and still carry the answer by the small rest of its attention.
Its pattern alone does not show that, but swapping does: a head reads another text's token at the lag of one kind, and nowhere
else.

A change of the loss counts that is more than :data:`COSTLY` and more than :data:`MARGIN` standard errors, up or down. A head
that has one is called by the swap that changes most, if that is at least :data:`PART` of what the ablation changes (it may be
more: what a head reads elsewhere can do the opposite): by the name of the kind where the loss rises, "negative" and the name
where it falls. Kinds whose swaps differ by no more than :data:`MARGIN` standard errors of the difference are named together.
Else, where the ablation raises the loss, it keeps the name of its pattern, if that swap counts, or is "other": the model needs
it, and not for any one of these kinds of position. Where the ablation lowers the loss it is "harmful": the model does better
without it. Where nothing counts the name is that of the pattern; one that did not decide is "none" if the ablation changes the
loss by less than :data:`COSTLY`, its noise included.
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
"""Nats per token of the second copy."""
MARGIN = 2.0
"""Standard errors."""
PART = 1 / 3


class Losses(NamedTuple):
    """What ablations and swaps change, with standard errors (of the difference of two swaps; on the diagonal, of one)."""

    ablation: Float[Tensor, "layer head"]
    ablation_error: Float[Tensor, "layer head"]
    swaps: Float[Tensor, "kind layer head"]
    swap_errors: Float[Tensor, "kind kind layer head"]


class Named(NamedTuple):
    """A name, and the kinds of position that it speaks of."""

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
        names: kind -> what a head of that kind is called.
        by_pattern: what its pattern says.
        ablation: by how much the loss rises without it, and the standard error.
        swaps: likewise for each kind that is asked; NaN where not measured, because the ablation changes next to nothing.
        errors: two kinds -> standard error of their difference; twice one kind -> that of its swap.
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
    """The name where no change of the loss counts: that of the pattern, as far as the noise of the ablation allows it."""
    if by_pattern.name == INCONCLUSIVE and abs(cost) + MARGIN * error <= COSTLY:
        return Named(NO_VERDICT, ())
    return Named(INCONCLUSIVE, ()) if by_pattern.name == NO_VERDICT and abs(cost) > COSTLY else by_pattern


def _largest(changes: Mapping[str, float], errors: Mapping[tuple[str, str], float], enough: float) -> tuple[str, ...]:
    """The kind of the largest change, with those that do not differ from it; none where that is not ``enough``."""
    top = max(changes, key=lambda kind: changes[kind], default=None)
    if top is None or changes[top] < enough:
        return ()
    return tuple(k for k in changes if k == top or changes[top] - changes[k] <= MARGIN * errors[top, k])
