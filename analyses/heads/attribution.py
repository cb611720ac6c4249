"""Direct contribution of each head to the centered logit of given tokens, with the scale of every norm frozen.

Head h writes z_h W_O into the residual stream. Its direct contribution to the logit of token t, without later layers and
biases, is

    z_h W_O . d_t / s

with d_t and s from :mod:`kvlens.analyses.stream.logit_attribution`. The directions are pulled back to d_head numbers per head
and position, so no head's output is expanded to d_model numbers. If there is a norm between the heads and the residual stream
(Gemma 2, OLMo 2), its scale is frozen like that of the final norm, and its gain and centering are part of the path.

Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (direct paths); TransformerLens, ``logit_attrs``.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.model import Layer, StreamReading, output_weights

from ..stream.logit_attribution import residual_directions
from .weights import wide_dtype


def head_logit_attribution(
    model: KVModel,
    path: StreamReading,
    outputs: Sequence[Float[Tensor, "batch pos _ _"]],
    positions: slice,
    targets: Int[Tensor, "batch position"],
) -> list[Float[Tensor, " _"]]:
    """Mean over batch and positions of what each head adds to the centered logit of the target, layer by layer.

    Args:
        model: the model that was run.
        path: what lay between its heads and its logits in that run (:func:`kvlens.model.direct_path`).
        outputs: z of every layer.
        positions: the positions whose logits are attributed.
        targets: the token at each position whose logit is attributed.
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
