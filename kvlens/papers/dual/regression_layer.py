"""The paper's own model: one attention layer that predicts y for the last of N + 1 tokens, and its variants (DUAL sec. 5).

A token is (x, y); the last one's y is 0 and is predicted. Attention is self-attention over all tokens, softmax, one head, with
square W_Q, W_K, W_V. The task is one fixed W; every sequence draws new x. Many seeds train at once, one per row of every
tensor: each has its own task, initialization and sequences, and plain gradient descent on the sum of their losses keeps them
independent.

| task | y | x |
|---|---|---|
| linear | W x | uniform in [-1, 1] |
| trigonometric | cos(W x) | uniform in [-1, 1] |
| exponential | exp(W x) | uniform in [-1, 1] |

with the entries of W normal, of variance 1 / d_x.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import gelu, normalize, pad

from kvlens.ops.attention_variants import augment, lowest_scored, mean_of_negatives
from kvlens.papers.harness.run import Settings

TASKS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda y: y, "trigonometric": torch.cos, "exponential": torch.exp}

N_EVALUATIONS = 20
BLOCK = 100
"""The number of steps whose sequences are drawn at once."""


Sequences = tuple[Float[Tensor, "seed batch token d"], Float[Tensor, "seed batch"]]
"""Tokens with the last label hidden, and that label."""


@dataclass(frozen=True)
class Variant:
    """One of the paper's changes to the layer; the defaults are plain attention.

    Attributes:
        alpha: regularization.
        form: "normalised", (z_i - alpha v_i) / (1 - alpha) (app. D.1), or "one_step", z_i - alpha p_ii v_i (eq. 13).
        key_depth, value_depth: layers of the MLP on keys and on values; 0 for none.
        negatives: k, the number of tokens with the lowest scores taken as negative.
        beta: their weight.
        per: "query" or "label".
        choice: what is negative: tokens of the "lowest scores", those "least alike" the query's own, or "noise" (app. D.3).
        convolved: whether values are g(v_{t-1}, v_t, v_{t+1}), a convolution over tokens, with the MLP's activation (app. D.2).
        several: whether each sequence has a task of its own, another W; of what the layer is trained on, not of the layer.
    """

    alpha: float = 0.0
    form: str = "normalised"
    key_depth: int = 0
    value_depth: int = 0
    negatives: int = 0
    beta: float = 0.0
    per: str = "query"
    choice: str = "lowest scores"
    convolved: bool = False
    several: bool = False


@dataclass
class RegressionLayer:
    """Weights of every seed."""

    W_Q: Float[Tensor, "seed d d"]
    W_K: Float[Tensor, "seed d d"]
    W_V: Float[Tensor, "seed d d"]
    variant: Variant
    key_mlp: list[Tensor] = field(default_factory=list)
    value_mlp: list[Tensor] = field(default_factory=list)
    noise: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    @property
    def parameters(self) -> list[Tensor]:
        """Return all parameters."""
        return [self.W_Q, self.W_K, self.W_V, *self.key_mlp, *self.value_mlp]

    def outputs(self, x: Float[Tensor, "seed batch token d"], last: int | None = None) -> Float[Tensor, "seed batch query d"]:
        """z of every token, or of the ``last`` ones."""
        variant = self.variant
        whole = last is None or (variant.negatives > 0 and variant.per == "label")  # each token has negatives of its own
        n = x.shape[-2] if last is None else last
        q, k, v = self.projections(x, None if whole else n)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        pattern = scores.softmax(dim=-1)
        z = pattern @ v
        if variant.negatives:
            mean = self.mean_negative(x, v, scores)
            z = z - variant.beta * (mean if variant.per == "query" else pattern @ mean)
        if variant.alpha:
            own, past = v[..., -z.shape[-2] :, :], pattern.shape[-1] - pattern.shape[-2]
            share = pattern.diagonal(past, dim1=-2, dim2=-1)[..., None] if variant.form == "one_step" else 1.0
            z = (z - variant.alpha * share * own) / (1 if variant.form == "one_step" else 1 - variant.alpha)
        return z[..., -n:, :]

    def projections(self, x: Tensor, n_queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v after their MLPs; q of the last ``n_queries`` tokens, or of all."""
        asked = x if n_queries is None else x[..., -n_queries:, :]
        q, k, v = (_per_seed(tokens, [w]) for tokens, w in ((asked, self.W_Q), (x, self.W_K), (x, self.W_V)))
        return q, _per_seed(k, self.key_mlp, gelu), self.augmented(v)

    def augmented(self, v: Tensor) -> Tensor:
        """Values after their MLP, or their convolution."""
        if not self.variant.convolved:
            return _per_seed(v, self.value_mlp, gelu)
        moved = (pad(v, (0, 0, 1, 1))[..., by : by + v.shape[-2], :] for by in range(3))
        return gelu(torch.stack([_per_seed(x, [w]) for x, w in zip(moved, self.value_mlp, strict=True)]).sum(dim=0))

    def mean_negative(self, x: Tensor, v: Tensor, scores: Tensor) -> Float[Tensor, "seed batch #query d"]:
        """Mean value of each query's negatives; noise is drawn anew in each pass, as x is, and is the same for all seeds."""
        k, choice = self.variant.negatives, self.variant.choice
        if choice == "noise":
            drawn = torch.rand(1, x.shape[1], k, x.shape[-1], generator=self.noise, dtype=x.dtype) * 2 - 1
            return self.augmented(_per_seed(drawn.expand(len(x), -1, -1, -1), [self.W_V])).mean(dim=-2, keepdim=True)
        unit = normalize(x, dim=-1)
        alike = scores if choice == "lowest scores" else unit[..., -scores.shape[-2] :, :] @ unit.mT
        visible = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, *scores.shape[-2:])
        return mean_of_negatives(v, lowest_scored(alike, visible, k))


def _per_seed(x: Tensor, weights: list[Tensor], activation: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """One MLP per seed over all its tokens in one product; ``augment`` takes it for an MLP per head."""
    return (
        augment(x.flatten(1, 2).transpose(0, 1)[None], weights, activation)[0].transpose(0, 1).view(x.shape) if weights else x
    )


def draw_tasks(seeds: list[int], d_x: int) -> Float[Tensor, "seed d_x"]:
    """W of every seed's task."""
    return torch.stack([torch.randn(d_x, generator=_generator(seed, 1), dtype=torch.float64) for seed in seeds]) / d_x**0.5


def draw_sequences(
    W: Float[Tensor, "seed d_x"],
    task: str,
    seeds: list[int],
    stream: int,
    n_sequences: int,
    n_demonstrations: int,
    several: bool = False,
) -> Sequences:
    """Sequences of N demonstrations and a query for every seed; with ``several`` each has its W; ``stream`` names the draw."""
    shape = (n_sequences, n_demonstrations + 1, W.shape[1])
    x = torch.stack([torch.rand(shape, generator=_generator(seed, stream), dtype=torch.float64) * 2 - 1 for seed in seeds])
    W = W[:, None].expand(-1, n_sequences, -1)
    if several:
        own = [torch.randn(W.shape[1:], generator=_generator(seed, -1 - stream), dtype=torch.float64) for seed in seeds]
        W = torch.stack(own) / W.shape[-1] ** 0.5
    y = TASKS[task](torch.einsum("sbtd,sbd->sbt", x, W))
    answers = y[..., -1].clone()
    y[..., -1] = 0
    return torch.cat([x, y[..., None]], dim=-1), answers


def draw_layer(seeds: list[int], d: int, variant: Variant, stream: int = 2) -> RegressionLayer:
    """Normal weights of variance 1 / d, the same for every variant of a seed."""

    def weights(n: int) -> Tensor:
        drawn = [torch.randn(d, d, generator=_generator(seed, stream * 100 + n), dtype=torch.float64) for seed in seeds]
        return (torch.stack(drawn) / d**0.5).requires_grad_()

    keys = [weights(10 + i) for i in range(variant.key_depth)]
    values = [weights(20 + i) for i in range(3 if variant.convolved else variant.value_depth)]
    return RegressionLayer(weights(1), weights(2), weights(3), variant, keys, values)


def squared_errors(layer: RegressionLayer, sequences: Sequences) -> Float[Tensor, " seed"]:
    """Mean squared error of the last token's label, of every seed."""
    tokens, answers = sequences
    return (layer.outputs(tokens, last=1)[..., -1, -1] - answers).square().mean(dim=1)


def train_layer(
    layer: RegressionLayer,
    W: Float[Tensor, "seed d_x"],
    settings: Settings,
    task: str,
    steps: int,
    seeds: list[int],
    rates: Float[Tensor, " seed"],
) -> list[tuple[int, Float[Tensor, " seed"]]]:
    """Plain gradient descent; a course of held-out errors.

    Args:
        layer: changed in place.
        W: W of every seed's task.
        settings: ``batch_size`` (1: an update for each sequence, as in the paper), ``heldout_sequences``,
            ``n_demonstrations``.
        task: a key of `TASKS`.
        steps: number of updates.
        seeds: seeds of the rows; rows with the same seed have the same sequences.
        rates: learning rate of every row.

    Returns:
        (step, error) at every evaluation, including the last step. Errors are those of the last label, over the variance of the
        held-out labels: 1 for the best constant prediction, infinite for a row that diverged.
    """
    n, several = settings["n_demonstrations"], layer.variant.several
    drawn = list(dict.fromkeys(seeds))
    rows = torch.tensor([drawn.index(seed) for seed in seeds])
    own = W[[seeds.index(seed) for seed in drawn]]

    def sequences(stream: int, n_sequences: int) -> Sequences:
        tokens, answers = draw_sequences(own, task, drawn, stream, n_sequences, n, several)
        return tokens[rows], answers[rows]

    heldout = sequences(3, settings["heldout_sequences"])
    variance = heldout[1].var(dim=1, correction=0)
    course, every = [], max(1, steps // N_EVALUATIONS)
    for block in range(0, steps + 1, BLOCK):
        tokens, answers = sequences(1000 + block, BLOCK * settings["batch_size"])
        for step in range(block, min(block + BLOCK, steps + 1)):
            if step % every == 0 or step == steps:
                with torch.no_grad():
                    error = squared_errors(layer, heldout) / variance
                course.append((step, error.where(error.isfinite(), torch.inf)))
            if step == steps:
                break
            here = slice((step - block) * settings["batch_size"], (step - block + 1) * settings["batch_size"])
            loss = squared_errors(layer, (tokens[:, here], answers[:, here])).sum()
            gradients = torch.autograd.grad(loss, layer.parameters)
            with torch.no_grad():
                for parameter, gradient in zip(layer.parameters, gradients, strict=True):
                    parameter -= rates.view(-1, 1, 1) * gradient
    return course


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + stream)
