"""A converted prompt, head by head: the size of its bias, its number of directions, and what the text reads from it.

    b_KV = sum_r sigma_r u_r w_r^T        u_r in feature space (compared with queries), w_r in value space
    z = z_bias + z_context        (both already divided by the normalizer, which includes the bias and the text)

*Size and directions.* A sum over M tokens has rank at most min(M, d_phi, d_head). The effective rank is the number of
directions that carry weight, exp(-sum_r p_r log p_r) with p_r = sigma_r / sum sigma: n for n equal singular values, 1 for a
single one. A softmax model's bias is stored as numbers and a log-scale for each head; sizes here are those of exp(log_scale)
times the numbers, so that they can be compared across heads, prompts and conversion methods. Values that would overflow float64
become its largest number.

*The bias's share of a head's output.* By size (``bias_share``), ||z_bias|| / (||z_bias|| + ||z_context||) is in [0, 1] and does
not add up. By projection (``output_share``), z_bias . z / ||z||^2 may be outside [0, 1] if the parts oppose each other, but it
is linear: the shares of all parts of z sum to 1, and those of all prompt positions to that of the whole bias.

*Direct logit attribution*: what z_bias adds to a logit through W_O, the final norm (frozen at its actual scale) and W_U,
bypassing all later layers. In a recurrent layer a norm and a gate stand between z and W_O: they are frozen too.

*Removal* (:func:`bias_by_head`, :func:`bias_by_layer`): size and share are descriptive, and only an ablation shows whether the
model uses a bias. It is replaced by that of the *baseline*, the prompt's BOS alone (without a BOS, the empty prompt), because
BOS is always present and is not part of the prompt's content. The columns ``zero_kl`` and ``zero_loss_change`` set b_KV and b_D
to 0 instead, which also removes BOS.

The other views of the same bias are separate analyses:

- :func:`kvlens.analyses.bias.positions.bias_positions`: the contribution of each prompt position to ``output_share`` and
  ``logit``;
- :func:`kvlens.analyses.bias.effects.bias_effects`: the effect of ablating the bias or the shift state, through every path.
"""

import math
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.checks import checked
from kvlens.kv_bias import BiasPart, Features
from kvlens.model import HeadsRead, joined_heads, read_stream, visit_heads

from ..attribution.answers import Answer, Rival
from ..declaration import Columns, analysis
from ..logit_attribution import LogitTarget, check_heads_write_directly, logit_targets
from ..predictions import KL, LOSS_CHANGE, OUTPUT_SHARE
from ..sequences import PromptTokens, TextTokens, bias_and_text, converted, prompt_text_bias
from .effects import both_ablations
from .exchange import HEAD, heads_of

COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    b_kv_norm=("float64", "Frobenius norm of b_KV, its log_scale included"),
    b_kv_spectral_norm=("float64", "its largest singular value"),
    b_kv_effective_rank=("float64", "exp of the entropy of its normalized singular values; 0 for a b_KV of zeros"),
    b_d_norm=("float64", "norm of b_D, likewise"),
    bias_share=("float64", "mean over the text's positions of ||z_bias|| / (||z_bias|| + ||z_context||), 0 for 0 / 0"),
    output_share=("float64", f"{OUTPUT_SHARE}; the part is z_bias, all positions of the text together"),
    logit=(
        "float64",
        "direct logit attribution of z_bias: what it adds to the answer's logit, less that of ``rival`` or else the "
        "vocabulary's mean; NaN in a text of one token without ``answer``",
    ),
)

VALUES = Columns(
    layer=("int64", "from 0"),
    head=("int64", HEAD),
    index=("int64", "from 0, largest first; min(d_phi, d_head) of them"),
    singular_value=("float64", "of b_KV, its log_scale included"),
    energy_share=("float64", "its square over the sum of the head's squares; 0 for a b_KV of zeros"),
)


@analysis(
    COLUMNS,
    "each head's bias: size, effective rank, share of the output, direct logit attribution",
    cost="the prompt and the text once",
)
@checked
@torch.no_grad()
def bias_decomposition(
    model: KVModel,
    prompt: KVBias | PromptTokens,
    text: TextTokens,
    *,
    answer: Answer = None,
    rival: Rival = None,
) -> pd.DataFrame:
    """Describe the bias of each head, and the share of the head's output that comes from it.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one, which are converted here; or a bias.
        text: a string, or tokens [pos] without BOS.
        answer: words, a token id, or token ids, whose logit behind the text is attributed; of several tokens the sum, each
            behind those before it, which are then read as part of the text. None takes the logit of the next token, averaged
            over all positions but the last.
        rival: with ``answer``: likewise, what is subtracted; None subtracts the mean logit of the vocabulary.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: heads that do not write to the residual stream directly, or invalid tokens.
    """
    check_heads_write_directly(model, "bias_decomposition")
    bias, text = bias_and_text(model, "bias_decomposition", prompt, text)
    first, *others = [_read(model, bias, target) for target in logit_targets(model, text, answer, rival)]
    spectra = singular_values(bias)
    norms, b_d_norms = torch.cat(sizes(bias, "b_kv")), torch.cat(sizes(bias, "b_d"))
    layer, head = torch.tensor(heads_of(bias)).T
    return COLUMNS.frame(
        {
            "layer": layer,
            "head": head,
            "b_kv_norm": norms,
            "b_kv_spectral_norm": torch.cat([values[:, 0] for values in spectra]),
            "b_kv_effective_rank": torch.cat([effective_rank(values) for values in spectra]),
            "b_d_norm": b_d_norms,
            **first,
            "logit": first["logit"] + sum(other["logit"] for other in others),
        }
    )


def _read(model: KVModel, bias: KVBias, target: LogitTarget) -> dict[str, Float[Tensor, " head"]]:
    """What the heads of all layers read from their bias."""
    with model.kv_bias(bias):
        stream = read_stream(model, target.text, len(target.text))
    probes = target.probes(model, stream.scale)
    tables = [_of_layer(*of_layer, target.weight) for of_layer in zip(stream.layers, probes, strict=True)]
    return {name: torch.cat([table[name] for table in tables]) for name in tables[0]}


def _of_layer(read: HeadsRead, probes: Float[Tensor, "pos head d_head"], weight: float) -> dict[str, Float[Tensor, " head"]]:
    """What the heads of a layer read from their bias; ``weight`` is the target's."""
    assert read.z_bias is not None  # a bias is attached
    of_bias, of_context = read.z_bias.double(), read.z_context.double()
    written = of_bias if read.factor is None else of_bias * read.factor
    return {
        "bias_share": share_by_size(of_bias.norm(dim=-1), of_context.norm(dim=-1)).mean(dim=0),
        "output_share": (of_bias * share_probes(of_bias + of_context, pooled=True)).sum(dim=(0, 2)),
        "logit": (written * probes.to(written)).sum(dim=(0, 2)) * weight,
    }


def bias_outputs(
    model: KVModel, bias: KVBias, text: Int[Tensor, " pos"]
) -> tuple[list[Float[Tensor, "pos _ _"]], list[Float[Tensor, "pos _ _"]]]:
    """What every head reads of the bias, and of ``text``, whose sum is its output, layer by layer, from one pass.

    In float64, on the device of the text.
    """
    of_bias, of_context = list[Tensor](), list[Tensor]()

    def keep(layer: int, read: HeadsRead) -> None:
        assert read.z_bias is not None  # a bias is attached
        of_bias.append(read.z_bias[0].double().to(text.device))
        of_context.append(read.z_context[0].double().to(text.device))

    with model.kv_bias(bias):
        visit_heads(model, text[None], keep, ("z_context", "z_bias"))
    return of_bias, of_context


def share_by_size(
    of_bias: Float[Tensor, "*lead pos head"], of_context: Float[Tensor, "*lead pos head"]
) -> Float[Tensor, "*lead pos head"]:
    """||z_bias|| / (||z_bias|| + ||z_context||) from the two norms; 0 for 0 / 0."""
    total = of_bias + of_context
    return of_bias / total.where(total > 0, 1.0)


def share_probes(z: Float[Tensor, "*lead pos head d_head"], pooled: bool) -> Float[Tensor, "*lead pos head d_head"]:
    """The vectors whose product with a summand of z is its share by projection: z / ||z||^2.

    Args:
        z: the whole outputs.
        pooled: divide by the sum of ||z||^2 over all positions, so that the shares summed over positions are those of the
            whole text; otherwise divide each position by its own. Zeros where the output is 0.
    """
    energy = z.square().sum(dim=-1, keepdim=True)
    energy = energy.sum(dim=-3, keepdim=True) if pooled else energy
    return z / energy.where(energy > 0, 1.0)


@analysis(
    VALUES, "the singular values of each head's b_KV", cost="the prompt once, and a singular value decomposition for each head"
)
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
    tables = [_values_of_layer(layer, values) for layer, values in enumerate(singular_values(bias))]
    return pd.concat(tables, ignore_index=True)


def _values_of_layer(layer: int, values: Float[Tensor, "head index"]) -> pd.DataFrame:
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
    return VALUES.frame(columns)


def singular_values(bias: KVBias) -> list[Float[Tensor, "_ _"]]:
    """Singular values of b_KV, including its log_scale, in float64, largest first; layer by layer."""
    return _by_layer(bias, lambda part: torch.linalg.svdvals(part.b_kv[0].detach().double()))


def sizes(bias: KVBias, name: str) -> list[Float[Tensor, " _"]]:
    """Frobenius norms of each head's "b_kv" or "b_d", including its log_scale, in float64, layer by layer.

    A recurrent layer has no normalizer, and its b_d counts as 0.
    """

    def size(part: BiasPart) -> Tensor:
        x = getattr(part, name, None)
        return (torch.zeros_like(part.b_kv[..., 0]) if x is None else x)[0].detach().double().flatten(1).norm(dim=-1)

    return _by_layer(bias, size)


def _by_layer(bias: KVBias, figure: Callable[[BiasPart], Float[Tensor, " head *rest"]]) -> list[Float[Tensor, " head *rest"]]:
    """A figure of every head, on the scale of its part; for a layer without heads that of no head of another.

    Where a layer has two parts, rows of numbers of different length are padded with zeros.
    """
    found = []
    for layer in bias.per_query_head().layers:
        parts = [_scaled(part, figure(part)) for part in layer.parts]
        found.append(joined_heads(parts, dim=-parts[0].dim()) if parts else None)
    none = next(x for x in found if x is not None)[:0]
    return [none if x is None else x for x in found]


def _scaled(part: BiasPart, stored: Float[Tensor, " head *rest"]) -> Float[Tensor, " head *rest"]:
    if not isinstance(part, Features):
        return stored
    scale = part.log_scale[0].detach().double().repeat_interleave(part.n_heads // part.n_kv_heads)
    return _from_logs(stored.log() + scale.reshape(-1, *[1] * (stored.dim() - 1)))


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


MEASURES = dict(
    b_kv_norm=("float64", "Frobenius norm of b_KV, its log_scale included"),
    b_d_norm=("float64", "norm of b_D, likewise"),
    bias_share=("float64", "mean over the text's positions of ||z_bias|| / (||z_bias|| + ||z_context||), 0 for 0 / 0"),
    ablation_kl=("float64", f"{KL}; with the baseline's b_KV, b_D and shift state, mean over the text's positions"),
    loss_change=("float64", f"{LOSS_CHANGE}; likewise, mean over the text's next tokens; NaN for one token"),
    zero_kl=("float64", f"{KL}; with b_KV and b_D at 0, BOS's among them, mean over the text's positions"),
    zero_loss_change=("float64", f"{LOSS_CHANGE}; with b_KV and b_D at 0, mean over the text's next tokens; NaN for one token"),
)
BY_HEAD = Columns(layer=("int64", "from 0"), head=("int64", HEAD), **MEASURES)
BY_LAYER = Columns(layer=("int64", "from 0"), **MEASURES)


@analysis(
    BY_HEAD,
    "which heads carry a converted prompt: size of the bias, its share of the output, the effect of removing it",
    cost="the prompt twice; the text three times, and twice for each head from its layer on",
)
@checked
@torch.no_grad()
def bias_by_head(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
) -> pd.DataFrame:
    """Describe the bias of each head, and ablate it.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS if the model uses one.
        text: a string, or tokens [pos] without BOS.
        bias: the converted prompt, if it has been converted already; None converts it here. For a prompt that continues
            another one, attach that one first: it then belongs to the baseline.

    Returns:
        One row per head, by layer, then head:

        {columns}

    Raises:
        KVLensError: tokens that are empty, misshapen or outside the vocabulary.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    units = [[pair] for pair in heads_of(bias)]
    described = _describe(model, prompt, text, bias, units)
    return BY_HEAD.frame({"head": [head for ((_, head),) in units], **described})


@BY_LAYER.document
@checked
@torch.no_grad()
def bias_by_layer(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    bias: KVBias | None = None,
) -> pd.DataFrame:
    """Describe the bias of each layer, with the outputs of its heads concatenated, and ablate all of its heads at once.

    Effects do not add up, since information removed from one head may still be carried by another.

    Args:
        model, prompt, text, bias: as in :func:`bias_by_head`.

    Returns:
        One row per layer with heads:

        {columns}

    Raises:
        KVLensError: as :func:`bias_by_head`.
    """
    prompt, text, bias = prompt_text_bias(model, prompt, text, bias)
    units = [list(of_layer) for _, of_layer in groupby(heads_of(bias), key=itemgetter(0))]
    return BY_LAYER.frame(_describe(model, prompt, text, bias, units))


def _describe(
    model: KVModel,
    prompt: Int[Tensor, " prompt_pos"],
    text: Int[Tensor, " pos"],
    bias: KVBias,
    units: list[list[tuple[int, int]]],
) -> dict[str, object]:
    """The columns of both tables, for single heads, or for all heads of a layer, side by side."""
    outputs = bias_outputs(model, bias, text)
    of_bias, of_context = (_norms([z.norm(dim=-1).T for z in part], units) for part in outputs)
    return {
        "layer": [unit[0][0] for unit in units],
        "b_kv_norm": _norms(sizes(bias, "b_kv"), units),
        "b_d_norm": _norms(sizes(bias, "b_d"), units),
        "bias_share": share_by_size(of_bias, of_context).mean(dim=-1),
        **both_ablations(model, prompt, text, bias, units),
    }


def _norms(of_heads: list[Float[Tensor, " _ *pos"]], units: list[list[tuple[int, int]]]) -> Float[Tensor, " unit *pos"]:
    """The norms of units of heads side by side, from those of single heads, layer by layer."""
    return torch.stack([torch.stack([of_heads[layer][head] for layer, head in unit]).norm(dim=0) for unit in units])
