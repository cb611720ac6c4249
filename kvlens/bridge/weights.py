"""The weights of a bridge as linear maps from and to the residual stream; those of its norms are measured, not read.

Families write the gain of a norm in ways of their own (as 1 + w, in float32, as a weight of another name). A norm is linear up
to its scale, so its gain, its bias and whether it subtracts the mean follow from what it makes of three vectors.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvlens.bridge.parts import Part
from kvlens.bridge.softmax import SoftmaxLayer
from kvlens.model.head_matrices import folded
from kvlens.model.protocol import HeadMatrices, Unembedding

PROBE = 1e3
"""Size of the vectors that a norm is tried with: against it, what it adds to the variance is below float64's rounding."""


BEFORE = ("input_layernorm", "ln_1")
"""What Transformers calls the norm before the attention."""


class Norm(NamedTuple):
    """A norm up to its scale: x -> (x - mean(x)) * gain + bias, in float64."""

    gain: Float[Tensor, " d_model"]
    bias: Float[Tensor, " d_model"]
    centers: bool


def measured(module: nn.Module, like: Tensor) -> Norm:
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
    return Norm((there - back) / 2 * size / sign, (there + back) / 2, centers)


def unembedding(model: Any) -> Unembedding:
    """See :meth:`kvlens.KVModel.unembedding`."""
    w_u, b_u = model.W_U, getattr(model, "b_U", None)
    factor = getattr(model.original_model.config, "lm_head_multiplier", 1.0)
    w_u = w_u if factor == 1 else w_u * factor
    norm = measured(model.ln_final, w_u)
    b_u = torch.zeros(w_u.shape[1], device=w_u.device) if b_u is None else b_u
    bias = norm.bias.to(w_u) if float(norm.bias.abs().max()) > 1e-6 else None
    return Unembedding(w_u, b_u, norm.gain.to(w_u), bias, norm.centers)


def head_matrices(model: Any, layers: list[list[Part]]) -> list[HeadMatrices | None]:
    """See :meth:`kvlens.KVModel.head_matrices`."""
    like = model.W_U
    around = [_norms_around(model.blocks[layer]) for layer in range(len(layers))]
    in_front = [None if norm is None else measured(norm, like) for norm, _ in around]
    all_centered = unembedding(model).centers and all(norm is not None and norm.centers for norm in in_front)
    found: list[HeadMatrices | None] = []
    for parts, norm, (_, behind) in zip(layers, in_front, around, strict=True):
        raw = _raw(parts)
        if raw is None:
            found.append(None)
            continue
        writing = 1.0 if behind is None else measured(behind, like).gain.to(like)
        reading = 1.0 if norm is None else norm.gain.to(like)
        found.append(folded(raw, reading, writing, norm is not None and norm.centers, all_centered))
    return found


def _norms_around(block: Any) -> tuple[nn.Module | None, nn.Module | None]:
    """The norms before and after a block's attention, by their names in Transformers, None where there are none.

    ``post_attention_layernorm`` comes after the attention in blocks that have a norm after the MLP too (Gemma 2 and 3, OLMo 2).
    """
    held = block.original_component
    before = next((getattr(held, name) for name in BEFORE if hasattr(held, name)), None)
    return before, getattr(held, "post_attention_layernorm", None) if hasattr(held, "post_feedforward_layernorm") else None


def _raw(parts: list[Part]) -> HeadMatrices | None:
    """The weights of a layer by query head; None where heads are not linear maps, or the bridge does not show the weights."""
    layer = parts[0]
    if len(parts) > 1 or not isinstance(layer, SoftmaxLayer) or getattr(layer.attn, "hook_q_gate", None) is not None:
        return None
    if layer.sizes.d_key != layer.sizes.d_head or hasattr(layer.attn.original_component, "kv_a_proj_with_mqa"):
        return None  # latent attention
    found: list[Any] = [getattr(layer.attn, name, None) for name in ("W_Q", "W_K", "W_V")]
    if any(weight is None for weight in found):
        return None  # the bridge has no name for them (Nemotron-H)
    w_q, w_k, w_v = (weight.repeat_interleave(layer.n_heads // len(weight), dim=0) for weight in found)
    return HeadMatrices(w_q, w_k, w_v, layer.output_weights())
