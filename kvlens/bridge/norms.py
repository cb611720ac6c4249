"""The weights of a bridge as linear maps from and to the residual stream; those of its norms are measured, not read.

Families write the gain of a norm in ways of their own (as 1 + w, in float32, as a weight of another name). A norm is linear up
to its scale, so its gain, its bias and whether it subtracts the mean follow from what it makes of three vectors.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.model.protocol import Ends, LinearNorm

PROBE = 1e3
"""Size of the vectors that a norm is tried with: against it, what it adds to the variance is below float64's rounding."""


BEFORE = ("input_layernorm", "ln_1")
"""What Transformers calls the norm before the attention."""


class FoldedNorm(NamedTuple):
    """A norm up to its scale: x -> (x - mean(x)) * gain + bias, in float64."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    centers: bool


def measured(module: nn.Module, like: Tensor) -> FoldedNorm:
    """The norm that a module computes on vectors of the residual stream, without hooks.

    Args:
        module: a bridge component around a norm, or around nothing (no norm).
        like: a weight of the model, for device and dtype if the norm has no weights.
    """
    norm: Any = getattr(module, "original_component", module)
    weights = next(norm.parameters(), like)
    d_model = like.shape[0]

    def apply(x: Tensor) -> Tensor:
        result: Tensor = norm(x.to(weights)[None, None])[0, 0]
        return result.double().cpu()

    sign = torch.ones(d_model, dtype=torch.float64)
    sign[1::2] = -1
    sign = sign - sign.mean()  # an odd number of dimensions leaves a mean
    there, back, raised = (apply(PROBE * x) for x in (sign, -sign, sign + 1))
    size = sign.square().mean().sqrt()
    centers = bool(torch.allclose(raised, there, rtol=1e-3, atol=1e-3 * float(there.abs().max())))
    return FoldedNorm((there - back) / 2 * size / sign, (there + back) / 2, centers)


def ends_of(model: Any) -> Ends:
    """Return the ends of a KVTransformerBridge; the scale follows from what the final norm makes of x."""
    w_u, b_u = model.W_U, getattr(model, "b_U", None)
    factor = getattr(model.original_model.config, "lm_head_multiplier", 1.0)
    w_u = w_u if factor == 1 else w_u * factor
    norm, module = measured(model.ln_final, w_u), model.ln_final.original_component
    b_u = torch.zeros(w_u.shape[1], device=w_u.device) if b_u is None else b_u
    weight, bias = norm.gain.to(w_u), norm.bias.to(w_u) if float(norm.bias.abs().max()) > 1e-6 else None

    def scale(x: Float[Tensor, "*batch d_model"]) -> Float[Tensor, "*batch 1"]:
        centered = x - x.mean(dim=-1, keepdim=True) if norm.centers else x
        y = module(x.to(next(module.parameters(), w_u))).double()
        y = y if bias is None else y - bias.double()
        return (centered * weight.double()).norm(dim=-1, keepdim=True) / y.norm(dim=-1, keepdim=True)

    return Ends(model.blocks[0].hook_in, getattr(model, "pos_embed", None), w_u, b_u, weight, bias, norm.centers, scale)


def norms_around(model: Any, layer: int) -> tuple[LinearNorm | None, LinearNorm | None]:
    """The norms before and after a layer's heads, by what they compute; None where there are none."""
    like, found = model.W_U, _norms_around(model.blocks[layer])
    of = [None if norm is None else measured(norm, like) for norm in found]
    before, behind = (None if norm is None else LinearNorm(norm.gain.to(like), norm.centers) for norm in of)
    return before, behind


def _norms_around(block: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before and after a block's attention, by their names in Transformers, None where there are none.

    ``post_attention_layernorm`` comes after the attention in blocks that have a norm after the MLP too (Gemma 2 and 3, OLMo 2).
    """
    held = block.original_component
    before = next((getattr(held, name) for name in BEFORE if hasattr(held, name)), None)
    return before, getattr(held, "post_attention_layernorm", None) if hasattr(held, "post_feedforward_layernorm") else None
