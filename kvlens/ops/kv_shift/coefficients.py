"""From the trained parameter to the coefficients that a head uses, and the parameter's initial value (KVSA sec. 4.6-4.7).

Three parametrizations: ``free`` uses the parameter as it is; ``clamp`` clamps it to [0, 1] in the forward pass; ``gate``
is a softmax over the window's logits, which for window 1 is the paper's sigmoid gate (c, 1 - c).
"""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Parametrization = Literal["free", "gate", "clamp"]
Init = Literal["uniform", "identity"]


def coefficients_from_parameter(
    parameter: Float[Tensor, "head taps"], parametrization: Parametrization
) -> Float[Tensor, "head taps"]:
    """The coefficients as used, from the parameter as trained."""
    if parametrization == "gate":
        return parameter.softmax(dim=-1)
    if parametrization == "clamp":
        return parameter.clamp(0.0, 1.0)
    return parameter


def initial_shift_parameter(
    n_heads: int,
    window: int,
    parametrization: Parametrization,
    init: Init,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "head taps"]:
    """Draw the initial parameter, in float32.

    ``uniform`` (KVSA sec. 2.2 and 4.7): all coefficients but the last ~ U(0, 1), the last is 1 minus the others. A gate cannot
    hold the negative last coefficient that this may give for windows above 1, so its coefficients are drawn uniformly
    from the simplex, which is the same distribution for window 1. ``identity``: (1, 0, ...), for a shift grafted onto a trained
    model; a gate reaches it only in the limit, and :class:`kvlens.KVShiftConfig` refuses the pair.
    """
    if init == "identity":
        return torch.eye(1, window + 1).repeat(n_heads, 1)
    if parametrization == "gate":
        exponential = -torch.rand(n_heads, window + 1, generator=generator).clamp(1e-7, 1 - 1e-7).log()
        return (exponential / exponential.sum(dim=-1, keepdim=True)).log()
    others = torch.rand(n_heads, window, generator=generator)
    return torch.cat([others, 1 - others.sum(dim=-1, keepdim=True)], dim=-1)
