"""Which head reads what an earlier head wrote: Q-, K- and V-composition of every pair, from the weights alone.

Head 1 writes into the residual stream through W_OV = W_V W_O; a later head 2 reads it through W_Q W_K^T with its queries,
through W_K W_Q^T with its keys, or through its own W_OV with its values. The score is the norm of the product over the product
of norms; for the definition, gains of norms and grouped queries see :mod:`kvlens.analyses.heads.weights`.

To interpret a score, compare it with 1/sqrt(d_model), the expected score of unrelated heads, and with the scores of the same
model's other pairs. The weights only allow composition; whether a text uses it is shown by an ablation.

Source: Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; TransformerLens ``all_composition_scores``.
"""

from collections.abc import Sequence
from typing import Literal

import pandas as pd
import torch

from kvlens import KVLensError, KVModel
from kvlens.checks import checked
from kvlens.model import head_matrices, heads_per_layer

from ..declaration import Columns, Option, analysis
from ..front_ends import on_its_front_ends
from .weights import COMPOSITION_KINDS, composition_scores

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
