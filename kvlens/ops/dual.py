"""Attention as one step of gradient descent on a representation-learning loss (DUAL th. 3.1, eq. 9 and 12).

    f(z) = W phi~(z)
    W_0 = (1 / D) sum_{H_T} v_t phi~(k_t)^T
    L(W) = -(1 / (eta D)) sum_{j in H_D} v_j^T W phi~(k_j)  [+ alpha / (2 eta) |W|^2]
    W_{n+1} = W_n - eta dL/dW = (1 - alpha) W_n + (1 / D) sum_{H_D} v_j phi~(k_j)^T

H_D are the demonstrations, H_T the tokens after them up to the query; D is the head's normalizer at the query. After one
step f(q) is the head's output, for every eta. Without alpha the loss is linear in W and has no minimizer. Our ``alpha`` is the
paper's, ``eta`` its learning rate.

In this order: :func:`naive_dual`, one head, one query, in loops, the reference for everything below; the kernel kappa in
logarithms, and finite features that approximate it; W as an explicit matrix, for finite features; the same through the kernel,
exact softmax included; losses, outputs and cosines for every query of a text at once. What follows the head, and the
generalization bound, is in :mod:`kvlens.ops.dual_layers`.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.checks import doors
from kvlens.errors import KVLensError

# The obvious form: loops over tokens, in float64. Everything is expressed through the kernel, so that it serves finite features
# and the exact softmax kernel alike: W = sum_t c_t phi(k_t)^T is represented by its coefficients c_t, and W phi(z) = sum_t c_t
# kappa(k_t, z).

Kernel = Callable[[Tensor, Tensor], Tensor]
"""kappa of two vectors, a number."""


class NaiveDual(NamedTuple):
    """Everything that the fast forms compute, for one head and one query.

    Attributes:
        output: the head's output at the query, by attention.
        before: f(q) with W_0.
        after: f(q) with W_1.
        loss_before: L(W_0).
        loss_after: L(W_1).
        contributions: what each demonstration's step adds to f(q).
        cosine_before: of (W_0 phi(k_j), v_j).
        cosine_after: of (W_1 phi(k_j), v_j).
    """

    output: Float[Tensor, " d_out"]
    before: Float[Tensor, " d_out"]
    after: Float[Tensor, " d_out"]
    loss_before: Float[Tensor, ""]
    loss_after: Float[Tensor, ""]
    contributions: Float[Tensor, "demo d_out"]
    cosine_before: Float[Tensor, " demo"]
    cosine_after: Float[Tensor, " demo"]


def naive_dual(
    query: Float[Tensor, " d"],
    keys: Float[Tensor, "token d"],
    values: Float[Tensor, "token d_out"],
    n_demonstrations: int,
    kernel: Kernel,
    normalizer: Float[Tensor, ""] | None = None,
    log_decay: float = 0.0,
    eta: float = 1.0,
    alpha: float = 0.0,
) -> NaiveDual:
    """Th. 3.1 step by step.

    Args:
        query: q, or its features where ``kernel`` is their product.
        keys, values: of the tokens up to the query, which is the last of them.
        n_demonstrations: N; H_D = tokens 0 .. N - 1, H_T = the rest.
        kernel: kappa.
        normalizer: D; None takes sum_t kappa(k_t, q), as softmax does.
        log_decay: log gamma; token t counts gamma^{i - t} times.
        eta: the learning rate.
        alpha: strength of the regularization, 0 for none.
    """
    n_tokens = len(keys)
    seen = [torch.tensor(log_decay * (n_tokens - 1 - t), dtype=keys.dtype).exp() for t in range(n_tokens)]
    at_query = [seen[t] * kernel(keys[t], query) for t in range(n_tokens)]
    D = sum(at_query, keys.new_zeros(())) if normalizer is None else normalizer
    zero = values.new_zeros(values.shape[1])
    W_0 = [values[t] / D if t >= n_demonstrations else zero for t in range(n_tokens)]
    W_1 = [(1 - alpha) * W_0[t] + (values[t] / D if t < n_demonstrations else zero) for t in range(n_tokens)]

    def f(W: list[Tensor], z: Tensor, factor: Tensor) -> Tensor:
        return sum((W[t] * seen[t] * kernel(keys[t], z) * factor for t in range(n_tokens)), zero)

    def square(W: list[Tensor]) -> Tensor:
        return sum(
            (W[s] @ W[t] * seen[s] * seen[t] * kernel(keys[s], keys[t]) for s in range(n_tokens) for t in range(n_tokens)),
            zero.sum(),
        )

    def loss(W: list[Tensor]) -> Tensor:
        fit = sum((values[j] @ f(W, keys[j], seen[j]) for j in range(n_demonstrations)), zero.sum())
        return -fit / (eta * D) + alpha / (2 * eta) * square(W)

    def cosine(W: list[Tensor]) -> Tensor:
        predictions = [f(W, keys[j], seen[j]) for j in range(n_demonstrations)]
        return torch.stack([p @ v / (p.norm() * v.norm()) for p, v in zip(predictions, values, strict=False)])

    one = keys.new_ones(())
    return NaiveDual(
        output=sum((values[t] * at_query[t] / D for t in range(n_tokens)), zero),
        before=f(W_0, query, one),
        after=f(W_1, query, one),
        loss_before=loss(W_0),
        loss_after=loss(W_1),
        contributions=torch.stack([values[j] * at_query[j] / D for j in range(n_demonstrations)]),
        cosine_before=cosine(W_0),
        cosine_after=cosine(W_1),
    )


# The kernel kappa, which stands for phi~(k)^T phi~(q), kept as sign and logarithm so that nothing overflows.
#
#     softmax            kappa(a, b) = exp(a.b / scale)         exact, without features
#     finite features    kappa(a, b) = phi(a).phi(b)            linear attention, random features, landmarks
#
# Query-key scores of real models reach +-100, and key-key scores more: exp(2 * 400) overflows float64. A kernel matrix is
# therefore held as its logarithm and turned into numbers by `kernel_values`, which adds the logarithm of a factor first, so
# that it overflows only where the product itself does.


class LogKernel(NamedTuple):
    """A matrix of kernel values between tokens (rows) and the points where W is evaluated (columns), sign * exp(log_size).

    Attributes:
        log_size: log |kappa|, -inf where kappa is 0.
        sign: -1, 0 or 1; None if all are positive.
    """

    log_size: Float[Tensor, "*lead token at"]
    sign: Float[Tensor, "*lead token at"] | None


def softmax_kernel(a: Float[Tensor, "*lead a d"], b: Float[Tensor, "*lead b d"], scale: float) -> LogKernel:
    """kappa(a, b) = exp(a.b / scale), the kernel of softmax attention (DUAL eq. 7)."""
    return LogKernel(a @ b.transpose(-1, -2) / scale, None)


def feature_kernel(
    a: Float[Tensor, "*lead a d_phi"],
    b: Float[Tensor, "*lead b d_phi"],
    log_a: Float[Tensor, "*lead a"] | None = None,
    log_b: Float[Tensor, "*lead b"] | None = None,
) -> LogKernel:
    """kappa(a, b) = a.b exp(log_a + log_b), for rows that are features; None for ``log_a`` or ``log_b`` means 0."""
    products = a @ b.transpose(-1, -2)
    log_size = products.abs().log()
    for log_scale in (None if log_a is None else log_a[..., :, None], None if log_b is None else log_b[..., None, :]):
        log_size = log_size if log_scale is None else log_size + log_scale
    return LogKernel(log_size, products.sign())


def kernel_values(kernel: LogKernel, log_factor: Float[Tensor, "..."] | float = 0.0) -> Float[Tensor, "*lead token at"]:
    """kappa * exp(log_factor), broadcast; it overflows only where the product itself is too large."""
    values = (kernel.log_size + log_factor).exp()
    return values if kernel.sign is None else kernel.sign * values


def middle_of_course(log_peak: Float[Tensor, "*lead step"]) -> Float[Tensor, "*lead one"]:
    """The mean of the first and last entries of a running maximum, to subtract from logarithms before a running sum.

    The running sum then neither overflows at the end nor vanishes at the beginning, as long as the maximum rises by less
    than 700 in total (for sums of squares). -inf and inf count as 0.
    """
    first, last = log_peak[..., :1], log_peak[..., -1:]
    middle = torch.where(first.isfinite(), (first + last) / 2, last)
    return torch.where(middle.isfinite(), middle, 0.0)


# Finite features for the softmax kernel that are exact on chosen keys: a Nystroem map by pivoted Cholesky decomposition.
#
# With landmarks c_1 .. c_r and L L^T = kappa(c, c), phi(x) = L^{-1} kappa(c, x) gives phi(a).phi(b) = kappa(a, b) whenever a or
# b is a landmark. Each new landmark is the key with the largest remaining error (Harbrecht et al. 2012). Keys are first scaled
# to kappa(k, k) = 1 and queries to a largest kappa(q, k) of 1, so that nothing overflows; the scales are returned as
# logarithms. The loop runs over landmarks, for all heads at once.


class LandmarkFeatures(NamedTuple):
    """Features of keys and queries, the logarithm of each row's scale, and the indices of the landmark keys."""

    keys: Float[Tensor, "head token r"]
    queries: Float[Tensor, "head query r"]
    log_keys: Float[Tensor, "head token"]
    log_queries: Float[Tensor, "head query"]
    landmarks: Int[Tensor, "head r"]


def landmark_features(
    keys: Float[Tensor, "head token d"], queries: Float[Tensor, "head query d"], scale: float, n_landmarks: int
) -> LandmarkFeatures:
    """Features with phi(a).phi(b) ~ exp(a.b / scale), with equality where a or b is a landmark.

    Raises:
        KVLensError: no landmark, or more of them than keys.
    """
    n_keys = keys.shape[1]
    if not 1 <= n_landmarks <= n_keys:
        raise KVLensError(f"landmarks: expected 1 to {n_keys} (one per key), got {n_landmarks}")
    log_keys = keys.square().sum(dim=-1) / (2 * scale)
    at_queries = queries @ keys.transpose(-1, -2) / scale - log_keys[:, None]
    log_queries = at_queries.amax(dim=-1)
    at_keys = keys @ keys.transpose(-1, -2) / scale - log_keys[:, None] - log_keys[..., None]
    kappa = torch.cat([at_keys, at_queries - log_queries[..., None]], dim=1).exp()  # rows: keys, then queries
    heads = torch.arange(keys.shape[0], device=keys.device)
    residual = torch.ones_like(log_keys)
    columns: list[Tensor] = []
    landmarks: list[Tensor] = []
    for _ in range(n_landmarks):
        pivot = residual.argmax(dim=-1)
        size, column = residual[heads, pivot], kappa[heads, :, pivot]
        if columns:
            before = torch.stack(columns, dim=-1)
            column = column - (before * before[heads, pivot][:, None]).sum(dim=-1)
        # a pivot at rounding level is a key that repeats others: it adds nothing
        new = size > n_keys * torch.finfo(keys.dtype).eps
        columns.append(torch.where(new[:, None], column / torch.where(new, size, 1.0).sqrt()[:, None], 0.0))
        landmarks.append(pivot)
        residual = (residual - columns[-1][:, :n_keys].square()).clamp(min=0)
        residual[heads, pivot] = -1.0  # never again
    features = torch.stack(columns, dim=-1)
    chosen = torch.stack(landmarks, dim=-1)
    return LandmarkFeatures(features[:, :n_keys], features[:, n_keys:], log_keys, log_queries, chosen)


def scaled_random_features(
    x: Float[Tensor, "head token d"], projection: Float[Tensor, "head m d"], scale: float
) -> tuple[Float[Tensor, "head token m"], Float[Tensor, "head token"]]:
    """Positive random features, scaled to a largest entry of 1 per row, and the logarithm of that scale.

    The same map as :func:`kvlens.ops.feature_maps.random_features`, for vectors whose features would overflow.
    """
    scaled = x / scale**0.5
    exponent = scaled @ projection.to(x).transpose(-1, -2) - scaled.square().sum(dim=-1, keepdim=True) / 2
    peak = exponent.amax(dim=-1)
    m = torch.tensor(float(projection.shape[1]), dtype=x.dtype, device=x.device)
    return (exponent - peak[..., None]).exp(), peak - m.log() / 2


# The dual model with an explicit weight W (DUAL th. 3.1). With decay, the ``inputs`` are phi~(k_j) gamma^{i-j}, the features as
# query i sees them. Rows: ``inputs`` [demo, d_phi] and ``labels`` [demo, d_out]; a weight is [d_out, d_phi].

Inputs = Float[Tensor, "*lead demo d_phi"]
Labels = Float[Tensor, "*lead demo d_out"]
Weight = Float[Tensor, "*lead d_out d_phi"]
Normalizer = Float[Tensor, "*#lead"]
"""D, one per query."""


def mean_outer(inputs: Inputs, labels: Labels, normalizer: Normalizer) -> Weight:
    """(1 / D) sum_j v_j phi~(k_j)^T: W_0 for the tokens of H_T, and what a step adds for those of H_D."""
    return labels.transpose(-1, -2) @ inputs / normalizer[..., None, None]


def predict(weight: Weight, inputs: Inputs) -> Labels:
    """f(z) = W phi~(z), row by row."""
    return inputs @ weight.transpose(-1, -2)


def loss_of_predictions(predictions: Labels, labels: Labels, normalizer: Normalizer, eta: float) -> Float[Tensor, "*lead"]:
    """-(1 / (eta D)) sum_j v_j.f(k_j) (DUAL eq. 9); autograd can act on it even if phi is infinite-dimensional."""
    return -(labels * predictions).sum(dim=(-2, -1)) / (eta * normalizer)


def dual_loss(
    weight: Weight, inputs: Inputs, labels: Labels, normalizer: Normalizer, eta: float, alpha: float = 0.0
) -> Float[Tensor, "*lead"]:
    """L(W), plus alpha / (2 eta) |W|^2 if ``alpha`` is not 0 (DUAL eq. 9 and 12)."""
    loss = loss_of_predictions(predict(weight, inputs), labels, normalizer, eta)
    return loss if alpha == 0 else loss + alpha / (2 * eta) * weight.square().sum(dim=(-2, -1))


def loss_gradient(
    weight: Weight, inputs: Inputs, labels: Labels, normalizer: Normalizer, eta: float, alpha: float = 0.0
) -> Weight:
    """dL/dW in closed form: -(1 / (eta D)) sum_j v_j phi~(k_j)^T + (alpha / eta) W."""
    return (alpha * weight - mean_outer(inputs, labels, normalizer)) / eta


def weight_after(weight: Weight, added: Weight, n_steps: int, alpha: float = 0.0) -> Weight:
    """W_n in closed form, (1 - alpha)^n W_0 + sum_{s<n} (1 - alpha)^s G, where G = ``added`` is `mean_outer` of H_D."""
    kept = 1.0 - alpha
    series = float(n_steps) if alpha == 0 else (1.0 - kept**n_steps) / alpha
    return kept**n_steps * weight + series * added


# The dual model in kernel form: W is never formed explicitly, so the exact softmax kernel works as well as features.
#
# W = sum_t c_t phi~(k_t)^T over the tokens up to the query, so every quantity is a sum over pairs of tokens: of H_D
# (demonstrations, the first N) and of H_T (the rest). After n steps c_t is (1 - alpha)^n v_t / D on H_T and sum_{s<n} (1 -
# alpha)^s v_t / D on H_D; without alpha the loss falls by the same amount at every step, without bound.
#
# ``log_kernel`` is kappa between the tokens as the query sees them (with decay: times gamma^{i-s} gamma^{i-t}), H_D first.


class PairSums(NamedTuple):
    """sum (v_s.v_t) kappa(s, t) / D^2 over pairs of tokens, which is all that the losses depend on; at eta = 1.

    Attributes:
        step: over H_D x H_D: |dL/dW|^2, by which one step reduces the loss.
        start: over H_T x H_D: -L(W_0).
        start_norm: over H_T x H_T: |W_0|^2.
    """

    step: Float[Tensor, "*lead"]
    start: Float[Tensor, "*lead"]
    start_norm: Float[Tensor, "*lead"]

    def square_norm(self, n_steps: int, alpha: float = 0.0) -> Float[Tensor, "*lead"]:
        """|W_n|^2."""
        kept, series = (1.0 - alpha) ** n_steps, _series(n_steps, alpha)
        return kept**2 * self.start_norm + 2 * kept * series * self.start + series**2 * self.step


def pair_sums(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    log_normalizer: Float[Tensor, "*lead"],
    n_demonstrations: int,
) -> PairSums:
    """The three sums of one query."""
    pairs = kernel_values(log_kernel, -2 * log_normalizer[..., None, None]) * (values @ values.transpose(-1, -2))
    N = n_demonstrations
    step, start, norm = pairs[..., :N, :N], pairs[..., N:, :N], pairs[..., N:, N:]
    return PairSums(step.sum(dim=(-2, -1)), start.sum(dim=(-2, -1)), norm.sum(dim=(-2, -1)))


def losses(sums: PairSums, n_steps: int, eta: float, alpha: float = 0.0) -> Float[Tensor, " step *lead"]:
    """L(W_0), ..., L(W_n) for learning rate ``eta``; without ``alpha`` they decrease linearly."""
    course = []
    for n in range(n_steps + 1):
        fit = (1.0 - alpha) ** n * sums.start + _series(n, alpha) * sums.step
        course.append((alpha / 2 * sums.square_norm(n, alpha) - fit) / eta if alpha else -fit / eta)
    return torch.stack(course)


def predictions_at_demonstrations(
    log_kernel: LogKernel, values: Float[Tensor, "*lead token d_out"], n_demonstrations: int
) -> tuple[Float[Tensor, "*lead demo d_out"], Float[Tensor, "*lead demo d_out"]]:
    """W_0 phi(k_j) and W_1 phi(k_j), each row up to a positive factor that is the same in both."""
    N = n_demonstrations
    columns = LogKernel(log_kernel.log_size[..., :N], None if log_kernel.sign is None else log_kernel.sign[..., :N])
    peak = columns.log_size.amax(dim=-2, keepdim=True)
    kappa = kernel_values(columns, -torch.where(peak.isfinite(), peak, 0.0))
    before = kappa[..., N:, :].transpose(-1, -2) @ values[..., N:, :]
    return before, before + kappa[..., :N, :].transpose(-1, -2) @ values[..., :N, :]


def _series(n: int, alpha: float) -> float:
    """1 + (1 - alpha) + ... + (1 - alpha)^{n-1}."""
    return float(n) if alpha == 0 else (1.0 - (1.0 - alpha) ** n) / alpha


def cosine(a: Float[Tensor, "*lead d"], b: Float[Tensor, "*lead d"]) -> Float[Tensor, "*lead"]:
    """The cosine of the angle between rows; 0 where one of them is 0."""
    sizes = a.norm(dim=-1) * b.norm(dim=-1)
    return torch.where(sizes > 0, (a * b).sum(dim=-1) / torch.where(sizes > 0, sizes, 1.0), 0.0)


# The dual models of every query of a text at once: O(pos^2) memory, no loops.
#
# Query i has N_i demonstrations: all tokens before it (N_i = i), or the first N of the text. A running sum over tokens serves
# all queries, because query i's W_1 is query i-1's (up to the factor D_{i-1} / D_i) plus one more token:
#
#     drop_i = (1 / D_i^2) sum_{s,t < N_i} (v_s.v_t) kappa(s, t)
#     cosine after: S_ij = sum_{t <= i} kappa(t, j) v_t,   v_j.S_ij = sum_{t <= i} kappa(t, j) (v_t.v_j),
#                   |S_ij|^2 = |S_{i-1,j}|^2 + 2 kappa(i, j) sum_{t < i} (v_i.v_t) kappa(t, j) + kappa(i, j)^2 |v_i|^2
#
# The cosines take O(pos^3) time, or O(N pos (pos - N)) if the first N tokens are the demonstrations of every query. For a head
# with decay, ``log_kernel`` is kappa times gamma^{-s} gamma^{-t} here; `log_loss_drops` restores gamma^{2i}.

PerScoredQuery = Float[Tensor, "*lead scored_query"]


def log_loss_drops(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    log_normalizer: Float[Tensor, "*lead token"],
    n_demonstrations: int | None = None,
    log_decay: Float[Tensor, "*lead"] | None = None,
) -> PerScoredQuery:
    """log(L(W_0) - L(W_1)) at eta = 1, for every query that has demonstrations.

    Args:
        log_kernel: between all tokens.
        values: v.
        log_normalizer: log D of every token as a query.
        n_demonstrations: N, the same for all queries, or None for all tokens before each.
        log_decay: log gamma.

    Returns:
        For queries 1 .. pos - 1, or N .. pos - 1. A drop of 0 (where the values are 0) gives -inf.
    """
    above = torch.ones_like(log_kernel.log_size, dtype=torch.bool).triu(1)
    running_peak = log_kernel.log_size.masked_fill(above, float("-inf")).amax(dim=-1).cummax(dim=-1).values
    middle = middle_of_course(running_peak)
    pairs = kernel_values(log_kernel, -middle[..., None]) * (values @ values.transpose(-1, -2))
    new = pairs.diagonal(dim1=-2, dim2=-1) + 2 * pairs.tril(-1).sum(dim=-1)  # what token t adds to the sum over pairs
    sums = new.cumsum(dim=-1)  # [.., t]: over pairs of tokens up to and including t
    if n_demonstrations is None:
        first, sums = 1, sums[..., :-1]
    else:
        first, sums = n_demonstrations, sums[..., n_demonstrations - 1 : n_demonstrations]
    drops = sums.clamp(min=0).log() + middle - 2 * log_normalizer[..., first:]
    if log_decay is None:
        return drops
    queries = torch.arange(first, values.shape[-2], device=values.device, dtype=values.dtype)
    return drops + 2 * queries * log_decay[..., None]


def step_outputs(
    pattern: Float[Tensor, "*lead query token"],
    values: Float[Tensor, "*lead token d_out"],
    n_demonstrations: int | None = None,
) -> Float[Tensor, "*lead scored_query d_out"]:
    """(W_1 - W_0) phi(q): what the demonstrations add, for queries 1 .. pos - 1, or N .. pos - 1.

    Args:
        pattern: kappa(k_t, q_i) / D_i, 0 where t > i.
        values: v.
        n_demonstrations: as in :func:`log_loss_drops`.
    """
    if n_demonstrations is None:
        return (pattern.tril(-1) @ values)[..., 1:, :]
    N = n_demonstrations
    return pattern[..., N:, :N] @ values[..., :N, :]


def mean_cosines(
    log_kernel: LogKernel,
    values: Float[Tensor, "*lead token d_out"],
    n_demonstrations: int | None = None,
    start: Float[Tensor, "*lead token d_out"] | None = None,
) -> tuple[PerScoredQuery, PerScoredQuery]:
    """Mean over the demonstrations j of the cosines of (W_0 phi(k_j), v_j) and of (W_1 phi(k_j), v_j), for every query.

    Args:
        log_kernel: between all tokens.
        values: v.
        n_demonstrations: as in :func:`log_loss_drops`.
        start: what a KV bias adds to W_0 phi(k_j), at every token j, in the units of kappa (so not divided by D).

    Returns:
        Before and after the step, for queries 1 .. pos - 1, or N .. pos - 1. A cosine with a zero vector counts as 0.
    """
    pos = values.shape[-2]
    running_peak = log_kernel.log_size.cummax(dim=-2).values  # [.., i, j], over t <= i
    first = running_peak.diagonal(dim1=-2, dim2=-1)  # demonstration j is seen by the queries after it
    middle = middle_of_course(torch.stack([first, running_peak[..., -1, :]], dim=-1)).transpose(-1, -2)  # [.., 1, j]
    kappa = kernel_values(log_kernel, -middle)
    offset = None if start is None else start * (-middle.transpose(-1, -2)).exp()
    if n_demonstrations is not None:
        return _cosines_of_the_first(kappa, values, offset, n_demonstrations)
    after = _running_cosine(kappa, values, values, offset)
    before = _single_cosine(kappa, log_kernel.sign, values, offset)
    tokens = torch.arange(pos, device=values.device)
    demonstration = tokens[None] < tokens[:, None]
    means = [(torch.where(demonstration, c, 0.0).sum(dim=-1)[..., 1:] / tokens[1:]) for c in (before, after)]
    return means[0], means[1]


def _cosines_of_the_first(
    kappa: Tensor, values: Tensor, offset: Tensor | None, n: int
) -> tuple[PerScoredQuery, PerScoredQuery]:
    """The first n tokens as demonstrations of every query: their sum is constant, and only later tokens need a running sum."""
    kappa, labels, rest = kappa[..., :n], values[..., :n, :], values[..., n:, :]
    start = None if offset is None else offset[..., :n, :]
    learned = kappa[..., :n, :].transpose(-1, -2) @ labels
    before = _running_cosine(kappa[..., n:, :], rest, labels, start)
    after = _running_cosine(kappa[..., n:, :], rest, labels, learned if start is None else start + learned)
    return before.mean(dim=-1), after.mean(dim=-1)


def _running_cosine(
    kappa: Float[Tensor, "*lead query demo"],
    values: Float[Tensor, "*lead query d_out"],
    labels: Float[Tensor, "*lead demo d_out"],
    offset: Float[Tensor, "*lead demo d_out"] | None,
) -> Float[Tensor, "*lead query demo"]:
    """The cosine of sum_{t <= i} kappa(t, j) values_t + offset_j and labels_j, at (i, j)."""
    among = values @ values.transpose(-1, -2)
    dot = (kappa * (values @ labels.transpose(-1, -2))).cumsum(dim=-2)
    mixed = 2 * (among.tril(-1) @ kappa)
    if offset is not None:
        mixed = mixed + 2 * (values @ offset.transpose(-1, -2))
        dot = dot + (labels * offset).sum(dim=-1)[..., None, :]
    square = (kappa * (mixed + kappa * among.diagonal(dim1=-2, dim2=-1)[..., None])).cumsum(dim=-2)
    if offset is not None:
        square = square + offset.square().sum(dim=-1)[..., None, :]
    return _cosine(dot, square, labels.square().sum(dim=-1))


def _single_cosine(
    kappa: Tensor, sign: Tensor | None, values: Tensor, offset: Tensor | None
) -> Float[Tensor, "*lead query token"]:
    """The cosine of kappa(i, j) v_i + offset_j and v_j, at (i, j)."""
    products = values @ values.transpose(-1, -2)
    sizes = products.diagonal(dim1=-2, dim2=-1)
    if offset is None:  # only the sign of kappa matters, and it is known even where kappa underflows
        signed = products if sign is None else sign * products
        return _cosine(signed, sizes[..., None].expand_as(products), sizes)
    with_offset = values @ offset.transpose(-1, -2)
    dot = kappa * products + with_offset.diagonal(dim1=-2, dim2=-1)[..., None, :]
    square = kappa.square() * sizes[..., None] + 2 * kappa * with_offset + offset.square().sum(dim=-1)[..., None, :]
    return _cosine(dot, square, sizes)


def _cosine(dot: Tensor, square: Tensor, sizes: Tensor) -> Tensor:
    product = square.clamp(min=0) * sizes[..., None, :]
    return torch.where(product > 0, dot / torch.where(product > 0, product, 1.0).sqrt(), 0.0).clamp(-1.0, 1.0)


doors(__name__)
