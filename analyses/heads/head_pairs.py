"""Which head reads what an earlier head wrote: Q-, K- and V-composition of every pair, from the weights alone.

Head 1 writes into the residual stream through W_OV = W_V W_O; a later head 2 reads it through W_Q W_K^T with its queries,
through W_K W_Q^T with its keys, or through its own W_OV with its values. The score is the norm of the product over the product
of norms; gains of norms and grouped queries are explained below.

To interpret a score, compare it with 1/sqrt(d_model), the expected score of unrelated heads, and with the scores of the same
model's other pairs. The weights only allow composition; whether a text uses it is shown by an ablation.

Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; TransformerLens ``all_composition_scores``.
"""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.checks import checked
from kvlens.model import HeadMatrices, head_matrices, heads_per_layer

from ..declaration import Columns, Option, analysis
from ..registry import on_its_front_ends

# A head's four weight matrices with norms folded in, and the scores that depend on them alone.
#
# The linear part of a norm is folded into the following matrix, so that scores do not depend on how the model was loaded: its
# gain, and the subtraction of the mean over d_model in a LayerNorm (TransformerLens' ``fold_ln``). Matrices that write into a
# stream that only LayerNorms read are centered (``center_writing_weights``). The scale that a norm divides by is left out. The
# matrices in all formulas below, and in the descriptions of columns that say "folded", are therefore
#
#     W_Q, W_K, W_V -> C diag(g) W        g: gain of the preceding norm; C = 1 - 11^T / d_model for a LayerNorm, else 1
#     W_O           -> W_O diag(g') C     g': gain of an RMSNorm after it; C only if every norm that reads is a LayerNorm
#
# with g = 1 and C = 1 if there is no norm. Weights that TransformerLens has folded and centered do not change.
#
# Grouped queries: every query head has its own W_Q and W_O and its group's W_K and W_V.
#
# Positions, norms of queries and keys, and shifts are left out too: rotary embeddings rotate W_Q W_K^T by a lag, and shift
# coefficients multiply W_K and W_V by numbers that cancel in all ratios below.


COMPOSITION_KINDS: tuple[Literal["Q", "K", "V"], ...] = ("Q", "K", "V")


def wide_dtype(model: KVModel) -> torch.dtype:
    """The model's dtype, or float32 if that is wider."""
    return torch.promote_types(model.W_E.dtype, torch.float32)


def composition_scores(weights: Sequence[HeadMatrices], kind: str) -> Float[Tensor, "layer head later_layer later_head"]:
    """How much of what an earlier head writes a later head reads, with its queries, keys or values.

        ||W_OV W|| / (||W_OV|| ||W||)      W = W_Q W_K^T ("Q"),  W_K W_Q^T ("K"),  W_OV ("V")       W_OV = W_V W_O

    in Frobenius norms, of the folded matrices.

    At most 1, and 0 if nothing written is read; a random rotation between the two gives a root mean square of 1/sqrt(d_model).
    The score is 0 if one of the two matrices is 0, or if the second head is not in a later layer. Layout and values are those
    of ``HookedTransformer.all_composition_scores`` on weights that TransformerLens has processed.

    Args:
        weights: weights of every layer.
        kind: one of :data:`COMPOSITION_KINDS`.
    """
    written = [_without_left_isometry(w.W_V, w.W_O) for w in weights]  # [head, d_head, d_model]
    read = [_read_by(w, kind) for w in weights]  # [head, d_model, d_head]
    n_layers, n_heads = len(weights), max(len(w.W_Q) for w in weights)
    scores = written[0].new_zeros(n_layers, n_heads, n_layers, n_heads)
    for later in range(n_layers):
        for layer in range(later):  # one pair of layers at a time: all at once would take (n_heads d_head n_layers)^2 numbers
            product = torch.einsum("hdm,gme->hdge", written[layer], read[later])
            norms = written[layer].norm(dim=(1, 2))[:, None] * read[later].norm(dim=(1, 2))
            found = _ratio(product.square().sum(dim=(1, 3)).sqrt(), norms)
            scores[layer, : len(found), later, : found.shape[1]] = found
    return scores


def _read_by(w: HeadMatrices, kind: str) -> Tensor:
    left, right = {"Q": (w.W_Q, w.W_K.mT), "K": (w.W_K, w.W_Q.mT), "V": (w.W_V, w.W_O)}[kind]
    return _without_left_isometry(right.mT, left.mT).mT


def _without_left_isometry(left: Tensor, right: Tensor) -> Tensor:
    """R ``right`` with ``left`` = Q R: has the norms of ``left @ right``, but d_head rows instead of d_model."""
    return torch.linalg.qr(left, mode="r").R @ right


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, 0 for 0 / 0."""
    return torch.where(whole > 0, part / whole.clamp(min=torch.finfo(whole.dtype).tiny), 0.0)


COLUMNS = Columns(
    kind=("str", '"Q", "K" or "V": what of the later head reads'),
    layer=("int64", "of the head that writes"),
    head=("int64", "the head that writes"),
    later_layer=("int64", "of the head that reads, a later one"),
    later_head=("int64", "query head; the heads of a group share keys and values, and differ in queries and outputs"),
    score=(
        "float64",
        "||W_OV W|| / (||W_OV|| ||W||), in [0, 1]; W: W_Q W_K^T, W_K W_Q^T or W_OV of the later head, all folded: times their "
        "norm's gain, less the mean over d_model that a LayerNorm takes away",
    ),
)


@analysis(
    COLUMNS,
    "Q-, K- and V-composition scores of all pairs of heads, from the weights alone",
    cost="no pass: products of the weights of every pair of heads",
    options={"kinds": Option("what of the later head reads", COMPOSITION_KINDS, many=True)},
)
@checked
@on_its_front_ends
@torch.no_grad()
def composition(model: KVModel, *, kinds: Sequence[Literal["Q", "K", "V"]] = COMPOSITION_KINDS) -> pd.DataFrame:
    """Composition scores of all pairs of heads in different layers.

    Args:
        model: a model of at least two layers with heads, otherwise the table is empty.
        kinds: some of "Q", "K", "V", in the order of the rows.

    Returns:
        One row per kind and pair of heads, by kind, layer, head, later_layer, later_head:

        {columns}

    Raises:
        KVLensError: an unknown kind; heads whose queries, keys or values are not linear in the residual stream.
    """
    counts = torch.tensor(heads_per_layer(model))
    with_heads = counts.nonzero()[:, 0]
    weights = [matrices for matrices in head_matrices(model) if matrices is not None]
    if len(weights) < len(with_heads):
        raise KVLensError("composition: in this model queries, keys or values of heads are not linear in the residual stream")
    in_order = with_heads[:, None] < with_heads  # [layer, later_layer]
    counts = counts[with_heads]
    exists = torch.arange(int(counts.max())) < counts[:, None] if len(counts) else in_order
    pairs = in_order[:, None, :, None] & exists[:, :, None, None] & exists
    layer, head, later_layer, later_head = pairs.nonzero().repeat(len(kinds), 1).T
    n_pairs = len(layer) // len(kinds)
    return COLUMNS.frame(
        {
            "kind": [kind for kind in kinds for _ in range(n_pairs)],
            "layer": with_heads[layer],
            "head": head,
            "later_layer": with_heads[later_layer],
            "later_head": later_head,
            "score": torch.cat([composition_scores(weights, kind).cpu()[pairs] for kind in kinds]),
        }
    )
