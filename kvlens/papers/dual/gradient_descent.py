"""``gradient-descent``: von Oswald et al.'s weights: linear attention as a gradient step on the regression (DUAL app. F).

Tokens are (x_j, y_j), the query (x, -W_0 x). With W_K = W_Q = diag(I_x, 0), W_V = ((0, 0), (W_0, -I_y)) and an output
projection of eta / N, the label part of the layer's output at the query is -W x, W = W_0 after one step of gradient descent on
the mean squared error of the demonstrations. It is the dual model of that layer as well, whose training inputs are the x_j and
whose labels are the residuals W_0 x_j - y_j (eq. 37): one layer with two interpretations.
"""

import itertools
from collections.abc import Iterator

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.ops import dual
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison

LARGEST = 1e-12


@experiment(
    "DUAL app. F, eq. 35 to 38",
    "Are von Oswald et al.'s weights both a gradient step of regression and one of the dual model?",
    cost=("seconds", "seconds"),
    seeds=([0, 1], list(range(50))),
    learning_rates=[0.1, 0.5],
    d_x=7,
    d_y=3,
    n=23,
)
def gradient_descent(settings: Settings, tell: Tell) -> Reproduction:
    """Random tasks, inner models and learning rates."""
    drawn = itertools.product(settings["seeds"], settings["learning_rates"])
    tasks = pd.DataFrame([dict(seed=seed, learning_rate=eta, **_one_task(settings, seed, eta)) for seed, eta in drawn])
    tell(f"{len(tasks)} tasks")
    return Reproduction(
        tables={"tasks": tasks},
        figure=lambda: draw(tasks),
        comparisons=[*compare(tasks)],
        differences=[f"d_x {settings['d_x']}, d_y {settings['d_y']}, {settings['n']} demonstrations, random W_0."],
    )


def _one_task(settings: Settings, seed: int, eta: float) -> dict[str, float]:
    d_x, d_y, n = settings["d_x"], settings["d_y"], settings["n"]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    W, W_0, x, query = normal(d_y, d_x), normal(d_y, d_x) / 3, normal(n, d_x), normal(d_x)
    y = x @ W.T
    tokens, last = torch.cat([x, y], dim=1), torch.cat([query, -W_0 @ query])
    W_K = torch.diag(torch.cat([torch.ones(d_x), torch.zeros(d_y)])).double()
    W_V = torch.zeros(d_x + d_y, d_x + d_y, dtype=torch.float64)
    W_V[d_x:, :d_x], W_V[d_x:, d_x:] = W_0, -torch.eye(d_y, dtype=torch.float64)
    k, v, q = tokens @ W_K.T, tokens @ W_V.T, W_K @ last
    by_attention = -(last + eta / n * v.T @ (k @ q))[d_x:]

    inner = W_0.clone().requires_grad_()
    mse = ((x @ inner.T - y) ** 2).sum() / (2 * n)
    (gradient,) = torch.autograd.grad(mse, inner)
    by_descent = (W_0 - eta * gradient) @ query

    D = torch.tensor(n / eta, dtype=torch.float64)  # the layer's output projection, as a normalizer
    start = torch.zeros(d_x + d_y, d_x + d_y, dtype=torch.float64, requires_grad=True)
    loss = dual.dual_loss(start, k, v, D, eta=1.0)
    (step,) = torch.autograd.grad(loss, start)
    by_dual = -(last + (start - step) @ q)[d_x:]
    target = W @ query
    return dict(
        descent_error=float((by_attention - by_descent).norm() / by_descent.norm()),
        dual_error=float((by_attention - by_dual.detach()).norm() / by_attention.norm()),
        error_before=float((W_0 @ query - target).norm()),
        error_after=float((by_attention - target).norm()),
    )


def compare(tasks: pd.DataFrame) -> Iterator[Comparison]:
    """Compare both interpretations with the layer."""
    for column, name, claim in (
        ("descent_error", "gradient descent on the regression", "gradient descent on the squared error"),
        ("dual_error", "its dual model after one step", "its dual model (eq. 36, 37)"),
    ):
        what = f"largest relative difference of the layer and {name}"
        yield Comparison.at_most(
            what, f"the layer is one step of {claim}", float(tasks[column].max()), LARGEST, paper="0 (equal)"
        )
    ratio = float((tasks["error_after"] / tasks["error_before"]).median())
    yield Comparison.stated("error of the answer after the step over before, median", "one step, no more", ratio)


def draw(tasks: pd.DataFrame) -> Figure:
    """The answer's error before and after the step; a dot per task."""
    title = "Error with W_0 and after one linear attention layer, by learning rate; a dot per task"
    figure = draw_panels(tasks, "error_before", "error_after", by="learning_rate", title=title, dots=True)
    figure.axes[0].axline((0, 0), slope=1, color="#999999", linewidth=0.8)
    return figure
