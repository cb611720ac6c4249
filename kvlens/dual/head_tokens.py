"""The tokens of one head's dual model, made from a layer's reading: kernel, weights at the query, values, features."""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.dual.reading import LayerReading
from kvlens.errors import KVLensError
from kvlens.ops import dual as ops
from kvlens.ops.feature_maps import draw_projections

Kernel = Literal["exact", "random", "landmark"]
BiasRole = Literal["initial", "demonstrations"]


class HeadTokens(NamedTuple):
    """The tokens of a head's dual model at one query: demonstrations, then H_T, with virtual tokens of a bias first in either.

    Attributes:
        log_kernel: kappa between the tokens, as the query sees them (decay included).
        weights: kappa(k_t, q) / D, so that the head's output is their product with ``values``.
        values: v.
        features: phi~(k_t) as the query sees it, and phi~(q) as the last row; None if the kernel has no finite features.
        log_normalizer: log |D|.
        sign: sign of D.
    """

    log_kernel: ops.LogKernel
    weights: Float[Tensor, " token"]
    values: Float[Tensor, "token d_head"]
    features: Float[Tensor, "token_and_query d_phi"] | None
    log_normalizer: Float[Tensor, ""]
    sign: Float[Tensor, ""]


def one_head(reading: LayerReading, head: int, query: int) -> LayerReading:
    """The reading of a single head up to the query, with a leading axis of 1."""
    one = slice(head, head + 1)
    return reading._replace(
        queries=reading.queries[one, : query + 1],
        keys=reading.keys[one, : query + 1],
        values=reading.values[one, : query + 1],
        z=reading.z[one, : query + 1],
        log_normalizer=reading.log_normalizer[one, : query + 1],
        normalizer_sign=reading.normalizer_sign[one, : query + 1],
        log_decay=None if reading.log_decay is None else reading.log_decay[one],
        bias_features=reading.bias_features[one],
        bias_values=reading.bias_values[one],
    )


def demonstrations_first(n: int, query: int, n_rows: int, bias: BiasRole) -> list[int]:
    """Row indices of [bias; text] in the order of the dual model: demonstrations, then H_T."""
    rows, text = list(range(n_rows)), [n_rows + t for t in range(query + 1)]
    return [*rows, *text] if bias == "demonstrations" else [*text[:n], *rows, *text[n:]]


def _log_seen(reading: LayerReading, order: list[int]) -> Float[Tensor, " token"]:
    """log gamma^{i-t}, and log gamma^{i+1} for the rows of a bias."""
    n_rows, pos = reading.bias_features.shape[1], reading.keys.shape[1]
    steps = torch.cat([torch.full((n_rows,), pos), pos - 1 - torch.arange(pos)]).to(reading.keys)
    log_gamma = reading.keys.new_zeros(()) if reading.log_decay is None else reading.log_decay[0]
    return (steps * log_gamma)[order]


def exact_tokens(reading: LayerReading, order: list[int]) -> HeadTokens:
    """The exact tokens of a head: softmax by its kernel, linear attention by its features."""
    query, log_seen = reading.queries[0, -1:], _log_seen(reading, order)
    keys = torch.cat([reading.bias_features[0], reading.keys[0]])[order]
    values = torch.cat([reading.bias_values[0], reading.values[0]])[order]
    log_normalizer, sign = reading.log_normalizer[0, -1], reading.normalizer_sign[0, -1]
    if reading.scale is not None:
        kernel, at_query = ops.softmax_kernel(keys, keys, reading.scale), ops.softmax_kernel(query, keys, reading.scale)
        features = None
    else:
        kernel, at_query = ops.feature_kernel(keys, keys), ops.feature_kernel(query, keys)
        features = torch.cat([keys * log_seen.exp()[:, None], query])
    seen = ops.LogKernel(kernel.log_size + log_seen[:, None] + log_seen, kernel.sign)
    weights = sign * ops.kernel_values(at_query, log_seen - log_normalizer)[0]
    return HeadTokens(seen, weights, values, features, log_normalizer, sign)


def approximate_tokens(
    reading: LayerReading, order: list[int], kernel: Kernel, n_features: int | None, seed: int
) -> HeadTokens:
    """The same head with finite features instead of the softmax kernel, normalized by their own sum."""
    if reading.scale is None:
        raise KVLensError(
            f"dual model: kernel={kernel!r} approximates softmax; linear attention has its own features, which are exact"
        )
    if reading.bias_features.shape[1]:
        raise KVLensError(
            f"dual model: kernel={kernel!r} normalizes by the features' own sum over the text, which does not include an "
            "attached KV bias; detach it, or use kernel='exact'"
        )
    query, keys, log_seen = reading.queries[:, -1:], reading.keys[:, order], _log_seen(reading, order)
    if kernel == "random":
        m = 16 * keys.shape[-1] if n_features is None else n_features
        drawn = draw_projections(1, m, keys.shape[-1], "orthogonal", torch.Generator().manual_seed(seed)).to(keys)
        (phi_k, log_k), (phi_q, log_q) = (ops.random_log_features(x, drawn, reading.scale) for x in (keys, query))
    else:
        m = max(1, keys.shape[1] // 4) if n_features is None else n_features
        phi_k, phi_q, log_k, log_q, _ = ops.landmark_features(keys, query, reading.scale, m)
    log_k = log_k[0] + log_seen
    at_query = ops.feature_kernel(phi_q, phi_k, log_q, log_k[None])
    peak = at_query.log_size.max()
    total = ops.kernel_values(at_query, -peak).sum()
    log_normalizer, sign = total.abs().log() + peak, total.sign()
    weights = sign * ops.kernel_values(at_query, -log_normalizer)[0, 0]
    features = torch.cat([phi_k[0] * log_k.exp()[:, None], phi_q[0] * log_q.exp()[0, :, None]])
    between_keys = ops.feature_kernel(phi_k[0], phi_k[0], log_k, log_k)
    return HeadTokens(between_keys, weights, reading.values[0][order], features, log_normalizer, sign)
