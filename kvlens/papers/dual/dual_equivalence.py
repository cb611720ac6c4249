"""``dual-equivalence``: after one step the dual model's prediction is the attention's output (DUAL figs. 3, 11, 12, left).

A trained layer reads test sequences; for each, the dual model of the last token is built, makes one gradient step (autograd),
and predicts. The kernel is the paper's (positive random features, 100 d of them), landmarks, or the exact one; attention is
computed with the same kernel. As a control, a dual model with shuffled labels is shown as well.
"""

import itertools
from collections.abc import Iterator

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from kvlens.ops import dual
from kvlens.ops.feature_maps import draw_projections
from kvlens.papers.dual.regression_layer import Variant, draw_layer, draw_sequences, draw_tasks, train_layer
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison

KERNELS = ("random features", "landmarks", "exact")
LARGEST = 1e-10
"""Rounding of float64 sums, with a margin for features that nearly cancel."""


@experiment(
    "DUAL th. 3.1, figs. 3, 11, 12 (left)",
    "Is attention one gradient step of its dual model?",
    cost=("seconds", "about a minute on one core"),
    d_x=dict(linear=11, trigonometric=6, exponential=5),
    n_demonstrations=15,
    batch_size=8,
    steps=(4, 300),
    heldout_sequences=64,
    test_sequences=(2, 8),
    learning_rate=0.05,
    seeds=([0], [0, 1, 2]),
)
def dual_equivalence(settings: Settings, tell: Tell) -> Reproduction:
    """Train one layer per task and seed, and compare on test sequences."""
    rows = []
    for task, d_x in settings["d_x"].items():
        seeds = settings["seeds"]
        W = draw_tasks(seeds, d_x)
        layer = draw_layer(seeds, d_x + 1, Variant())
        rates = torch.full((len(seeds),), settings["learning_rate"], dtype=torch.float64)
        course = train_layer(layer, W, settings, task, settings["steps"], seeds, rates)
        tell(f"{task}: held-out error over the variance {float(course[0][1].mean()):.3g} -> {float(course[-1][1].mean()):.3g}")
        tests, _ = draw_sequences(W, task, seeds, 4, settings["test_sequences"], settings["n_demonstrations"])
        with torch.no_grad():
            q, k, v = layer.projections(tests)
        scale = q.shape[-1] ** 0.5
        for (s, seed), i, kernel in itertools.product(enumerate(seeds), range(settings["test_sequences"]), KERNELS):
            output, after, shuffled = _both(q[s, i, -1], k[s, i], v[s, i], scale, kernel, seed)
            error, other = (float((x - output).norm() / output.norm()) for x in (after, shuffled))
            rows.append(dict(task=task, seed=seed, sequence=i, kernel=kernel, error=error, shuffled_error=other))
    errors = pd.DataFrame(rows)
    return Reproduction(
        tables={"errors": errors},
        figure=lambda: draw(errors),
        comparisons=[*compare(errors)],
        differences=[
            f"Dimensions of x {settings['d_x']}, {settings['n_demonstrations']} demonstrations, seeds {settings['seeds']}, "
            f"{settings['steps']} training steps.",
            "The paper shows random features alone; landmarks and the exact softmax kernel are ours.",
        ],
    )


def after_one_step(
    q: Float[Tensor, " d"],
    k: Float[Tensor, "token d"],
    labels: Float[Tensor, "token d_out"],
    scale: float,
    demonstration_labels: Float[Tensor, "demo d_out"] | None = None,
) -> Float[Tensor, " d_out"]:
    """f(q) after one step with the exact softmax kernel; the last token is H_T, all others are demonstrations.

    Args:
        q, k: the query and all keys, the query's own last.
        labels: labels of all tokens: v_j, or W_FFN v_j.
        scale: scale of the softmax.
        demonstration_labels: wrong labels for the demonstrations, for a control.
    """
    n = len(k) - 1
    wanted = labels[:n] if demonstration_labels is None else demonstration_labels
    log_D = (k @ q / scale).logsumexp(dim=0)
    start = torch.cat([torch.zeros_like(wanted), labels[n:] * (-log_D).exp()])  # the coefficients of W_0
    predictions = (dual.kernel_values(dual.softmax_kernel(k, k[:n], scale)).T @ start).requires_grad_()
    (gradient,) = torch.autograd.grad(dual.loss_of_predictions(predictions, wanted, log_D.exp(), eta=1.0), predictions)
    after = start + torch.cat([-gradient, torch.zeros_like(labels[n:])])
    return dual.kernel_values(dual.softmax_kernel(q[None], k, scale))[0] @ after


def _both(q: Tensor, k: Tensor, v: Tensor, scale: float, kernel: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Attention's output at the query, the dual model's after one step, and the same with shuffled labels."""
    n = len(k) - 1  # the last token is the query, and the only one in H_T
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    if kernel == "exact":
        weights = (k @ q / scale).softmax(dim=0)
        return weights @ v, after_one_step(q, k, v, scale), after_one_step(q, k, v, scale, v[:n][order])
    phi_k, phi_q = _features(q, k, scale, kernel, seed)
    shares = phi_k @ phi_q
    D = shares.sum()

    def after_step(labels: Tensor) -> Tensor:
        W = dual.mean_outer(phi_k[n:], v[n:], D).requires_grad_()
        (gradient,) = torch.autograd.grad(dual.dual_loss(W, phi_k[:n], labels, D, eta=1.0), W)
        return ((W - gradient) @ phi_q).detach()

    return shares @ v / D, after_step(v[:n]), after_step(v[:n][order])


def _features(q: Tensor, k: Tensor, scale: float, kernel: str, seed: int) -> tuple[Tensor, Tensor]:
    if kernel == "landmarks":
        f = dual.landmark_features(k[None], q[None, None], scale, max(1, len(k) // 2))
        return f.keys[0] * f.log_keys[0].exp()[:, None], f.queries[0, 0] * f.log_queries[0].exp()
    drawn = draw_projections(1, 100 * len(q), len(q), "orthogonal", torch.Generator().manual_seed(seed)).double()
    (phi_k, log_k), (phi_q, log_q) = (dual.scaled_random_features(x, drawn, scale) for x in (k[None], q[None, None]))
    return phi_k[0] * log_k[0].exp()[:, None], phi_q[0, 0] * log_q[0].exp()


def compare(errors: pd.DataFrame) -> Iterator[Comparison]:
    """The largest error of each task, and that of a wrong dual model."""
    for task, rows in errors.groupby("task", sort=False):
        what = f"{task} task: largest relative difference of output and prediction"
        claim = "after one step the dual model predicts the attention layer's output"
        yield Comparison.at_most(what, claim, float(rows["error"].max()), LARGEST, paper="0 (strictly equivalent)")
        what = f"{task} task: the same with the labels in another order, median"
        yield Comparison.stated(what, "a wrong training set is recognized", float(rows["shuffled_error"].median()))


def draw(errors: pd.DataFrame) -> Figure:
    """Errors by task and kernel; a dot per seed and sequence."""
    shuffled = errors[errors["kernel"] == "exact"].assign(kernel="labels in another order", error=errors["shuffled_error"])
    dots = pd.concat([errors, shuffled], ignore_index=True)
    title = "One step of the dual model against the attention layer's output: relative difference"
    return draw_panels(
        dots.assign(error=dots["error"].clip(lower=1e-18)), "task", "error", by="kernel", title=title, log="y", dots=True
    )
