"""Direct contribution of each head to the centered logit of given tokens, with the scale of every norm frozen.

Head h writes z_h W_O into the residual stream. Its direct contribution to the logit of token t, without later layers and
biases, is

    z_h W_O . d_t / s

with d_t and s from :mod:`kvlens.analyses.stream.logit_attribution`. The directions are pulled back to d_head numbers per head
and position, so no head's output is expanded to d_model numbers. If there is a norm between the heads and the residual stream
(Gemma 2, OLMo 2), its scale is frozen like that of the final norm, and its gain and centering are part of the path.

Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (direct paths); TransformerLens, ``logit_attrs``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import HookedKVTransformer

from ..stream.logit_attribution import final_scale, final_scale_name, residual_directions
from .weights import gain, norm_behind, wide_dtype


def frozen_scales(model: HookedKVTransformer) -> list[str]:
    """The hook points whose values :func:`head_logit_attribution` needs in addition to ``hook_z``."""
    behind = [norm_behind(model, layer) for layer in range(model.cfg.n_layers)]
    return [*(f"{norm}.hook_scale" for norm in behind if norm is not None), final_scale_name(model)]


def head_logit_attribution(
    model: HookedKVTransformer,
    cache: Mapping[str, Tensor],
    positions: slice,
    targets: Int[Tensor, "batch position"],
) -> Float[Tensor, "layer head"]:
    """Mean over batch and positions of what each head adds to the centered logit of the target.

    Args:
        model: the model that was run.
        cache: every layer's ``hook_z`` and the :func:`frozen_scales` of that run.
        positions: the positions whose logits are attributed.
        targets: the token at each position whose logit is attributed.
    """
    dtype = wide_dtype(model)
    direction = residual_directions(model, targets) / final_scale(model, cache)[:, positions].to(dtype)
    rows = []
    for layer in range(model.cfg.n_layers):
        behind = norm_behind(model, layer)
        into_stream = direction if behind is None else _in_front_of(model, behind, direction, cache, positions)
        into_head = torch.einsum("bpm,hdm->bphd", into_stream, model.blocks[layer].attn.W_O.to(dtype))
        z = cache[f"blocks.{layer}.attn.hook_z"][:, positions].to(dtype)
        rows.append((z * into_head).sum(dim=-1).mean(dim=(0, 1)))
    return torch.stack(rows)


def _in_front_of(
    model: HookedKVTransformer, norm: str, direction: Tensor, cache: Mapping[str, Tensor], positions: slice
) -> Tensor:
    """Pull ``direction`` back through a frozen norm, from its output to its input."""
    module: Any = model.get_submodule(norm)
    direction = direction * gain(module)
    if not type(module).__name__.startswith("RMS"):  # a LayerNorm subtracts the mean
        direction = direction - direction.mean(dim=-1, keepdim=True)
    return direction / cache[f"{norm}.hook_scale"][:, positions].to(direction.dtype)
