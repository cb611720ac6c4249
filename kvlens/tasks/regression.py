r"""In-context regression: learn a function from the examples in the prompt, without changing the weights.

A prompt P = (x_1, f(x_1), ..., x_k, f(x_k), x') is answered by T(P) ~ f(x'). Each sequence draws its own f, and contains the
prompts of k = 0, 1, ..., n_points - 1 examples at once:

    position 2 i        [x_i | 0]        scored: the prediction of f(x_i) from the i examples before it
    position 2 i + 1    [0 | y_i]        y_i = f(x_i) + noise: the example is complete

so ``inputs`` is Float[batch 2*n_points-1 dimensions+1] (the last point needs no answer) and the targets are numbers. The target
is f(x_i) without noise. Points are x ~ N(0, I) and the function classes have variance 1 (`FUNCTION_CLASSES`), so always
predicting 0 has a squared error of 1.

Held-out sequences may come from another distribution (``heldout_shift``), to distinguish an algorithm from memorization:

==============  =============================================================================================
none            as in training
scaled_inputs   all points scaled by 3
skewed_inputs   coordinate i has a variance in proportion to 1 / i^2 (i = 1 ... d), their sum still d
orthant         all examples are in one random orthant, the last point anywhere; only the last point is scored
noisy           noise of standard deviation 1 on the y_i of the prompt
==============  =============================================================================================

Source: Garg, Tsipras, Liang, Valiant 2022, What Can Transformers Learn In-Context?, sec. 2-4; LECTURE.

**The functions** R^d -> R: each entry of `FUNCTION_CLASSES` draws one random function per row and evaluates it at the row's
points. They are scaled so that over functions and standard normal points x ~ N(0, I) the value has mean 0 and variance 1 for
every d:

=================  =====================================================  =================================================
class              f(x)                                                   why the variance is 1
=================  =====================================================  =================================================
linear             w.x, w ~ N(0, I/d)                                     E|w|^2 = 1
sparse_linear      w.x, 3 coordinates of w ~ N(0, 1/3), the others 0      E|w|^2 = 1
trigonometric      sqrt(2) sin(w.x + c), w ~ N(0, I/d), c ~ U(0, 2 pi)    sin^2 averages to 1/2 over the phase
exponential        (exp(w.x/2) - m) / s, w uniform with |w| = 1           w.x ~ N(0, 1); m, s: mean and deviation of the
                                                                          lognormal exp(w.x/2)
decision_tree      the leaf that x reaches in a full tree of depth 4;     leaves ~ N(0, 1)
                   a node sends x right if its coordinate is positive
two_layer_relu     a.relu(W x), 100 hidden units, W ~ N(0, 1/d),          E relu(W x)^2 = 1/2, times 2/100, times 100
                   a ~ N(0, 2/100)
=================  =====================================================  =================================================

Source: Garg, Tsipras, Liang, Valiant 2022, sec. 3-4 (linear, sparse, trees, ReLU networks; their scales grow with d); LECTURE
(T(P) ~ f(x')); DUAL sec. 5 (linear, trigonometric, exponential).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.checks import Within, checked, one_of
from kvlens.errors import KVLensError
from kvlens.model import HookedKVRegressor, HookedKVTransformerConfig
from kvlens.tasks.task import Batch, Model, Task, draw_distinct

Points = Float[Tensor, "batch point dim"]
FunctionValues = Float[Tensor, "batch point"]

SPARSITY = 3
TREE_DEPTH = 4
N_HIDDEN = 100


def linear(x: Points, generator: torch.Generator) -> FunctionValues:
    """w.x with w ~ N(0, I/d)."""
    return _project(x, _directions(x, generator))


def sparse_linear(x: Points, generator: torch.Generator) -> FunctionValues:
    """w.x where all but SPARSITY coordinates of w are 0; d must be at least that."""
    batch, _, dim = x.shape
    places = draw_distinct(dim, batch, SPARSITY, generator)
    values = torch.randn(batch, SPARSITY, generator=generator) / math.sqrt(SPARSITY)
    return _project(x, torch.zeros(batch, dim).scatter_(1, places, values))


def trigonometric(x: Points, generator: torch.Generator) -> FunctionValues:
    """A sine wave along a random direction, with a random phase."""
    w = _directions(x, generator)
    phase = 2 * math.pi * torch.rand(len(x), 1, generator=generator)
    return math.sqrt(2) * torch.sin(_project(x, w) + phase)


def exponential(x: Points, generator: torch.Generator) -> FunctionValues:
    """exp(w.x/2) with |w| = 1, standardized to mean 0 and variance 1."""
    w = torch.nn.functional.normalize(_directions(x, generator), dim=1)
    variance = 0.25  # of w.x/2; exp of it is lognormal
    mean = math.exp(variance / 2)
    deviation = mean * math.sqrt(math.expm1(variance))
    return (torch.exp(_project(x, w) / 2) - mean) / deviation


def decision_tree(x: Points, generator: torch.Generator) -> FunctionValues:
    """The value of the leaf that x reaches."""
    batch, n_points, dim = x.shape
    # Nodes are numbered as in a heap: the children of node n are 2n + 1 and 2n + 2, and the leaves come last.
    n_inner = 2**TREE_DEPTH - 1
    coordinate = torch.randint(dim, (batch, n_inner), generator=generator)
    leaves = torch.randn(batch, n_inner + 1, generator=generator)
    node = torch.zeros(batch, n_points, dtype=torch.long)
    for _ in range(TREE_DEPTH):
        asked = coordinate.gather(1, node)
        node = 2 * node + 1 + (x.gather(2, asked[:, :, None]).squeeze(2) > 0).long()
    return leaves.gather(1, node - n_inner)


def two_layer_relu(x: Points, generator: torch.Generator) -> FunctionValues:
    """A network with one hidden layer of ReLU units."""
    batch, _, dim = x.shape
    w = torch.randn(batch, dim, N_HIDDEN, generator=generator) / math.sqrt(dim)
    a = torch.randn(batch, N_HIDDEN, generator=generator) * math.sqrt(2 / N_HIDDEN)
    return _project(torch.relu(x @ w), a)


def _directions(x: Points, generator: torch.Generator) -> Float[Tensor, "batch dim"]:
    """One vector ~ N(0, I/d) per row."""
    return torch.randn(len(x), x.shape[2], generator=generator) / math.sqrt(x.shape[2])


def _project(x: Points, w: Float[Tensor, "batch dim"]) -> FunctionValues:
    return torch.einsum("bpd,bd->bp", x, w)


FUNCTION_CLASSES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "linear": linear,
    "sparse_linear": sparse_linear,
    "trigonometric": trigonometric,
    "exponential": exponential,
    "decision_tree": decision_tree,
    "two_layer_relu": two_layer_relu,
}


SHIFTS = ("none", "scaled_inputs", "skewed_inputs", "orthant", "noisy")
INPUT_SCALE = 3.0
HELDOUT_NOISE = 1.0


@dataclass(frozen=True)
class RegressionTask(Task):
    """Predict f(x) from examples of f.

    Attributes:
        functions: the class that f is drawn from, a key of `FUNCTION_CLASSES`.
        dimensions: dimensions of a point x.
        n_points: points of a sequence; the last one has no answer.
        noise: standard deviation of the noise on the y of the examples.
        heldout_shift: how held-out sequences differ, one of SHIFTS.
    """

    name: ClassVar[str] = "regression"
    predicts: ClassVar[str] = "numbers"

    functions: one_of(FUNCTION_CLASSES) = "linear"  # type: ignore[valid-type]
    dimensions: Annotated[int, Within(1)] = 8
    n_points: Annotated[int, Within(2)] = 25
    noise: Annotated[float, Within(0.0, 100.0)] = 0.0
    heldout_shift: one_of(SHIFTS) = "none"  # type: ignore[valid-type]

    def __post_init__(self):
        super().__post_init__()
        if self.functions == "sparse_linear" and self.dimensions <= SPARSITY:
            raise KVLensError(
                f"task 'regression': sparse_linear uses {SPARSITY} of more coordinates, got dimensions={self.dimensions}"
            )

    @property
    def n_positions(self) -> int:
        return 2 * self.n_points - 1

    @property
    def d_input(self) -> int:
        return self.dimensions + 1

    @property
    def d_vocab(self) -> int:
        """1, the smallest value that a configuration allows; there is no vocabulary."""
        return 1

    @checked
    def new_model(self, cfg: HookedKVTransformerConfig) -> Model:
        return HookedKVRegressor(cfg, self.d_input)

    def check_fit(self, model: Model) -> None:
        self._check_kind(model, HookedKVRegressor)
        has = model.d_input
        if has != self.d_input:
            raise self._misfit(f"uses {self.d_input} numbers per position (d_input), the model has {has}; make them fit")
        self._check_length(model)

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)
        shift = self.heldout_shift if split == "heldout" else "none"
        x = self._draw_points(batch_size, generator, shift)
        values = FUNCTION_CLASSES[self.functions](x, generator)
        noise = HELDOUT_NOISE if shift == "noisy" else self.noise
        examples = values + noise * torch.randn(values.shape, generator=generator)

        inputs = torch.zeros(batch_size, self.n_positions, self.dimensions + 1)
        inputs[:, 0::2, :-1] = x
        inputs[:, 1::2, -1] = examples[:, :-1]
        targets = torch.zeros(batch_size, self.n_positions)
        targets[:, 0::2] = values
        scored = torch.zeros(batch_size, self.n_positions, dtype=torch.bool)
        scored[:, 0::2] = True
        if shift == "orthant":
            scored[:, :-1] = False
        return Batch(inputs, targets, scored)

    @checked
    def points_and_values(
        self, inputs: Float[Tensor, "batch pos d_input"]
    ) -> tuple[Float[Tensor, "batch point dim"], Float[Tensor, "batch point_minus_1"]]:
        """Split ``inputs`` into all points x and the y of all but the last, as least squares takes them."""
        return inputs[:, 0::2, :-1], inputs[:, 1::2, -1]

    def _draw_points(self, batch_size: int, generator: torch.Generator, shift: str) -> Float[Tensor, "batch point dim"]:
        x = torch.randn(batch_size, self.n_points, self.dimensions, generator=generator)
        if shift == "scaled_inputs":
            return INPUT_SCALE * x
        if shift == "skewed_inputs":
            deviation = 1 / torch.arange(1, self.dimensions + 1)
            return x * deviation * (self.dimensions / deviation.square().sum()).sqrt()
        if shift == "orthant":
            signs = torch.randint(2, (batch_size, 1, self.dimensions), generator=generator) * 2 - 1
            return torch.cat([x[:, :-1].abs() * signs, x[:, -1:]], dim=1)
        return x
