"""The paper's own model: one attention layer that predicts y for the last of N + 1 tokens, and its variants (DUAL sec. 5).

A token is (x, y); the last one's y is 0 and is predicted. Attention is self-attention over all tokens, softmax, one head, with
square W_Q, W_K, W_V. The task is one fixed W; every sequence draws new x. Many seeds train at once, one per row of every
tensor: each has its own task, its own start and its own sequences, and plain gradient descent on the sum of their losses keeps
them apart.

| task | y | x |
|---|---|---|
| linear | W x | uniform in [-1, 1] |
| trigonometric | cos(W x) | uniform in [-1, 1] |
| exponential | exp(W x) | uniform in [-1, 1] |

with the entries of W normal, of variance 1 / d_x.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.ops.attention_variants import augment, lowest_scored, mean_of_negatives

TASKS: dict[str, Callable[[Tensor], Tensor]] = {"linear": lambda y: y, "trigonometric": torch.cos, "exponential": torch.exp}


class Sequences(NamedTuple):
    """Tokens with the last label hidden, and that label."""

    tokens: Float[Tensor, "seed batch token d"]
    answers: Float[Tensor, "seed batch"]


@dataclass(frozen=True)
class Variant:
    """One of the paper's changes to the layer; the defaults are plain attention.

    Attributes:
        alpha: regularised: z_i - alpha v_i, over 1 - alpha where ``normalised``.
        normalised: see ``alpha``.
        key_depth, value_depth: layers of the MLP on keys and on values; 0 for none.
        negatives: k, the tokens of lowest score taken as negative.
        beta: their weight.
        per: "query" or "label".
    """

    alpha: float = 0.0
    normalised: bool = True
    key_depth: int = 0
    value_depth: int = 0
    negatives: int = 0
    beta: float = 0.0
    per: str = "query"


@dataclass
class Layer:
    """Weights of every seed."""

    W_Q: Float[Tensor, "seed d d"]
    W_K: Float[Tensor, "seed d d"]
    W_V: Float[Tensor, "seed d d"]
    variant: Variant
    key_mlp: list[Tensor] = field(default_factory=list)
    value_mlp: list[Tensor] = field(default_factory=list)

    @property
    def parameters(self) -> list[Tensor]:
        """All of them."""
        return [self.W_Q, self.W_K, self.W_V, *self.key_mlp, *self.value_mlp]

    def outputs(self, x: Float[Tensor, "seed batch token d"]) -> Float[Tensor, "seed batch token d"]:
        """z of every token."""
        q, k, v = self.projections(x)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        variant, pattern = self.variant, scores.softmax(dim=-1)
        z = pattern @ v
        if variant.negatives:
            visible = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, *scores.shape[-2:])
            mean = mean_of_negatives(v, lowest_scored(scores, visible, variant.negatives))
            z = z - variant.beta * (mean if variant.per == "query" else pattern @ mean)
        if variant.alpha:
            z = (z - variant.alpha * v) / (1 - variant.alpha if variant.normalised else 1)
        return z

    def projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v, behind their MLPs."""
        q, k, v = (x @ w[:, None] for w in (self.W_Q, self.W_K, self.W_V))
        return q, _through(k, self.key_mlp), _through(v, self.value_mlp)


def _through(x: Tensor, mlp: list[Tensor]) -> Tensor:
    """An MLP a seed; ``augment`` has its heads in the third place."""
    return augment(x.transpose(0, 2), mlp, torch.nn.functional.gelu).transpose(0, 2) if mlp else x


def draw_tasks(seeds: list[int], d_x: int) -> Float[Tensor, "seed d_x"]:
    """W of every seed's task."""
    return torch.stack([torch.randn(d_x, generator=_generator(seed, 1), dtype=torch.float64) for seed in seeds]) / d_x**0.5


def draw_sequences(
    W: Float[Tensor, "seed d_x"], task: str, seeds: list[int], stream: int, n_sequences: int, n_demonstrations: int
) -> Sequences:
    """N demonstrations and a query, as many sequences per seed; ``stream`` numbers the draws."""
    shape = (n_sequences, n_demonstrations + 1, W.shape[1])
    x = torch.stack([torch.rand(shape, generator=_generator(seed, stream), dtype=torch.float64) * 2 - 1 for seed in seeds])
    y = TASKS[task](torch.einsum("sbtd,sd->sbt", x, W))
    answers = y[..., -1].clone()
    y[..., -1] = 0
    return Sequences(torch.cat([x, y[..., None]], dim=-1), answers)


def draw_layer(seeds: list[int], d: int, variant: Variant, stream: int = 2) -> Layer:
    """Normal weights of variance 1 / d, the same for every variant of a seed."""

    def weights(n: int) -> Tensor:
        drawn = [torch.randn(d, d, generator=_generator(seed, stream * 100 + n), dtype=torch.float64) for seed in seeds]
        return (torch.stack(drawn) / d**0.5).requires_grad_()

    keys = [weights(10 + i) for i in range(variant.key_depth)]
    values = [weights(20 + i) for i in range(variant.value_depth)]
    return Layer(weights(1), weights(2), weights(3), variant, keys, values)


def losses(layer: Layer, sequences: Sequences) -> Float[Tensor, " seed"]:
    """Mean squared error of the last token's label, of every seed."""
    predicted = layer.outputs(sequences.tokens)[..., -1, -1]
    return (predicted - sequences.answers).square().mean(dim=1)


def train_layer(
    layer: Layer, W: Tensor, settings: Mapping[str, Any], task: str, seeds: list[int], learning_rate: float
) -> list[tuple[int, Tensor]]:
    """Plain gradient descent; (step, held-out losses of the seeds) at every evaluation, the last step included."""
    n, batch, steps = settings["n_demonstrations"], settings["batch_size"], settings["steps"]
    heldout = draw_sequences(W, task, seeds, 3, settings["heldout_sequences"], n)
    course = []
    for step in range(steps + 1):
        if step % settings["eval_every"] == 0 or step == steps:
            with torch.no_grad():
                course.append((step, losses(layer, heldout)))
        if step == steps:
            break
        loss = losses(layer, draw_sequences(W, task, seeds, 1000 + step, batch, n)).sum()
        gradients = torch.autograd.grad(loss, layer.parameters)
        with torch.no_grad():
            for parameter, gradient in zip(layer.parameters, gradients, strict=True):
                parameter -= learning_rate * gradient
    return course


def _generator(seed: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed(1_000_003 * seed + stream)
