"""The units that an attribution is about, as a batch chooses them, and their positions; :mod:`kvlens.units` cuts prompts."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens.arguments import UNITS, Span
from kvlens.units import Unit

from ..declaration import Option

BY = Option("the units", choices=UNITS)
"""How a batch chooses them."""
Spans = Sequence[Span] | Sequence[str]
"""Token ranges, or strings that occur in the prompt."""


def positions_of(units: Sequence[Unit], n_tokens: int) -> Bool[Tensor, "unit pos"]:
    """True at each unit's own positions."""
    own = torch.zeros(len(units), n_tokens, dtype=torch.bool)
    for row, unit in enumerate(units):
        own[row, unit.start : unit.stop] = True
    return own
