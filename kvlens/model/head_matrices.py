"""The matrices of a HookedKVTransformer's heads, with the norms around them folded in."""

from typing import Any

import torch
from torch import Tensor

from kvlens.model.direct_path import NORM_BEHIND_ATTENTION, norm_behind, unembedding_of
from kvlens.model.protocol import HeadMatrices


def head_matrices_of(model: Any) -> list[HeadMatrices | None]:
    """See :meth:`kvlens.KVModel.head_matrices`."""
    layers = range(model.cfg.n_layers)
    norms = [None if _reads_unnormalized(model) else getattr(model.blocks[layer], "ln1", None) for layer in layers]
    centered = [getattr(norm, "centers", False) for norm in norms]
    all_centered = unembedding_of(model).centers and all(centered)
    found: list[HeadMatrices | None] = []
    for layer in layers:
        attn, behind = model.blocks[layer].attn, norm_behind(model, layer)
        writing = 1.0 if behind is None else getattr(model.get_submodule(behind), "w", 1.0)
        raw = HeadMatrices(attn.W_Q, attn.W_K, attn.W_V, attn.W_O)
        found.append(folded(raw, getattr(norms[layer], "w", 1.0), writing, centered[layer], all_centered))
    return found


def folded(
    raw: HeadMatrices, reading: Tensor | float, writing: Tensor | float, reads_centered: bool, all_centered: bool
) -> HeadMatrices:
    """Fold the gains of the norms before and after the heads, and the subtraction of means, into their matrices.

    Args:
        raw: the weights.
        reading, writing: gains [d_model]; 1 without one.
        reads_centered: whether the norm before these heads subtracts the mean.
        all_centered: whether every norm that reads the residual stream does.
    """
    dtype = torch.promote_types(raw.W_O.dtype, torch.float32)
    gain = reading[:, None] if isinstance(reading, Tensor) else reading
    W_Q, W_K, W_V = ((W * gain).to(dtype) for W in raw[:3])
    W_O = (raw.W_O * writing).to(dtype)
    if reads_centered:
        W_Q, W_K, W_V = (W - W.mean(dim=1, keepdim=True) for W in (W_Q, W_K, W_V))
    if all_centered:
        W_O = W_O - W_O.mean(dim=2, keepdim=True)
    return HeadMatrices(W_Q, W_K, W_V, W_O)


def _reads_unnormalized(model: Any) -> bool:
    """Whether ``ln1`` comes after the attention."""
    return model.cfg.original_architecture in NORM_BEHIND_ATTENTION
