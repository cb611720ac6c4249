"""Ridge attention: the regularized least-squares fit W to the labels, instead of one gradient step (DUAL eq. 33).

    W_i = (sum_{j <= i} v_j phi(k_j)^T) (sum_{j <= i} phi(k_j) phi(k_j)^T + lambda I)^{-1}       z_i = W_i phi(q_i)

In kernel form, let L L^T = K + lambda I over all tokens of the text. The leading block of L is the Cholesky factor for the
tokens up to i, so a single factorization serves every query causally:

    z = tril((L^{-1} kappa(K, Q))^T) L^{-1} V

For linear attention this is the mesa-layer of Von Oswald et al. 2023. There is no normalizer to divide by. With finite
features, A = sum phi v^T and C = sum phi phi^T form a state: :func:`ridge_step` continues from it at O(d_phi^3) per token.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens.errors import KVLensError


class RidgeState(NamedTuple):
    """The state of ridge attention with finite features: sum phi v^T and sum phi phi^T over the text so far."""

    kv: Float[Tensor, "batch kv_head d_phi d_head"]
    kk: Float[Tensor, "batch kv_head d_phi d_phi"]


def ridge_attention(
    kernel: Float[Tensor, "batch kv_head key_pos key_pos"],
    at_queries: Float[Tensor, "batch head pos key_pos"],
    v: Float[Tensor, "batch kv_head key_pos d_head"],
    strength: float,
    mask: Bool[Tensor, "batch key_pos"] | None = None,
) -> Float[Tensor, "batch head pos d_head"]:
    """All queries at once, causally, at O(key_pos^3) per key-value head; solved in float64.

    Args:
        kernel: kappa(k_i, k_j).
        at_queries: kappa(q_i, k_j), for the last ``pos`` tokens as queries; entries above the diagonal are ignored.
        v: values.
        strength: lambda.
        mask: True at real tokens, None for no padding.

    Raises:
        KVLensError: kernel + lambda I is not positive definite in float64, or not finite.
    """
    n_keys, group = kernel.shape[-1], at_queries.shape[1] // kernel.shape[1]
    past = n_keys - at_queries.shape[2]
    K, Q, V = kernel.double(), at_queries.double(), v.double()
    if mask is not None:
        K = K.masked_fill(~(mask[:, None, :, None] & mask[:, None, None, :]), 0.0)
        Q, V = Q.masked_fill(~mask[:, None, None, :], 0.0), V.masked_fill(~mask[:, None, :, None], 0.0)
    eye = torch.eye(n_keys, dtype=torch.float64, device=K.device)
    factor = _cholesky(K + strength * eye, strength)
    values = torch.linalg.solve_triangular(factor, V, upper=False)
    grouped = Q.tril(past).unflatten(1, (-1, group)).transpose(-1, -2)  # [b, kv, g, key, query]
    queries = torch.linalg.solve_triangular(factor[:, :, None], grouped, upper=False).transpose(-1, -2).tril(past)
    return (queries @ values[:, :, None]).flatten(1, 2).to(v.dtype)


def ridge_step(
    phi_q: Float[Tensor, "batch head d_phi"],
    phi_k: Float[Tensor, "batch kv_head d_phi"],
    v: Float[Tensor, "batch kv_head d_head"],
    strength: float,
    state: RidgeState | None,
) -> tuple[Float[Tensor, "batch head d_head"], RidgeState]:
    """The output of one more token, and the state after it."""
    kv, kk = phi_k[..., :, None] * v[..., None, :], phi_k[..., :, None] * phi_k[..., None, :]
    state = RidgeState(kv, kk) if state is None else RidgeState(state.kv + kv, state.kk + kk)
    eye = torch.eye(phi_k.shape[-1], dtype=torch.float64, device=phi_k.device)
    factor = _cholesky(state.kk.double() + strength * eye, strength)
    queries = phi_q.double().unflatten(1, (phi_k.shape[1], -1))  # [b, kv, g, d_phi]
    weights = torch.cholesky_solve(queries.transpose(-1, -2), factor).transpose(-1, -2)
    return (weights @ state.kv.double()).flatten(1, 2).to(v.dtype), state


def ridge_state(
    phi_k: Float[Tensor, "batch kv_head pos d_phi"],
    v: Float[Tensor, "batch kv_head pos d_head"],
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> RidgeState:
    """The state after all tokens of a text."""
    if mask is not None:
        phi_k = phi_k.masked_fill(~mask[:, None, :, None], 0.0)
    return RidgeState(phi_k.transpose(-1, -2) @ v, phi_k.transpose(-1, -2) @ phi_k)


def ridge_steps(
    phi_q: Float[Tensor, "batch pos head d_phi"],
    phi_k: Float[Tensor, "batch pos kv_head d_phi"],
    v: Float[Tensor, "batch pos kv_head d_head"],
    strength: float,
    state: RidgeState,
    mask: Bool[Tensor, "batch pos"] | None = None,
) -> tuple[Float[Tensor, "batch pos head d_head"], RidgeState]:
    """:func:`ridge_step` for each token in turn; padded tokens add nothing."""
    if mask is not None:
        phi_k = phi_k.masked_fill(~mask[:, :, None, None], 0.0)
    rows = []
    for i in range(phi_q.shape[1]):
        z, state = ridge_step(phi_q[:, i], phi_k[:, i], v[:, i], strength, state)
        rows.append(z)
    return torch.stack(rows, dim=1), state


def _cholesky(matrix: Tensor, strength: float) -> Tensor:
    factor, info = torch.linalg.cholesky_ex(matrix)
    if bool((info != 0).any()) or not bool(factor.isfinite().all()):
        raise KVLensError(
            f"ridge attention: kernel + {strength} I cannot be solved in float64 (not positive definite, or not finite): "
            "the keys are too large for their kernel, or lambda too small in comparison; raise lambda, or scale the keys down"
        )
    return factor
