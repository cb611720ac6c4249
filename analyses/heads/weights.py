"""A head's four weight matrices as the residual stream sees them, and what follows from them alone.

What a norm does by itself is part of the matrix behind it, so that the figures do not depend on how the model was loaded: its
gain, and the mean over d_model that a LayerNorm takes away, which TransformerLens folds into the weights (``fold_ln``). What is
written into a stream that only LayerNorms read is written without that mean (``center_writing_weights``). What a norm divides
by is left out. The matrices of all formulas below, and of the columns' texts that say "folded", are therefore

    W_Q, W_K, W_V -> C diag(g) W        g: gain of the norm in front; C = 1 - 11^T / d_model for a LayerNorm, else 1
    W_O           -> W_O diag(g') C     g': gain of an RMSNorm behind; C only where every norm that reads is a LayerNorm
    W_U           -> C diag(g) W_U V    g, C: of the final norm; V = 1 - 11^T / d_vocab takes away the mean over the vocabulary,
                                        which no probability sees (``center_unembed``)

with g = 1 and C = 1 where there is no norm. On weights that TransformerLens has folded and centered, -> changes nothing.

Grouped queries: every query head has its own W_Q and W_O and its group's W_K and W_V.

Positions and shifts are left out too: rotary embeddings turn W_Q W_K^T by a lag, shift coefficients multiply W_K and W_V by
numbers, which no ratio below sees.

Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits (composition; eigenvalues of the OV circuit).
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVLensError

COMPOSITION_KINDS = ("Q", "K", "V")
NORM_BEHIND_ATTENTION = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose ``ln1`` stands behind the attention and not in front of it."""


class HeadWeights(NamedTuple):
    """One layer's matrices, gains and means folded, in float32 or wider."""

    W_Q: Float[Tensor, "head d_model d_head"]
    W_K: Float[Tensor, "head d_model d_head"]
    W_V: Float[Tensor, "head d_model d_head"]
    W_O: Float[Tensor, "head d_head d_model"]


def wide_dtype(model: HookedKVTransformer) -> torch.dtype:
    """The model's dtype, or float32 where that is wider."""
    return torch.promote_types(model.W_E.dtype, torch.float32)


def norm_behind(model: HookedKVTransformer, layer: int) -> str | None:
    """The name of the norm between a layer's heads and the residual stream, None for nearly all models."""
    if model.cfg.original_architecture in NORM_BEHIND_ATTENTION:
        return f"blocks.{layer}.ln1"
    return f"blocks.{layer}.ln1_post" if model.cfg.use_normalization_before_and_after else None


def gain(norm: Any) -> Tensor | float:
    """A norm's gain [d_model]; 1 where it has been folded, or there is no norm."""
    return getattr(norm, "w", 1.0)


def head_weights(model: HookedKVTransformer, layer: int) -> HeadWeights:
    """The matrices of one layer."""
    attn, dtype, behind = model.blocks[layer].attn, wide_dtype(model), norm_behind(model, layer)
    in_front = 1.0 if model.cfg.original_architecture in NORM_BEHIND_ATTENTION else gain(model.blocks[layer].ln1)
    reading = in_front[:, None] if isinstance(in_front, Tensor) else in_front
    writing = 1.0 if behind is None else gain(model.get_submodule(behind))
    W_Q, W_K, W_V = ((W * reading).to(dtype) for W in (attn.W_Q, attn.W_K, attn.W_V))
    W_O = (attn.W_O * writing).to(dtype)
    if _reads_centered(model, layer):
        W_Q, W_K, W_V = (W - W.mean(dim=1, keepdim=True) for W in (W_Q, W_K, W_V))
    if _all_read_centered(model):
        W_O = W_O - W_O.mean(dim=2, keepdim=True)
    return HeadWeights(W_Q, W_K, W_V, W_O)


def copying_scores(model: HookedKVTransformer, weights: list[HeadWeights]) -> Float[Tensor, "layer head"]:
    """sum(lambda) / sum(|lambda|) over the eigenvalues of W_E W_V W_O W_U, token in, logits out, of the folded matrices.

    1: whatever token is read, its own logit rises; -1: it falls; random weights give about 0. The matrices are those of the
    module's text: the same formula of raw weights has another value, by the means that no output of the model depends on, and
    would change with the way in which the model was loaded. The eigenvalues that are not 0 are those of the d_head x d_head
    matrix W_O (W_U W_E) W_V, so nothing of vocabulary x vocabulary is built.

    Raises:
        KVLensError: input and output vocabularies differ.
    """
    W_E, W_U = model.W_E, model.W_U
    if W_E.shape[0] != W_U.shape[1]:
        raise KVLensError(
            f"the copying score needs one vocabulary for input and output; the model reads {W_E.shape[0]} tokens and "
            f"predicts {W_U.shape[1]}"
        )
    dtype, norm = wide_dtype(model), getattr(model, "ln_final", None)
    final = gain(norm)
    W_U = W_U.to(dtype) * (final.to(dtype)[:, None] if isinstance(final, Tensor) else final)
    W_U = W_U - W_U.mean(dim=1, keepdim=True)
    W_U = W_U - W_U.mean(dim=0) if _centers(norm) else W_U
    unembed_embed = W_U @ W_E.to(dtype)
    circuits = torch.stack([w.W_O @ unembed_embed @ w.W_V for w in weights])
    total = torch.linalg.eigvals(circuits).abs().sum(dim=-1)
    return _ratio(circuits.diagonal(dim1=-2, dim2=-1).sum(dim=-1), total)  # the trace is the sum of the eigenvalues


def _centers(norm: Any) -> bool:
    return type(norm).__name__ in ("LayerNorm", "LayerNormPre")


def _all_read_centered(model: HookedKVTransformer) -> bool:
    """Whether whatever reads the residual stream takes its mean away first."""
    return _centers(getattr(model, "ln_final", None)) and all(
        _reads_centered(model, layer) for layer in range(model.cfg.n_layers)
    )


def _reads_centered(model: HookedKVTransformer, layer: int) -> bool:
    """Whether a norm that subtracts the mean stands in front of the layer's heads."""
    return model.cfg.original_architecture not in NORM_BEHIND_ATTENTION and _centers(getattr(model.blocks[layer], "ln1", None))


def composition_scores(weights: list[HeadWeights], kind: str) -> Float[Tensor, "layer head later_layer later_head"]:
    """How much of what an earlier head writes a later head reads, with its queries, keys or values.

        ||W_OV W|| / (||W_OV|| ||W||)      W = W_Q W_K^T ("Q"),  W_K W_Q^T ("K"),  W_OV ("V")       W_OV = W_V W_O

    in Frobenius norms, of the folded matrices.

    1 at most, 0 where nothing written is read; a random rotation between the two gives 1/sqrt(d_model) in the root mean
    square. Where one of the two is 0 so is the score, and it is 0 where the second head does not come later. Layout and
    values are those of ``HookedTransformer.all_composition_scores`` on weights that TransformerLens has processed.

    Args:
        weights: of every layer.
        kind: one of :data:`COMPOSITION_KINDS`.
    """
    written = [_without_left_isometry(w.W_V, w.W_O) for w in weights]  # [head, d_head, d_model]
    read = [_read_by(w, kind) for w in weights]  # [head, d_model, d_head]
    n_layers, n_heads = len(weights), len(weights[0].W_Q)
    scores = written[0].new_zeros(n_layers, n_heads, n_layers, n_heads)
    for later in range(n_layers):
        for layer in range(later):  # one pair of layers at a time: all at once would take (n_heads d_head n_layers)^2 numbers
            product = torch.einsum("hdm,gme->hdge", written[layer], read[later])
            norms = written[layer].norm(dim=(1, 2))[:, None] * read[later].norm(dim=(1, 2))
            scores[layer, :, later] = _ratio(product.square().sum(dim=(1, 3)).sqrt(), norms)
    return scores


def _read_by(w: HeadWeights, kind: str) -> Tensor:
    left, right = {"Q": (w.W_Q, w.W_K.mT), "K": (w.W_K, w.W_Q.mT), "V": (w.W_V, w.W_O)}[kind]
    return _without_left_isometry(right.mT, left.mT).mT


def _without_left_isometry(left: Tensor, right: Tensor) -> Tensor:
    """R ``right`` with ``left`` = Q R: as large as ``left @ right`` from any side, with d_head rows and not d_model."""
    return torch.linalg.qr(left, mode="r").R @ right


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 for 0 / 0."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.0)
