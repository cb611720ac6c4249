"""What each demonstration contributes to the step of every head, at one query: one forward pass, a layer's heads at once."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import checked
from kvlens.dual.queries import check_demonstrations, kernel_between_keys, kernel_with_bias, query_weights
from kvlens.dual.reading import LayerReading, TextTokens, check_index, read_layers
from kvlens.kv_bias.storage import padded
from kvlens.model import HookedKVTransformer
from kvlens.ops import dual as ops

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
    model: HookedKVTransformer, tokens: TextTokens, query_pos: int = -1, n_demonstrations: int | None = None
) -> DemonstrationFigures:
    """The measures of every layer, head and demonstration [layer, head, demo] at one query, in float64.

    Raises:
        KVLensError: as :func:`kvlens.dual.read_layers`; a query that does not exist or has no demonstrations before it.
    """
    query = check_index("query_pos", query_pos, len(tokens))
    n = query if n_demonstrations is None else n_demonstrations
    check_demonstrations(query + 1, n_demonstrations)
    layers: list[DemonstrationFigures] = []
    read_layers(model, tokens[: query + 1], lambda _, reading: layers.append(_figures(reading, n)))
    return DemonstrationFigures(*(padded(figure) for figure in zip(*layers, strict=True)))


def _figures(reading: LayerReading, n: int) -> DemonstrationFigures:
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
