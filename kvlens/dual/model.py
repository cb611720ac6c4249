"""DualModel: one attention head at one query, read as one step of gradient descent on a representation-learning loss.

    dual = DualModel.from_head(model, tokens, layer=3, head=1)
    dual.loss(); dual.step(); dual.predict()        # after one step: the head's output at the query

The training set consists of the demonstrations: inputs phi~(k_j), labels v_j. W_0 holds the tokens of H_T, from the last
demonstration up to the query. W is stored as its coefficients on the tokens' features, which also works for the exact softmax
kernel without finite features; with finite features (linear attention, ``kernel="random"`` or ``"landmark"``) W itself is
available.

A KV bias is also a sum of features times values: the rows of its singular value decomposition act as tokens, in H_T
(``bias="initial"``) or in H_D (``bias="demonstrations"``). Under KV shift the first token of H_T still reads the last
demonstration, so W_0 is not what the head would compute without demonstrations.

Source: DUAL th. 3.1, eq. 9; the regularized step eq. 12; the bound th. 3.2.
"""

from typing import Annotated, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import Count, Finite, Seed, Within, checked, ensure
from kvlens.dual.head_inputs import (
    LayerReading,
    TokenRow,
    check_index,
    read_layers,
)
from kvlens.errors import KVLensError
from kvlens.model import KVModel, heads_per_layer
from kvlens.ops import dual as ops
from kvlens.ops import dual_layers
from kvlens.ops.feature_maps import draw_projections

KernelName = Literal["exact", "random", "landmark"]
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


class DualModel:
    """The dual model of one head at one query. It starts at W_0; :meth:`step` makes a gradient step.

    Attributes:
        n_demonstrations: N, the number of tokens of the text among the demonstrations.
        n_virtual: number of rows of a KV bias that precede them as demonstrations; 0 unless ``bias="demonstrations"``.
        n_steps: number of steps made so far.
        output: the head's own output at the query, ``hook_z`` [d_head].
    """

    def __init__(self, tokens: HeadTokens, n_demonstrations: int, n_virtual: int, output: Float[Tensor, " d_head"]):
        self._tokens = tokens
        self.n_demonstrations, self.n_virtual = n_demonstrations, n_virtual
        self.output = output
        self._n = n_demonstrations + n_virtual
        self.n_steps = 0
        self._coefficients = torch.cat([torch.zeros_like(tokens.values[: self._n]), tokens.values[self._n :]])  # of D W

    @classmethod
    @checked
    def from_head(
        cls,
        model: KVModel,
        tokens: TokenRow,
        layer: int,
        head: int,
        query_pos: int = -1,
        n_demonstrations: int | None = None,
        kernel: KernelName = "exact",
        bias: BiasRole = "initial",
        n_features: Count | None = None,
        seed: Seed = 0,
    ) -> "DualModel":
        """Build the dual model of a head from one forward pass over ``tokens``.

        Args:
            model: the model; linear attention has its own features, softmax the exact kernel.
            tokens: [pos], the demonstrations and the query.
            layer, head: which head; negative ones count from the end.
            query_pos: the query's position.
            n_demonstrations: N, the number of first tokens that are demonstrations; None for all tokens before the query.
            kernel: "exact"; or, for softmax, features that approximate it: "random" (positive random features, orthogonal),
                "landmark" (exact on chosen keys).
            bias: whether the rows of a KV bias are part of W_0 ("initial"), or demonstrations.
            n_features: size of an approximate kernel: random features (None: 16 d_head), or landmarks (None: every fourth key).
            seed: seed for the random features.

        Raises:
            KVLensError: no demonstrations, a query before its demonstrations,
                attention without a dual model, or an approximate kernel for a head that has its own features.
        """
        layer = check_index("layer", layer, model.cfg.n_layers)
        head = check_index("head", head, heads_per_layer(model)[layer])
        readings: list[LayerReading] = []
        read_layers(model, tokens, lambda _, reading: readings.append(reading), [layer])
        query = check_index("query_pos", query_pos, len(tokens))
        reading = one_head(readings[0], head, query)
        n = query if n_demonstrations is None else n_demonstrations
        n_rows = reading.bias_features.shape[1]
        n_virtual = n_rows if bias == "demonstrations" else 0
        _check_demonstrations(n, n_virtual, query)
        order = demonstrations_first(n, query, n_rows, bias)
        head_tokens = exact_tokens(reading, order)
        if kernel != "exact":
            head_tokens = approximate_tokens(reading, order, kernel, n_features, seed)
        return cls(head_tokens, n, n_virtual, reading.z[0, query])

    # --- the training set and W --------------------------------------------------------------------------------------

    @property
    def labels(self) -> Float[Tensor, "demo d_head"]:
        """v_j of the demonstrations (those of a bias first)."""
        return self._tokens.values[: self._n]

    @property
    def inputs(self) -> Float[Tensor, "demo d_phi"]:
        """phi~(k_j) of the demonstrations, as the query sees them. Raises KVLensError for a kernel without finite features."""
        return self._features()[: self._n]

    @property
    def query(self) -> Float[Tensor, " d_phi"]:
        """phi~(q). Raises KVLensError for a kernel without finite features."""
        return self._features()[-1]

    @property
    def normalizer(self) -> Float[Tensor, ""]:
        """D, the head's normalizer at the query."""
        return self._tokens.sign * self._tokens.log_normalizer.exp()

    @property
    def weight(self) -> Float[Tensor, "d_head d_phi"]:
        """The current W. Raises KVLensError for a kernel without finite features."""
        return ops.mean_outer(self._features()[:-1], self._coefficients, self.normalizer)

    # --- one step after the other ------------------------------------------------------------------------------------

    @checked
    def loss(self, eta: float = 1.0, alpha: float = 0.0) -> Float[Tensor, ""]:
        """L(W) for the current W and learning rate ``eta`` (eq. 9; with ``alpha`` eq. 12)."""
        _check_rates(eta, alpha)
        fit = (self.labels * self._predictions()).sum() * self._inverse()
        loss = -fit / eta
        return loss if alpha == 0 else loss + alpha / (2 * eta) * self._square_norm()

    @checked
    def step(self, eta: float = 1.0, alpha: float = 0.0, *, autograd: bool = False) -> "DualModel":
        """One gradient step, W <- W - eta dL/dW; returns itself.

        Args:
            eta: the learning rate. The step does not depend on it, because the loss is divided by it.
            alpha: alpha of eq. 12; the step then also multiplies W by 1 - alpha.
            autograd: differentiate the loss with respect to the predictions f(k_j) instead of using the closed form.
        """
        _check_rates(eta, alpha)
        toward = self._coefficients_of_gradient(eta) if autograd else self.labels
        moved = (1.0 - alpha) * self._coefficients
        self._coefficients = torch.cat([moved[: self._n] + toward, moved[self._n :]])
        self.n_steps += 1
        return self

    def reset(self) -> "DualModel":
        """Reset W to W_0; returns itself."""
        self._coefficients = torch.cat([torch.zeros_like(self.labels), self._tokens.values[self._n :]])
        self.n_steps = 0
        return self

    def predict(self) -> Float[Tensor, " d_head"]:
        """f(q) with the current W: after one step, the head's output."""
        return self._tokens.weights @ self._coefficients

    @checked
    def losses(self, n_steps: Annotated[int, Within(0)], eta: float = 1.0, alpha: float = 0.0) -> Float[Tensor, " step"]:
        """L(W_0), ..., L(W_n). Without ``alpha`` they decrease linearly: the loss is linear in W and has no minimizer."""
        _check_rates(eta, alpha)
        return ops.losses(self._sums(), n_steps, eta, alpha)

    @checked
    def minimize(self, alpha: Annotated[float, Within(above=0)]) -> "DualModel":
        """Set W to the minimizer of the regularized loss, (1 / (alpha D)) sum v_j phi(k_j)^T; returns itself.

        Raises:
            KVLensError: ``alpha`` is not positive, so that the loss has no minimizer.
        """
        self._coefficients = torch.cat([self.labels / alpha, torch.zeros_like(self._tokens.values[self._n :])])
        return self

    # --- what the step does ------------------------------------------------------------------------------------------

    def after_one_step(self) -> Float[Tensor, " d_head"]:
        """f(q) with W_1, whatever the current W is."""
        return self._tokens.weights @ self._tokens.values

    def equivalence_error(self) -> float:
        """|f(q) after one step - the head's output| / |the head's output|; for approximate features, their error."""
        return float((self.after_one_step() - self.output).norm() / self.output.norm())

    def log_loss_drop(self) -> float:
        """log(L(W_0) - L(W_1)) at eta = 1."""
        N, values = self._n, self.labels
        peak = self._tokens.log_kernel.log_size[:N, :N].max()
        pairs = ops.kernel_values(self._demonstration_kernel(), -peak) * (values @ values.T)
        return float(pairs.sum().clamp(min=0).log() + peak - 2 * self._tokens.log_normalizer)

    def contributions(self) -> Float[Tensor, "demo d_head"]:
        """What each demonstration's part of the step adds to f(q): (kappa(k_j, q) / D) v_j."""
        return self._tokens.weights[: self._n, None] * self.labels

    def cosines(self) -> tuple[Float[Tensor, " demo"], Float[Tensor, " demo"]]:
        """Cosine of (W phi(k_j), v_j) with W_0 and with W_1: how much closer the step brings each pair."""
        before, after = ops.predictions_at_demonstrations(self._tokens.log_kernel, self._tokens.values, self._n)
        return ops.cosine(self._tokens.sign * before, self.labels), ops.cosine(self._tokens.sign * after, self.labels)

    def log_step_norms(self) -> Float[Tensor, " demo"]:
        """log of |v_j| sqrt(kappa(k_j, k_j)) / |D|: the size of each demonstration's part of the gradient step."""
        diagonal = self._tokens.log_kernel.log_size.diagonal()[: self._n]
        return self.labels.norm(dim=-1).log() + diagonal / 2 - self._tokens.log_normalizer

    @checked
    def bound(
        self,
        delta: Annotated[float, Within(above=0, below=1)] = 0.05,
        n_negative: Annotated[int, Within(0)] = 0,
        beta: Finite = 0.0,
    ) -> dual_layers.BoundTerms:
        """The terms of the generalization bound (th. 3.2) for this training set, with w = |W_1|, in logarithms.

        Args:
            delta: the probability with which the bound may fail.
            n_negative: for negative samples, the number of least similar demonstrations that each one is pushed away from. The
                bound with them is kvlens' own: it rises where the paper's (app. C.2) falls (:mod:`kvlens.ops.dual_layers`).
            beta: their weight; not read without them.

        Raises:
            KVLensError: a kernel that is not positive, ``delta`` outside (0, 1), more negatives than demonstrations.
        """
        kernel = self._demonstration_kernel()
        trace = dual_layers.log_trace(kernel)
        beta = beta if n_negative else 0.0
        if n_negative:
            if not 0 < n_negative <= self._n:
                raise KVLensError(f"bound: n_negative must be 1 to {self._n} (one per demonstration), got {n_negative}")
            trace = dual_layers.log_effective_trace(kernel, _least_similar(kernel, n_negative), beta)
        predictions = _at_demonstrations(self._tokens, self._tokens.values, self._n)
        rho = torch.stack([self.labels.norm(dim=-1).max(), predictions.norm(dim=-1).max()]).max()
        norm = self._sums().square_norm(1).clamp(min=0).log() / 2
        return dual_layers.bound_terms(norm.to(trace), rho.log(), trace, self._n, self.labels.shape[-1], delta, beta)

    # --- the kernel form underneath ----------------------------------------------------------------------------------

    def _features(self) -> Tensor:
        if self._tokens.features is None:
            raise KVLensError(
                "dual model: the exact softmax kernel has no finite features, so W has no explicit form (everything else "
                "works); use kernel='random' or kernel='landmark' for finite features"
            )
        return self._tokens.features

    def _inverse(self) -> Tensor:
        return self._tokens.sign * (-self._tokens.log_normalizer).exp()

    def _demonstration_kernel(self) -> ops.LogKernel:
        kernel, N = self._tokens.log_kernel, self._n
        return ops.LogKernel(kernel.log_size[:N, :N], None if kernel.sign is None else kernel.sign[:N, :N])

    def _predictions(self) -> Tensor:
        """W phi(k_j) with the current W."""
        return _at_demonstrations(self._tokens, self._coefficients, self._n)

    def _coefficients_of_gradient(self, eta: float) -> Tensor:
        """-eta D dL/df(k_j), by autograd on the predictions."""
        predictions = self._predictions().detach().requires_grad_()
        loss = ops.loss_of_predictions(predictions, self.labels, self.normalizer, eta)
        return -eta * self.normalizer * torch.autograd.grad(loss, predictions)[0]

    def _square_norm(self) -> Tensor:
        pairs = self._coefficients @ self._coefficients.T
        return (pairs * ops.kernel_values(self._tokens.log_kernel, -2 * self._tokens.log_normalizer)).sum()

    def _sums(self) -> ops.PairSums:
        return ops.pair_sums(self._tokens.log_kernel, self._tokens.values, self._tokens.log_normalizer, self._n)


def _check_rates(eta: object, alpha: object) -> None:
    ensure("dual model: eta, the learning rate,", Annotated[float, Within(above=0)], eta)
    ensure("dual model: alpha", Finite, alpha)


def _check_demonstrations(n: int, n_virtual: int, query: int) -> None:
    if n < 0 or n + n_virtual == 0:
        raise KVLensError(f"dual model: the query at position {query} has no demonstrations in front of it; give at least one")
    if query < n:
        raise KVLensError(
            f"dual model: the query at position {query} stands before its {n} demonstrations; it must be at {n} or behind"
        )


def _at_demonstrations(tokens: HeadTokens, coefficients: Tensor, n: int) -> Tensor:
    """sum_t (c_t / D) kappa(t, j), for the n demonstrations j."""
    kappa = ops.kernel_values(tokens.log_kernel, -tokens.log_normalizer)[:, :n]
    return tokens.sign * kappa.T @ coefficients


def _least_similar(kernel: ops.LogKernel, k: int) -> Tensor:
    """The k demonstrations with the lowest kernel value, row by row."""
    peak = kernel.log_size.amax(dim=-1, keepdim=True)
    lowest = ops.kernel_values(kernel, -peak).topk(k, dim=-1, largest=False).indices
    return torch.zeros_like(kernel.log_size, dtype=torch.bool).scatter_(-1, lowest, True)


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
    reading: LayerReading, order: list[int], kernel: KernelName, n_features: int | None, seed: int
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
        (phi_k, log_k), (phi_q, log_q) = (ops.scaled_random_features(x, drawn, reading.scale) for x in (keys, query))
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
