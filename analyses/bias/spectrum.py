"""The size of a converted prompt's bias and its number of directions: norms and singular values of b_KV, head by head.

    b_KV = sum_r sigma_r u_r w_r^T        u_r in feature space (compared with queries), w_r in value space

A sum over M tokens has rank at most min(M, d_phi, d_head). The effective rank is the number of directions that carry weight,
exp(-sum_r p_r log p_r) with p_r = sigma_r / sum sigma: n for n equal singular values, 1 for a single one.

A softmax model's bias is stored as numbers and a log-scale for each head; sizes here are those of exp(log_scale) times the
numbers, so that they can be compared across heads, prompts and conversion methods. Values that would overflow float64 become
its largest number.
"""

import math

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.checks import checked

from ..declaration import Columns, analysis
from ..sequences import PromptTokens, converted
from .parts import HEAD, in_layers

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    index=("int64", "from 0, largest first; min(d_phi, d_head) of them"),
    singular_value=("float64", "of b_KV, its log_scale included"),
    energy_share=("float64", "its square over the sum of the head's squares; 0 for a b_KV of zeros"),
)


def singular_values(bias: KVBias) -> list[Float[Tensor, "_ _"]]:
    """Singular values of b_KV, including its log_scale, in float64, largest first; layer by layer."""
    if bias.fingerprint.layers_differ:
        return [singular_values(bias.of_layer(layer))[0] for layer in range(bias.n_layers)]
    stored = torch.linalg.svdvals(bias.per_query_head().b_KV.detach().double())
    scaled = _from_logs(stored.log() + _log_scales(bias)[:, :, None])
    return in_layers(bias, scaled, torch.linalg.svdvals(bias.recurrent.b_KV.detach().double()))


def sizes(bias: KVBias, name: str) -> list[Float[Tensor, " _"]]:
    """Frobenius norms of each head's ``b_KV`` or ``b_D``, including its log_scale, in float64, layer by layer.

    A recurrent layer has no normalizer, and its b_D counts as 0.
    """
    if bias.fingerprint.layers_differ:
        return [sizes(bias.of_layer(layer), name)[0] for layer in range(bias.n_layers)]
    stored = getattr(bias.per_query_head(), name).detach().double()
    scaled = _from_logs(stored.flatten(2).norm(dim=-1).log() + _log_scales(bias))
    states = bias.recurrent.b_KV.detach().double().flatten(2).norm(dim=-1)
    return in_layers(bias, scaled, states if name == "b_KV" else torch.zeros_like(states))


def _log_scales(bias: KVBias) -> Float[Tensor, "layer head"]:
    """One per query head of the attention layers; 0 for biases without a scale."""
    if bias.log_scale is None:
        return torch.zeros(len(bias.b_KV), bias.n_heads, dtype=torch.float64, device=bias.b_KV.device)
    stored = bias.log_scale.detach().double()
    return stored.repeat_interleave(bias.n_heads // stored.shape[1], dim=1)


def _from_logs(logs: Float[Tensor, "*lead"]) -> Float[Tensor, "*lead"]:
    return logs.exp().clamp(max=math.nextafter(math.inf, 0.0))


def effective_rank(values: Float[Tensor, "*lead index"]) -> Float[Tensor, "*lead"]:
    """exp of the entropy of the normalized singular values; 0 if all of them are 0.

    Source: Roy & Vetterli 2007, The effective rank: a measure of effective dimensionality, eq. 4.
    """
    largest = values.amax(dim=-1, keepdim=True)
    parts = values / largest.where(largest > 0, 1.0)
    p = parts / parts.sum(dim=-1, keepdim=True).where(largest > 0, 1.0)
    rank = -torch.special.xlogy(p, p).sum(dim=-1)
    return torch.where(largest.squeeze(-1) > 0, rank.exp(), 0.0)


@analysis(COLUMNS, "the singular values of each head's b_KV")
@checked
@torch.no_grad()
def bias_singular_values(model: KVModel, prompt: KVBias | PromptTokens) -> pd.DataFrame:
    """The singular values of every head's b_KV.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one, which are converted here; or a bias.

    Returns:
        One row per singular value, by layer, head, index:

        {columns}

    Raises:
        KVLensError: a batch of biases, or invalid tokens.
    """
    bias = converted(model, "bias_singular_values", prompt)
    tables = [_of_layer(layer, values) for layer, values in enumerate(singular_values(bias))]
    return pd.concat(tables, ignore_index=True)


def _of_layer(layer: int, values: Float[Tensor, "head index"]) -> pd.DataFrame:
    energy = (values / values[..., :1].where(values[..., :1] > 0, 1.0)).square()
    total = energy.sum(dim=-1, keepdim=True)
    heads, indices = torch.meshgrid(*(torch.arange(n) for n in values.shape), indexing="ij")
    shares = energy / total.where(total > 0, 1.0)
    columns = {
        "layer": torch.full_like(heads, layer),
        "head": heads,
        "index": indices,
        "singular_value": values,
        "energy_share": shares,
    }
    return COLUMNS.frame(columns)
