"""How the effect of each unit on an answer is found: methods, each one class with its options and one verb, ``explain``.

All of them read counterfactual prompts (units removed) and ask for the answer's log-probability f after each:

- `LeaveOneOut`: f(whole) - f(without u), one counterfactual a unit. No fit, and the definition of a total effect.
- `InteractionFit`: the logits of the probabilities of the answer's tokens over random subsets of the units, each fitted by a
  sum over units and pairs. A unit's Gaussian prior has one width for all tokens; a pair's is narrower than both of its
  units', so that only units that matter interact.
- `ContextCite`: a sum over units alone, by lasso, as published (Cohen-Wang et al. 2024, arXiv 2409.00729).

A method of your own is a class with ``explain``; a line in `ATTRIBUTION_METHODS` names it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import Counterfactuals, KVLensError
from kvlens.checks import Finite, Seed, Within, checked, ensure, one_of
from kvlens.units import Unit, positions_of

from .answers import Question

Predict = Callable[[Bool[Tensor, "row unit"]], Float[Tensor, " row"]]


class Explanation(NamedTuple):
    """What a method found.

    Attributes:
        effects: f(whole) - f(without the unit), measured or predicted, nats.
        predict: f for any choice of units that are kept, as the method sees it.
        whole: f of the whole prompt as measured; None where the method did not read it.
        without: f without each unit as measured; None where the method did not read them.
    """

    effects: Float[Tensor, " unit"]
    predict: Predict
    whole: float | None = None
    without: Float[Tensor, " unit"] | None = None


@runtime_checkable
class Method(Protocol):
    """What every method has."""

    def explain(self, question: Question, units: list[Unit]) -> Explanation:
        """The effect of each unit."""


def subset_rows(question: Question, units: list[Unit], kept: Bool[Tensor, "row unit"]) -> Counterfactuals:
    """The prompt without some units; tokens of no unit stay."""
    return question.rows(((~kept).float() @ positions_of(units, len(question.prompt)).float()) > 0)


def subset_scores(question: Question, units: list[Unit], kept: Bool[Tensor, "row unit"]) -> Float[Tensor, " row"]:
    """f with some units removed from the prompt."""
    return question.scores(subset_rows(question, units, kept))


@dataclass(frozen=True)
class LeaveOneOut:
    """Each unit removed in turn: one counterfactual prompt a unit, and the prompt itself."""

    def explain(self, question: Question, units: list[Unit]) -> Explanation:
        """The effects, and their sum as a prediction for subsets."""
        n = len(units)
        kept = torch.cat([torch.ones(1, n, dtype=torch.bool), ~torch.eye(n, dtype=torch.bool)])
        scores = subset_scores(question, units, kept)
        effects = scores[0] - scores[1:]

        def predict(rows: Tensor) -> Tensor:
            return scores[0] - (~rows).double() @ effects

        return Explanation(effects, predict, float(scores[0]), scores[1:])


def chosen_subsets(n_subsets: int, n_units: int, seed: int) -> Bool[Tensor, "row unit"]:
    """The whole, then random subsets, each unit kept with probability one half."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(n_subsets - 1, n_units, generator=generator) < 0.5
    return torch.cat([torch.ones(1, n_units, dtype=torch.bool), drawn])


def logit_of(log_p: Float[Tensor, " row"]) -> Float[Tensor, " row"]:
    """log(p / (1 - p)): differences near certainty and near 0 count alike."""
    log_p = log_p.clamp(max=-1e-12)
    return log_p - torch.log(-torch.expm1(log_p))


@checked
@dataclass(frozen=True)
class InteractionFit:
    """Sums over units and pairs for the logits of the answer's tokens, or for the difference to a rival, fitted to subsets.

    Each token has a sum of its own, because each saturates by itself: once it is certain, more evidence for it changes nothing.

    Attributes:
        n_subsets: prompts that are read, the whole one included.
        seed: of the subsets.
    """

    n_subsets: Annotated[int, Within(4, 2**20)] = 32
    seed: Seed = 0

    def explain(self, question: Question, units: list[Unit]) -> Explanation:
        """Effects at the whole prompt, as the fit predicts them."""
        kept = chosen_subsets(self.n_subsets, len(units), self.seed)
        if question.rival is not None:
            scores = subset_scores(question, units, kept)[:, None]
            predict = in_sum(fitted(kept, scores))
        else:
            scores = question.token_scores(subset_rows(question, units, kept))
            predict = in_sum(fitted(kept, logit_of(scores)), torch.nn.functional.logsigmoid)
        return Explanation(_effects(predict, len(units)), predict, float(scores[0].sum()))


def in_sum(of_each: Callable[[Tensor], Tensor], link: Callable[[Tensor], Tensor] = lambda x: x) -> Predict:
    """The sum of what is predicted for each target, after ``link``."""
    return lambda rows: link(of_each(rows)).sum(dim=1)


def _effects(predict: Predict, n_units: int) -> Float[Tensor, " unit"]:
    """Predicted: of the whole, less that without each unit."""
    return predict(torch.ones(1, n_units, dtype=torch.bool)) - predict(~torch.eye(n_units, dtype=torch.bool))


PAIRS = 0.2
"""Prior variance of a pair's weight over the product of its units' own; from 0.1 to 0.4, predictions are as good (SmolLM2)."""


def fitted(kept: Bool[Tensor, "row unit"], targets: Float[Tensor, "row target"]) -> Callable[[Tensor], Tensor]:
    """Bayesian regression of several targets on units and pairs, the widths of the priors chosen by all targets' evidence.

        y_t(x) = w_t0 + sum_u w_tu x_u + sum_{u<v} w_tuv x_u x_v + noise        x_u = 1 kept, -1 gone, y_t standardized
        w_tu ~ N(0, a_t b_u)     w_tuv ~ N(0, c a_t b_u b_v)     w_t0 ~ N(0, a_t / 2)     noise ~ N(0, s_t)     sum_u b_u = 1

    b, a and s maximize the evidence times priors that are log-normal, c is `PAIRS`. The evidence is computed by the kernel, a
    matrix of the subsets. Targets that hardly move are left at their mean.

    Source: MacKay 1992, Bayesian interpolation (evidence); Neal 1996 (a width for each input).

    Args:
        kept: the subsets.
        targets: what was measured after each.

    Returns:
        From subsets [row, unit] to predictions [row, target].
    """
    x, middle, spread = signs(kept), targets.mean(dim=0), targets.std(dim=0)
    moves = spread > 1e-3
    y = ((targets - middle) / spread)[:, moves].double().T[..., None]
    log_b, log_a = torch.zeros(kept.shape[1], dtype=torch.float64), torch.zeros(len(y), dtype=torch.float64)
    log_s = torch.full((len(y),), -2.0, dtype=torch.float64)

    def kernel(rows: Tensor) -> Tensor:
        b = log_b.softmax(dim=0)
        one = (rows * b) @ x.T
        return 0.5 + one + PAIRS * over_pairs(one, b)

    def cholesky() -> Tensor:
        noise = (log_s.exp() + 1e-5)[:, None, None] * torch.eye(len(x), dtype=torch.float64)
        return torch.linalg.cholesky(log_a.exp()[:, None, None] * kernel(x) + noise)

    def loss() -> Tensor:
        optimizer.zero_grad()
        root = cholesky()
        fit = (torch.cholesky_solve(y, root) * y).sum() / 2 + root.diagonal(dim1=1, dim2=2).log().sum()
        # standard deviations of the logarithms: 1, 2 and 1.5, the latter around a noise of e^-2 of the variance
        prior = log_b.square().sum() / 2 + log_a.square().sum() / 8 + (log_s + 2.0).square().sum() / 4.5
        (fit + prior).backward()
        return fit + prior

    free = [log_b.requires_grad_(), log_a.requires_grad_(), log_s.requires_grad_()]
    optimizer = torch.optim.LBFGS(free, lr=0.5, max_iter=60, line_search_fn="strong_wolfe")
    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        weights = torch.zeros(len(spread), len(x), dtype=torch.float64)
        weights[moves] = torch.cholesky_solve(y, cholesky())[..., 0] * (log_a.exp() * spread[moves])[:, None]

    @torch.no_grad()
    def predict(rows: Bool[Tensor, "row unit"]) -> Float[Tensor, "row target"]:
        return middle + kernel(signs(rows)) @ weights.T

    return predict


def signs(kept: Bool[Tensor, "row unit"]) -> Float[Tensor, "row unit"]:
    """1 kept, -1 gone."""
    return 2.0 * kept.double() - 1.0


def over_pairs(products: Float[Tensor, "row other"], width: Float[Tensor, " unit"]) -> Float[Tensor, "row other"]:
    """sum over u < v of (w_u x_u y_u) (w_v x_v y_v), for rows x, y of plus and minus ones.

    Args:
        products: sum over u of w_u x_u y_u, for each two rows.
        width: w.
    """
    return (products.square() - width.square().sum()) / 2  # (x_u y_u)^2 = 1: without the squares, each pair stands there twice


@checked
@dataclass(frozen=True)
class ContextCite:
    """The published linear surrogate: lasso on the logit of the answer's probability (arXiv 2409.00729, sec. 3).

    As the authors' package does (context-cite 0.0.4): the logit over the number of the answer's tokens is fitted on
    standardized masks of independent subsets, and the weights are multiplied by that number again.

    Attributes:
        n_subsets: prompts that are read.
        seed: of the subsets.
        penalty: of the lasso; 0.01 in the package.
    """

    n_subsets: Annotated[int, Within(4, 2**20)] = 32
    seed: Seed = 0
    penalty: Finite = 0.01

    def explain(self, question: Question, units: list[Unit]) -> Explanation:
        """The lasso's weights, on the scale of logits, and the log-probabilities that they predict."""
        if question.rival is not None:
            raise KVLensError("ContextCite: it explains one answer's probability; leave the rival out, or take InteractionFit")
        generator = torch.Generator().manual_seed(self.seed)
        kept = torch.rand(self.n_subsets, len(units), generator=generator) < 0.5
        n_tokens = len(question.answer)
        intercept, weights = lasso(kept.double(), logit_of(subset_scores(question, units, kept)) / n_tokens, self.penalty)

        def predict(rows: Tensor) -> Tensor:
            return torch.nn.functional.logsigmoid(n_tokens * (intercept + rows.double() @ weights))

        return Explanation(_effects(predict, len(units)), predict)


def lasso(x: Float[Tensor, "row unit"], y: Float[Tensor, " row"], penalty: float) -> tuple[Tensor, Float[Tensor, " unit"]]:
    """Intercept and weights that minimize |y - b - a w|^2 / (2 n) + penalty |w|_1, a being x over its standard deviation.

    By coordinate descent (Friedman, Hastie, Tibshirani 2010). The weights are those of x itself.
    """
    scale = x.std(dim=0, correction=0)
    a = (x - x.mean(dim=0)) / scale.where(scale > 0, 1.0)  # a column that never changes is 0 and gets no weight
    weights, left = torch.zeros(x.shape[1], dtype=x.dtype), y - y.mean()
    for _ in range(1000):
        before = weights.clone()
        for u in torch.nonzero(scale)[:, 0].tolist():
            pull = (a[:, u] @ left) / len(y) + weights[u]
            new = torch.sign(pull) * (pull.abs() - penalty).clamp(min=0)
            left, weights[u] = left + a[:, u] * (weights[u] - new), new
        if float((weights - before).abs().max()) < 1e-9:
            break
    weights = weights / scale.where(scale > 0, 1.0)
    return y.mean() - x.mean(dim=0) @ weights, weights


ATTRIBUTION_METHODS: dict[str, Callable[[], Method]] = {
    "leave_one_out": LeaveOneOut,
    "interactions": InteractionFit,
    "contextcite": ContextCite,
}
"""The methods of `prompt_attribution` by name, also on the command line."""


def attribution_method(method: str | Method) -> Method:
    """A method by its name with its default options, or the method that was given.

    Raises:
        KVLensError: no method has this name.
    """
    if isinstance(method, str):
        return ATTRIBUTION_METHODS[ensure("method", one_of(ATTRIBUTION_METHODS), method)]()
    return method
