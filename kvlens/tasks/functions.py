r"""Classes of functions R^d -> R for in-context regression.

Each entry of `FUNCTION_CLASSES` draws one random function per row and evaluates it at the row's points. They are scaled so
that over functions and standard normal points x ~ N(0, I) the value has mean 0 and variance 1 for every d:

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

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.tasks.drawing import draw_distinct

Points = Float[Tensor, "batch point dim"]
Values = Float[Tensor, "batch point"]

SPARSITY = 3
TREE_DEPTH = 4
N_HIDDEN = 100


def linear(x: Points, generator: torch.Generator) -> Values:
    """w.x with w ~ N(0, I/d)."""
    return _project(x, _directions(x, generator))


def sparse_linear(x: Points, generator: torch.Generator) -> Values:
    """w.x where all but SPARSITY coordinates of w are 0; d must be at least that."""
    batch, _, dim = x.shape
    places = draw_distinct(dim, batch, SPARSITY, generator)
    values = torch.randn(batch, SPARSITY, generator=generator) / math.sqrt(SPARSITY)
    return _project(x, torch.zeros(batch, dim).scatter_(1, places, values))


def trigonometric(x: Points, generator: torch.Generator) -> Values:
    """A sine wave along a random direction, with a random phase."""
    w = _directions(x, generator)
    phase = 2 * math.pi * torch.rand(len(x), 1, generator=generator)
    return math.sqrt(2) * torch.sin(_project(x, w) + phase)


def exponential(x: Points, generator: torch.Generator) -> Values:
    """exp(w.x/2) with |w| = 1, standardized to mean 0 and variance 1."""
    w = torch.nn.functional.normalize(_directions(x, generator), dim=1)
    variance = 0.25  # of w.x/2; exp of it is lognormal
    mean = math.exp(variance / 2)
    deviation = mean * math.sqrt(math.expm1(variance))
    return (torch.exp(_project(x, w) / 2) - mean) / deviation


def decision_tree(x: Points, generator: torch.Generator) -> Values:
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


def two_layer_relu(x: Points, generator: torch.Generator) -> Values:
    """A network with one hidden layer of ReLU units."""
    batch, _, dim = x.shape
    w = torch.randn(batch, dim, N_HIDDEN, generator=generator) / math.sqrt(dim)
    a = torch.randn(batch, N_HIDDEN, generator=generator) * math.sqrt(2 / N_HIDDEN)
    return _project(torch.relu(x @ w), a)


def _directions(x: Points, generator: torch.Generator) -> Float[Tensor, "batch dim"]:
    """One vector ~ N(0, I/d) per row."""
    return torch.randn(len(x), x.shape[2], generator=generator) / math.sqrt(x.shape[2])


def _project(x: Points, w: Float[Tensor, "batch dim"]) -> Values:
    return torch.einsum("bpd,bd->bp", x, w)


FUNCTION_CLASSES: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "linear": linear,
    "sparse_linear": sparse_linear,
    "trigonometric": trigonometric,
    "exponential": exponential,
    "decision_tree": decision_tree,
    "two_layer_relu": two_layer_relu,
}
