"""Measures of the dual models of every head: at every query of a text, and of each demonstration at one query.

Each layer is reduced to its measures during one forward pass, without a loop over tokens. Query i's demonstrations are all
tokens before it, or the first N of the text; a KV bias is part of W_0. :class:`QueryFigures` and :class:`DemonstrationFigures`
describe each measure.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import Seed, checked
from kvlens.dual.head_inputs import LayerReading, TokenRow, check_index, read_layers
from kvlens.errors import KVLensError
from kvlens.kv_bias.storage import padded
from kvlens.memory import NUMBERS_AT_ONCE
from kvlens.model import KVModel
from kvlens.ops import dual as ops

PerQuery = Float[Tensor, "*layer head query"]
N_MATRICES = 16
"""The largest number of square matrices per head that are held at once."""


class QueryFigures(NamedTuple):
    """Measures for queries 1 .. pos - 1, or N .. pos - 1.

    Attributes:
        log_loss_drop: log(L(W_0) - L(W_1)) at eta = 1.
        equivalence_error: |f(q) after one step - the head's output| / |the head's output|.
        step_share: share of the output due to the step: the projection of (W_1 - W_0) phi(q) on it; the rest is due to W_0.
        demonstration_weight: sum of kappa(k_j, q) / D over the demonstrations: their share of attention.
        cosine_before, cosine_after: mean over the demonstrations of the cosine of (W phi(k_j), v_j) with W_0 and W_1; NaN
            if cosines were not requested.
        log_loss_drop_shuffled and so on: the same with the values in another order (:func:`another_order`).
    """

    log_loss_drop: PerQuery
    log_loss_drop_shuffled: PerQuery
    equivalence_error: PerQuery
    step_share: PerQuery
    step_share_shuffled: PerQuery
    demonstration_weight: PerQuery
    cosine_before: PerQuery
    cosine_before_shuffled: PerQuery
    cosine_after: PerQuery
    cosine_after_shuffled: PerQuery


@checked
def dual_figures(
    model: KVModel,
    tokens: TokenRow,
    n_demonstrations: int | None = None,
    *,
    cosines: bool = True,
    seed: Seed = 0,
) -> QueryFigures:
    """The measures of every layer, head and query [layer, head, query], in float64; 0 for heads that a layer lacks.

    Args:
        model: a model whose attention has a dual model.
        tokens: [pos].
        n_demonstrations: N, the same for all queries; None for all tokens before each query.
        cosines: whether to compute the cosines, which take most of the time.
        seed: of the order of the shuffled values.

    Raises:
        KVLensError: as :func:`kvlens.dual.read_layers`; a text without a query after a demonstration.
    """
    check_demonstrations(len(tokens), n_demonstrations)
    layers: list[QueryFigures] = []
    order = another_order(len(tokens), n_demonstrations, seed)
    read_layers(model, tokens, lambda _, reading: layers.append(_of_layer(reading, n_demonstrations, cosines, order)))
    return QueryFigures(*(padded(figure) for figure in zip(*layers, strict=True)))


def another_order(pos: int, n_demonstrations: int | None, seed: int) -> Int[Tensor, " pos"]:
    """The token whose value each token has in the null: any other order of the text, or of its first N tokens.

    Keys, normalizers and a KV bias stay, so that labels have nothing to do with their inputs. The first token, on which many
    heads rest their attention, keeps its value.
    """
    n, order = n_demonstrations or pos, torch.arange(pos)
    order[1:n] = 1 + torch.randperm(n - 1, generator=torch.Generator().manual_seed(seed))
    return order


def _of_layer(reading: LayerReading, n: int | None, cosines: bool, order: Int[Tensor, " pos"]) -> QueryFigures:
    """The measures of one layer [head, query], for as many heads at a time as :data:`~kvlens.memory.NUMBERS_AT_ONCE` allows."""
    n_heads, pos = reading.log_normalizer.shape
    together = max(1, 2 * NUMBERS_AT_ONCE // (N_MATRICES * pos * pos))
    parts = [
        _figures(_heads(reading, slice(first, first + together)), n, cosines, order) for first in range(0, n_heads, together)
    ]
    return QueryFigures(*(torch.cat(figure) for figure in zip(*parts, strict=True)))


def check_demonstrations(pos: int, n_demonstrations: int | None) -> None:
    """Raise KVLensError unless some query of the text has demonstrations before it."""
    n = 1 if n_demonstrations is None else n_demonstrations
    if n < 1:
        raise KVLensError(f"dual model: n_demonstrations must be at least 1 (or None), got {n_demonstrations!r}")
    if pos <= n:
        raise KVLensError(f"dual model: none of the {pos} tokens comes after {n} demonstrations; give a longer text")


def _heads(reading: LayerReading, part: slice) -> LayerReading:
    return LayerReading._make(x[part] if isinstance(x, Tensor) else x for x in reading)


def _figures(reading: LayerReading, n: int | None, cosines: bool, order: Int[Tensor, " pos"]) -> QueryFigures:
    first, kernels, from_bias = 1 if n is None else n, _kernel_and_pattern(reading), _read_bias(reading)
    pattern, values = kernels[1], reading.values[:, order]
    figures = _of_values(reading, kernels, n, cosines)
    null = _of_values(reading._replace(values=values, z=pattern @ values + from_bias), kernels, n, cosines)
    weights = pattern.tril(-1)[:, 1:].sum(dim=-1) if n is None else pattern[:, n:, :n].sum(dim=-1)
    z, predicted = (x[:, first:] for x in (reading.z, pattern @ reading.values + from_bias))
    return QueryFigures(
        equivalence_error=(predicted - z).norm(dim=-1) / z.norm(dim=-1),
        demonstration_weight=weights,
        **figures,
        **{f"{name}_shuffled": figure for name, figure in null.items()},
    )


def _of_values(
    reading: LayerReading, kernels: tuple[ops.LogKernel, Tensor], n: int | None, cosines: bool
) -> dict[str, Float[Tensor, "head query"]]:
    """The measures that depend on which value belongs to which key."""
    between, pattern = kernels
    v, z = reading.values, reading.z[:, 1 if n is None else n :]
    start = _bias_at_tokens(reading) if reading.bias_features.shape[1] else None
    sign = reading.normalizer_sign[:, -z.shape[1] :]
    before = after = torch.full_like(sign, float("nan"))
    if cosines:
        before, after = (sign * c for c in ops.mean_cosines(between, v, n, start))
    return {
        "log_loss_drop": ops.log_loss_drops(between, v, reading.log_normalizer, n, reading.log_decay),
        "step_share": (ops.step_outputs(pattern, v, n) * z).sum(dim=-1) / z.square().sum(dim=-1),
        "cosine_before": before,
        "cosine_after": after,
    }


def _kernel_and_pattern(reading: LayerReading) -> tuple[ops.LogKernel, Float[Tensor, "head query token"]]:
    """kappa between keys, times gamma^{-s-t}, and kappa(k_t, q_i) gamma^{i-t} / D_i, causal."""
    q, k = reading.queries, reading.keys
    if reading.scale is None:
        between, at_query = ops.feature_kernel(k, k), ops.feature_kernel(q, k)
    else:
        between, at_query = ops.softmax_kernel(k, k, reading.scale), ops.softmax_kernel(q, k, reading.scale)
    log_factor = -reading.log_normalizer[..., None]
    if reading.log_decay is not None:
        positions = torch.arange(k.shape[1], device=k.device, dtype=k.dtype)
        log_gamma = reading.log_decay[:, None, None]
        between = between._replace(log_size=between.log_size - log_gamma * (positions[:, None] + positions))
        log_factor = log_factor + log_gamma * (positions[:, None] - positions)
    above = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)
    causal = at_query._replace(log_size=at_query.log_size.masked_fill(above, float("-inf")))
    return between, reading.normalizer_sign[..., None] * ops.kernel_values(causal, log_factor)


def query_weights(reading: LayerReading) -> Float[Tensor, "head token"]:
    """kappa(k_t, q) gamma^{i-t} / D for the last token as the query."""
    q, k = reading.queries[:, -1:], reading.keys
    at_query = ops.feature_kernel(q, k) if reading.scale is None else ops.softmax_kernel(q, k, reading.scale)
    log_factor = _log_seen(reading) - reading.log_normalizer[:, -1:]
    return reading.normalizer_sign[:, -1:] * ops.kernel_values(at_query, log_factor[:, None]).squeeze(1)


def kernel_between_keys(reading: LayerReading) -> ops.LogKernel:
    """kappa(k_s, k_t) gamma^{i-s} gamma^{i-t}, as the last token sees it."""
    k, seen = reading.keys, _log_seen(reading)
    between = ops.feature_kernel(k, k) if reading.scale is None else ops.softmax_kernel(k, k, reading.scale)
    return between._replace(log_size=between.log_size + seen[:, :, None] + seen[:, None, :])


def _log_seen(reading: LayerReading) -> Float[Tensor, "head token"]:
    """log gamma^{i-t}, for the last token i."""
    n_heads, pos = reading.log_normalizer.shape
    steps = pos - 1 - torch.arange(pos, device=reading.keys.device, dtype=reading.keys.dtype)
    log_gamma = reading.keys.new_zeros(n_heads) if reading.log_decay is None else reading.log_decay
    return log_gamma[:, None] * steps


def kernel_with_bias(reading: LayerReading, x: Float[Tensor, "head pos d_query"]) -> ops.LogKernel:
    """kappa between queries or keys and the rows of a KV bias."""
    rows = reading.bias_features
    return ops.feature_kernel(x, rows) if reading.scale is None else ops.softmax_kernel(x, rows, reading.scale)


def _read_bias(reading: LayerReading) -> Float[Tensor, "head pos d_head"]:
    """gamma^{i+1} phi~(q_i)^T b_KV / D_i."""
    values, log_factor = reading.bias_values, -reading.log_normalizer
    if reading.log_decay is not None:
        steps = torch.arange(1, reading.keys.shape[1] + 1, device=values.device, dtype=values.dtype)
        log_factor = log_factor + reading.log_decay[:, None] * steps
    weights = ops.kernel_values(kernel_with_bias(reading, reading.queries), log_factor[..., None])
    return reading.normalizer_sign[..., None] * (weights @ values)


def _bias_at_tokens(reading: LayerReading) -> Float[Tensor, "head pos d_head"]:
    """What a KV bias adds to W_0 phi~(k_j), in the units of the kernel between keys: times gamma^{1-j}."""
    values, log_factor = reading.bias_values, torch.zeros_like(reading.log_normalizer)
    if reading.log_decay is not None:
        positions = torch.arange(reading.keys.shape[1], device=values.device, dtype=values.dtype)
        log_factor = reading.log_decay[:, None] * (1 - positions)
    return ops.kernel_values(kernel_with_bias(reading, reading.keys), log_factor[..., None]) @ values


PerDemonstration = Float[Tensor, "*layer head demo"]


class DemonstrationFigures(NamedTuple):
    """Measures of the demonstrations of one query.

    Attributes:
        weight: kappa(k_j, q) / D.
        output_share: projection of weight times v_j on the head's output, as a share of that output.
        log_step_norm: log of |v_j| sqrt(kappa(k_j, k_j)) / |D|, the size of v_j phi(k_j)^T / D.
        cosine_before, cosine_after: cosine of W phi(k_j) and v_j, with W_0 and with W_1.
    """

    weight: PerDemonstration
    output_share: PerDemonstration
    log_step_norm: PerDemonstration
    cosine_before: PerDemonstration
    cosine_after: PerDemonstration


@checked
def demonstration_figures(
    model: KVModel, tokens: TokenRow, query_pos: int = -1, n_demonstrations: int | None = None
) -> DemonstrationFigures:
    """The measures of every layer, head and demonstration [layer, head, demo] at one query, in float64.

    Raises:
        KVLensError: as :func:`kvlens.dual.read_layers`; a query without demonstrations before it.
    """
    query = check_index("query_pos", query_pos, len(tokens))
    n = query if n_demonstrations is None else n_demonstrations
    check_demonstrations(query + 1, n_demonstrations)
    layers: list[DemonstrationFigures] = []
    read_layers(model, tokens[: query + 1], lambda _, reading: layers.append(_figures_of_demonstrations(reading, n)))
    return DemonstrationFigures(*(padded(figure) for figure in zip(*layers, strict=True)))


def _figures_of_demonstrations(reading: LayerReading, n: int) -> DemonstrationFigures:
    """The measures for the last token as the query."""
    weight, between = query_weights(reading)[:, :n], kernel_between_keys(reading)
    v, z = reading.values, reading.z[:, -1]
    share = weight * (v[:, :n] @ z[..., None]).squeeze(-1) / z.square().sum(dim=-1, keepdim=True)
    diagonal = between.log_size.diagonal(dim1=-2, dim2=-1)[:, :n]
    log_normalizer, sign = reading.log_normalizer[:, -1:], reading.normalizer_sign[:, -1:]
    log_norm = v[:, :n].norm(dim=-1).log() + diagonal / 2 - log_normalizer
    between, values = _with_bias_rows(reading, between)  # they join H_T
    before, after = ops.predictions_at_demonstrations(between, values, n)
    cosines = [sign * ops.cosine(x, v[:, :n]) for x in (before, after)]
    return DemonstrationFigures(weight, share, log_norm, cosines[0], cosines[1])


def _with_bias_rows(reading: LayerReading, between: ops.LogKernel) -> tuple[ops.LogKernel, Tensor]:
    """The kernel and the values with a KV bias's rows after the text; only the columns of the text matter."""
    rows = kernel_with_bias(reading, reading.keys)
    log_size, sign = rows.log_size.transpose(-1, -2), None if rows.sign is None else rows.sign.transpose(-1, -2)
    if reading.log_decay is not None:
        pos = reading.keys.shape[1]
        steps = pos + (pos - 1 - torch.arange(pos, device=log_size.device, dtype=log_size.dtype))
        log_size = log_size + reading.log_decay[:, None, None] * steps
    joined = None if between.sign is None or sign is None else torch.cat([between.sign, sign], dim=1)
    kernel = ops.LogKernel(torch.cat([between.log_size, log_size], dim=1), joined)
    return kernel, torch.cat([reading.values, reading.bias_values], dim=1)
