"""The variants of attention that DUAL sec. 4 and app. D derive from representation learning, as changes to given attention.

| variant | what changes | equation |
|---|---|---|
| regularised | subtracts the token's own value, z_i - alpha v_i, or its own share, z_i - alpha p_ii v_i | 13; app. D.1 |
| augmented | keys and values each pass through an MLP | 14; app. D.2 |
| negative | the k tokens that a query (or a label) scores lowest are subtracted | 15, 34; remark in sec. 5 |
| ridge | the regularized least-squares W instead of one gradient step | 33 |

First the naive form of each, then the fast ones in the order of the table, then the rank of a pattern that is regularized.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError

# One head, in loops over queries and tokens, one line per equation: the reference for the fast forms.


def naive_regularized(
    pattern: Float[Tensor, "pos pos"],
    v: Float[Tensor, "pos d_head"],
    alpha: float,
    form: Literal["self_attention", "normalised", "one_step"],
) -> Float[Tensor, "pos d_head"]:
    """z_i - alpha v_i (app. D.1), the same over 1 - alpha, or W_0 scaled by 1 - alpha where H_T is the query (eq. 13)."""
    rows = []
    for i in range(len(v)):
        z = sum((pattern[i, j] * v[j] for j in range(i + 1)), torch.zeros_like(v[0]))
        if form == "one_step":
            rows.append(z - alpha * pattern[i, i] * v[i])
        else:
            rows.append((z - alpha * v[i]) / (1 - alpha if form == "normalised" else 1))
    return torch.stack(rows)


def naive_negative(
    pattern: Float[Tensor, "pos pos"],
    scores: Float[Tensor, "pos pos"],
    v: Float[Tensor, "pos d_head"],
    k: int | float,
    beta: float,
    per: Literal["query", "label"],
) -> Float[Tensor, "pos d_head"]:
    """p~_ij = p_ij - (beta / k_i) [j in N_i], or v~_j = v_j - (beta / k_j) sum_{n in N_j} v_n (DUAL eq. 15, 34 and sec. 5)."""
    negatives = []
    for i in range(len(v)):
        count = min(k, i + 1) if isinstance(k, int) else math.ceil(k * (i + 1))
        negatives.append(sorted(range(i + 1), key=lambda j: float(scores[i, j]))[:count])
    means = [sum((v[n] for n in chosen), torch.zeros_like(v[0])) / len(chosen) for chosen in negatives]
    rows = []
    for i in range(len(v)):
        if per == "query":
            z = sum((pattern[i, j] * v[j] for j in range(i + 1)), torch.zeros_like(v[0])) - beta * means[i]
        else:
            z = sum((pattern[i, j] * (v[j] - beta * means[j]) for j in range(i + 1)), torch.zeros_like(v[0]))
        rows.append(z)
    return torch.stack(rows)


def naive_ridge(
    kernel: Float[Tensor, "pos pos"],
    at_queries: Float[Tensor, "pos pos"],
    v: Float[Tensor, "pos d_head"],
    strength: float,
) -> Float[Tensor, "pos d_head"]:
    """z_i = sum_j v_j [(K_i + lambda I)^{-1} kappa(K, q_i)]_j over the tokens j <= i, solved for each query (eq. 33)."""
    rows = []
    for i in range(len(v)):
        n = i + 1
        weights = torch.linalg.solve(kernel[:n, :n] + strength * torch.eye(n, dtype=v.dtype), at_queries[i, :n])
        rows.append(weights @ v[:n])
    return torch.stack(rows)


def augment(
    x: Float[Tensor, "batch pos #head _"], weights: Sequence[Float[Tensor, "#head _ _"]], activation: Callable[[Tensor], Tensor]
) -> Float[Tensor, "batch pos #head _"]:
    """g(x) = W_n act(... act(W_1 x)), or act(W_1 x) for a single layer.

    Args:
        x: [batch, pos, head, d]: keys or values; of one head where all heads read the same, such as the input of the block.
        weights: for each layer [head, d_in, d_out], or a single matrix for all heads.
        activation: applied between layers, or after the layer if there is only one.
    """
    out = x
    for layer, weight in enumerate(weights):
        out = (out.transpose(1, 2) @ weight.to(x.dtype)).transpose(1, 2)
        if layer < len(weights) - 1 or len(weights) == 1:
            out = activation(out)
    return out


# Negative samples: the lowest-scored of the tokens that a query sees (DUAL eq. 15, 34; the remark in sec. 5).
#
#     per query:  z_i = sum_j (p_ij - (beta / k_i) [j in N_i]) v_j            = z_i - beta mean_{N_i} v
#     per label:  z_i = sum_j p_ij (v_j - beta mean_{N_j} v)
#
# The equations use one set per label, the remark in sec. 5 one per query; the results differ (by about half of the output on
# random heads). No gradient flows through the choice of the set, only through the values in it.


class Negatives(NamedTuple):
    """The set N_i of negatives of every query.

    Attributes:
        tokens: the tokens, lowest score first.
        share: 1 / k_i where the token belongs to N_i, 0 in the columns left over when the query sees fewer tokens.
    """

    tokens: Int[Tensor, "batch head pos most"]
    share: Float[Tensor, "batch head pos most"]


@torch.no_grad()
def lowest_scored(
    scores: Float[Tensor, "batch head pos key_pos"], visible: Bool[Tensor, "#batch #head pos key_pos"], k: int | float
) -> Negatives:
    """The k lowest-scored tokens among those that each query sees; all of them if there are fewer than k.

    Args:
        scores: scores before the softmax, or phi~(q).phi~(k).
        visible: True where a query sees a key.
        k: a count, or a fraction of the visible tokens (rounded up).
    """
    n_visible = visible.sum(dim=-1, keepdim=True)  # [.., pos, 1]
    wanted = n_visible.clamp(max=k) if isinstance(k, int) else (k * n_visible.double()).ceil().long()
    most = min(k, scores.shape[-1]) if isinstance(k, int) else math.ceil(k * scores.shape[-1])
    lowest = scores.masked_fill(~visible, float("inf")).topk(most, dim=-1, largest=False, sorted=True)
    inside = torch.arange(most, device=scores.device) < wanted
    share = inside.to(scores.dtype) / wanted.clamp(min=1).to(scores.dtype)
    return Negatives(lowest.indices, share.expand_as(lowest.indices))


def mean_of_negatives(
    v: Float[Tensor, "batch head key_pos d_head"], negatives: Negatives
) -> Float[Tensor, "batch head pos d_head"]:
    """mean_{N_i} v for every query; 0 for a query that sees nothing."""
    batch, head, pos, _ = negatives.tokens.shape
    weights = v.new_zeros(batch, head, pos, v.shape[2])
    return weights.scatter_(-1, negatives.tokens, negatives.share.to(v.dtype)) @ v


# Ridge attention: the regularized least-squares fit W to the labels, instead of one gradient step (DUAL eq. 33).
#
#     W_i = (sum_{j <= i} v_j phi(k_j)^T) (sum_{j <= i} phi(k_j) phi(k_j)^T + lambda I)^{-1}       z_i = W_i phi(q_i)
#
# In kernel form, let L L^T = K + lambda I over all tokens of the text. The leading block of L is the Cholesky factor for the
# tokens up to i, so a single factorization serves every query causally:
#
#     z = tril((L^{-1} kappa(K, Q))^T) L^{-1} V
#
# For linear attention this is the mesa-layer of Von Oswald et al. 2023. There is no normalizer to divide by. With finite
# features, A = sum phi v^T and C = sum phi phi^T form a state: `ridge_step` continues from it at O(d_phi^3) per token.


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
    grouped = rearrange(Q.tril(past), "b (kv g) query key -> b kv g key query", g=group)
    queries = torch.linalg.solve_triangular(factor[:, :, None], grouped, upper=False).transpose(-1, -2).tril(past)
    return rearrange(queries @ values[:, :, None], "b kv g query d -> b (kv g) query d").to(v.dtype)


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


def full_rank_limit(pattern: Float[Tensor, "*lead pos pos"]) -> Float[Tensor, "*lead"]:
    """alpha' of DUAL lemma D.1: P - alpha I has full rank for every alpha in (0, alpha'), whatever the rank of P.

    det(P - alpha I) is a polynomial of alpha with the eigenvalues of P as its roots, so alpha' is the smallest size of one that
    is not zero. The same holds for negative alpha down to -alpha'. An eigenvalue counts as zero if it is below the rounding of
    n terms; one of several equal zeros without as many eigenvectors may be found as the root of that.
    """
    sizes = torch.linalg.eigvals(pattern).abs()
    rounding = pattern.shape[-1] * torch.finfo(pattern.dtype).eps * sizes.amax(dim=-1, keepdim=True)
    return sizes.masked_fill(sizes <= rounding, torch.inf).amin(dim=-1)


doors(__name__)
