"""How large a converted prompt's bias is, and along how many directions: norms and singular values of b_KV, head by head.

    b_KV = sum_r sigma_r u_r w_r^T        u_r in feature space (what a query must look like), w_r in value space

A sum over M tokens has rank at most min(M, d_phi, d_head). How many of its directions carry weight is told by the effective
rank, exp(-sum_r p_r log p_r) with p_r = sigma_r / sum sigma: n for n equal singular values, 1 for a single one.
"""

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from analyses.declaration import Analysis, Columns
from analyses.inputs import PROMPT
from analyses.sequences import one_bias
from kvlens import HookedKVTransformer, KVBias, convert_prompt
from kvlens.signature import checked

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    index=("int64", "from 0, largest first; min(d_phi, d_head) of them"),
    singular_value=("float64", "of b_KV"),
    energy_share=("float64", "its square over the sum of the head's squares; 0 for a b_KV of zeros"),
)


def singular_values(bias: KVBias) -> Float[Tensor, "layer head index"]:
    """Of b_KV, in float64, largest first."""
    return torch.linalg.svdvals(bias.per_query_head().b_KV.detach().double())


def effective_rank(values: Float[Tensor, "*lead index"]) -> Float[Tensor, "*lead"]:
    """exp of the entropy of the normalised singular values; 0 where all of them are 0.

    Source: Roy & Vetterli 2007, The effective rank: a measure of effective dimensionality, eq. 4.
    """
    total = values.sum(dim=-1, keepdim=True)
    p = values / total.where(total > 0, 1.0)
    rank = -torch.special.xlogy(p, p).sum(dim=-1)
    return torch.where(total.squeeze(-1) > 0, rank.exp(), 0.0)


@COLUMNS.document
@checked
@torch.no_grad()
def bias_singular_values(bias: KVBias) -> pd.DataFrame:
    """The singular values of every head's b_KV.

    Args:
        bias: of one prompt.

    Returns:
        One row per singular value, by layer, head, index:

        {columns}

    Raises:
        KVLensError: a batch of biases.
    """
    one_bias("bias_singular_values", bias)
    values = singular_values(bias)
    energy = values.square()
    total = energy.sum(dim=-1, keepdim=True)
    layers, heads, indices = torch.meshgrid(*(torch.arange(n) for n in values.shape), indexing="ij")
    shares = energy / total.where(total > 0, 1.0)
    columns = {"layer": layers, "head": heads, "index": indices, "singular_value": values, "energy_share": shares}
    return COLUMNS.frame(columns)


def _of_prompt(model: HookedKVTransformer, prompt_tokens: Tensor) -> pd.DataFrame:
    """:func:`bias_singular_values` of a prompt that is still to be converted."""
    return bias_singular_values(convert_prompt(model, prompt_tokens))


BIAS_SINGULAR_VALUES = Analysis(
    name="bias_singular_values",
    summary="the singular values of each head's b_KV",
    function=_of_prompt,
    columns=COLUMNS,
    inputs={"prompt_tokens": PROMPT},
)
