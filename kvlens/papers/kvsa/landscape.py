"""``landscape``: gradient descent on the shift coefficients of one head (KVSA th. 3, fig. 2, and sec. 3.2's T = 2).

The plane is that of fig. 2: alpha_1 on the horizontal axis, beta_1 on the vertical one, with alpha_2 = 1 - alpha_1 and
beta_2 = 1 - beta_1. The induction head is at (0, 1). The background is :func:`kvlens.ops.induction.landscape_loss`, the loss in
closed form. A real model descends on it, ``landscape_model`` of
:mod:`kvlens.papers.kvsa.constructed_models`, by the loss of its logits on actual texts x_1 .. x_T x_i and the gradient of
its shift parameters from autograd. The two are compared, in value and gradient, at every step.

Descent is *monotone* where it leads left and up, towards the induction head in both coordinates. If T - 4 (the paper's O(T),
the number of irrelevant tokens) is small, it is not monotone everywhere.

Texts A B A, the paper's T = 2, are too short for the theorem; `short_texts_loss` is their loss. There the head of the previous
token, (1, 0), is an end of descent, too: it has the lower loss, and continues A B C A with C.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import matplotlib
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.functional import cross_entropy, softplus

from kvlens.model import HookedKVTransformer
from kvlens.ops.induction import landscape_loss
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.constructed_models import landscape_model, set_shift

INDUCTION_HEAD, PREVIOUS_TOKEN = (0.0, 1.0), (1.0, 0.0)
"""(alpha_1, beta_1)."""
SHORT = 2
"""The T of texts A B A."""

STARTS = [[0.95, 0.9], [0.9, 0.05], [0.5, 0.5], [0.05, 0.03], [0.6, 0.98]]


@experiment(
    "KVSA th. 3, sec. 3.2, fig. 2",
    "Does gradient descent turn one layer with KV shift into an induction head, and how direct is the path?",
    cost=(
        "a second",
        "a minute on two cores",
    ),
    T=([4, 14], [4, 14, 104]),
    grid=(13, 61),
    n_texts=(2, 2),
    step_per_token=(0.08, 0.01),
    max_steps=(400, 4000),
    seed=0,
    starts=([[0.95, 0.9], [0.05, 0.03]], STARTS),
    n_starts=(40, 2000),
)
def landscape(settings: Settings, tell: Tell) -> Reproduction:
    """Compute the plane for every T of ``settings``, let the model descend on it, and see where many random starts end."""
    planes, paths = [], []
    for T in settings["T"]:
        planes.append(plane_of(T, settings["grid"]))
        model, tokens, answers = model_and_texts(T, settings["n_texts"], settings["seed"])
        for number, start in enumerate(settings["starts"]):
            tell(f"T = {T}: descent from {tuple(start)}")
            steps = descend(model, tokens, answers, start, settings["step_per_token"] * T, settings["max_steps"])
            paths.append(pd.DataFrame(steps).assign(T=T, start=number))
    plane, path = pd.concat(planes, ignore_index=True), pd.concat(paths, ignore_index=True)
    ends = pd.concat([ends_of(T, settings) for T in (SHORT, *settings["T"])], ignore_index=True)
    return Reproduction(
        tables={"landscape": plane, "path": path, "ends": ends},
        figure=lambda: draw(plane, path),
        comparisons=[*compare(plane, path), *compare_short_texts(ends)],
        differences=[
            "Gradient descent moves in the plane of fig. 2 and is confined to the unit square, from which coefficients are "
            "initialized; unconstrained, it passes the induction head and makes it ever sharper.",
            "The loss is the theorem's with the exponents of rows i - 1 and T corrected (see kvlens.ops.induction).",
            f"{settings['n_starts']} starts for each T are uniform in the unit square; the paper names no law.",
        ],
    )


def loss_in_plane(alpha_1: Float[Tensor, "*points"], beta_1: Float[Tensor, "*points"], T: int) -> Float[Tensor, "*points"]:
    """The closed form where each pair of coefficients sums to 1."""
    return landscape_loss(torch.stack([alpha_1, 1 - alpha_1], -1), torch.stack([beta_1, 1 - beta_1], -1), T)


def slope_in_plane(
    alpha_1: Float[Tensor, "*points"], beta_1: Float[Tensor, "*points"], T: int
) -> tuple[Float[Tensor, "*points"], Float[Tensor, "*points"], Float[Tensor, "*points"]]:
    """The closed form and its derivatives by alpha_1 and beta_1, in the plane where each pair sums to 1."""
    alpha_1, beta_1 = alpha_1.detach().requires_grad_(), beta_1.detach().requires_grad_()
    loss = loss_in_plane(alpha_1, beta_1, T)
    by_alpha, by_beta = torch.autograd.grad(loss.sum(), (alpha_1, beta_1))
    return loss.detach(), by_alpha, by_beta


def plane_of(T: int, n: int) -> pd.DataFrame:
    """Loss and descent direction on an n x n grid over the unit square."""
    ticks = torch.linspace(0, 1, n, dtype=torch.float64)
    beta_1, alpha_1 = (axis.flatten() for axis in torch.meshgrid(ticks, ticks, indexing="ij"))
    loss, by_alpha, by_beta = slope_in_plane(alpha_1, beta_1, T)
    columns = dict(alpha_1=alpha_1, beta_1=beta_1, loss=loss, descent_alpha_1=-by_alpha, descent_beta_1=-by_beta)
    return pd.DataFrame({"T": T, **{name: values.numpy() for name, values in columns.items()}})


# --- texts of two tokens, and many starts ---


def short_texts_loss(alpha_1: Float[Tensor, "*points"], beta_1: Float[Tensor, "*points"]) -> Float[Tensor, "*points"]:
    """The loss on texts A B A, whose answer is B, in nats, where each pair of coefficients sums to 1.

    With a, b, S and the attention A1, A2 as in `kvlens.ops.induction`, S = 2 e^{a1} + e^{a2}, the logits are

        B: A2 b1 + A1 b2        A: 2 A1 b1 + A2 b2
    """
    on_token, on_next, _ = torch.stack([alpha_1, 1 - alpha_1, alpha_1]).softmax(dim=0)
    answer = on_next * beta_1 + on_token * (1 - beta_1)
    return softplus(2 * on_token * beta_1 + on_next * (1 - beta_1) - answer)


def ends_of(T: int, settings: Settings) -> pd.DataFrame:
    """Where descent on the closed form leads from random starts: a row for each, with its two coefficients at the end."""
    generator = torch.Generator().manual_seed(settings["seed"])
    point = torch.rand(2, settings["n_starts"], generator=generator, dtype=torch.float64)
    start = point.numpy()
    loss: Callable[..., Tensor] = short_texts_loss if T == SHORT else partial(loss_in_plane, T=T)
    for _ in range(settings["max_steps"]):
        (slope,) = torch.autograd.grad(loss(*point.requires_grad_()).sum(), point)
        before, point = point.detach(), (point.detach() - settings["step_per_token"] * T * slope).clamp(0, 1)
        if torch.equal(point, before):
            break
    alpha_1, beta_1 = point.detach().numpy()
    return pd.DataFrame(dict(T=T, start_alpha_1=start[0], start_beta_1=start[1], alpha_1=alpha_1, beta_1=beta_1))


@torch.no_grad()
def continuation(alpha_1: float, beta_1: float) -> dict[str, float]:
    """What the model with these coefficients gives A, B and C after a text A B C A: their probabilities."""
    model = landscape_model(torch.eye(3, dtype=torch.float64))
    set_shift(model, alpha_1, beta_1)
    shares = model(torch.tensor([[0, 1, 2, 0]]))[0, -1].softmax(dim=-1)
    return dict(zip("ABC", shares.tolist(), strict=True))


# --- the real model ---


def model_and_texts(
    T: int, n_texts: int, seed: int
) -> tuple[HookedKVTransformer, Int[Tensor, "text pos"], Int[Tensor, " text"]]:
    """The model with random orthonormal embeddings, texts x_1 .. x_T x_i in float64, and the answers x_{i+1}."""
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.linalg.qr(torch.randn(T, T, generator=generator, dtype=torch.float64)).Q
    order = torch.rand(n_texts, T, generator=generator).argsort(dim=1)
    i = torch.randint(1, T - 2, (n_texts, 1), generator=generator)  # the paper's i - 1: from 2 to T - 2 there
    tokens = torch.cat([order, order.gather(1, i)], dim=1)
    return landscape_model(embeddings), tokens, order.gather(1, i + 1)[:, 0]


def descend(
    model: HookedKVTransformer,
    tokens: Int[Tensor, "text pos"],
    answers: Int[Tensor, " text"],
    start: Sequence[float],
    step_size: float,
    max_steps: int,
) -> Iterator[dict[str, object]]:
    """Gradient descent on the model's own loss; one row per step, including the start, until it stops moving.

    Args:
        model: a :func:`landscape_model`; its shift parameters are changed.
        tokens, answers: the texts, and the token after each.
        start: (alpha_1, beta_1).
        step_size: factor of the gradient.
        max_steps: of these, at most.
    """
    T = model.cfg.d_vocab
    alpha_1, beta_1 = start
    for step in range(max_steps + 1):
        set_shift(model, alpha_1, beta_1)
        loss, by_alpha, by_beta = model_slope(model, tokens, answers)
        closed = slope_in_plane(torch.tensor(alpha_1, dtype=torch.float64), torch.tensor(beta_1, dtype=torch.float64), T)
        off = [abs(a - float(b)) for a, b in zip((loss, by_alpha, by_beta), closed, strict=True)]
        errors = dict(closed_form=float(closed[0]), loss_error=off[0], gradient_error=max(off[1:]))
        yield dict(step=step, alpha_1=alpha_1, beta_1=beta_1, loss=loss, **errors)
        before = (alpha_1, beta_1)
        alpha_1 = min(max(alpha_1 - step_size * by_alpha, 0.0), 1.0)
        beta_1 = min(max(beta_1 - step_size * by_beta, 0.0), 1.0)
        if (alpha_1, beta_1) == before:
            return


def model_slope(
    model: HookedKVTransformer, tokens: Int[Tensor, "text pos"], answers: Int[Tensor, " text"]
) -> tuple[float, float, float]:
    """The model's loss, and its derivatives by alpha_1 and beta_1 in the plane (alpha_2 and beta_2 move the other way)."""
    attn = model.blocks[0].attn
    loss = cross_entropy(model(tokens)[:, -1], answers)
    by_alpha, by_beta = torch.autograd.grad(loss, (attn.k_shift_coef, attn.v_shift_coef))
    return loss.item(), float(by_alpha[0, 0] - by_alpha[0, 1]), float(by_beta[0, 0] - by_beta[0, 1])


def loss_rounding(T: int) -> float:
    """The largest rounding error of the model's float64 loss against the closed form: three successive sums of 2T products.

    Scores, outputs and logits are products of rows of norm 1 with coefficients of at most 1 in size, in sums of up to 2T terms;
    the softmax doubles an error of the scores, and the loss doubles one of the logits.
    """
    return 2 * 2 * 3 * 2 * T * torch.finfo(torch.float64).eps


# --- comparisons ---


def compare(plane: pd.DataFrame, path: pd.DataFrame) -> Iterator[Comparison]:
    """The claims of the theorem and the caption of fig. 2 against the tables."""
    ends, error = path.groupby(["T", "start"]).tail(1), path.groupby("T")["loss_error"].max()
    what = "largest difference between the model's loss and the closed form, on all steps of all paths"
    claim, over = "the loss of th. 3 is the loss of one head with KV shift", error / error.index.map(loss_rounding)
    yield Comparison.at_most(what, claim, float(over.max()), 1, shown=float(error.max()))
    leads_there = (plane["descent_alpha_1"] < 0) & (plane["descent_beta_1"] > 0)
    shares = {int(str(T)): float(share) for T, share in leads_there.groupby(plane["T"]).mean().items()}
    for before, (T, share) in zip((None, *shares.values()), shares.items(), strict=False):
        what = f"share of the unit square where descent leads left and up, T = {T} (O(T) = {T - 4})"
        if before is None:
            point = 1 / len(plane[plane["T"] == T])
            yield Comparison.at_most(what, "for small O(T) descent is not monotone everywhere", share, 1 - point)
        else:
            yield Comparison.at_least(what, "with larger O(T) its direction is more consistent", share, before + point)
    # the caption: "the contour lines become sparse, which means the convergence speed slows down"
    gradient = (plane["descent_alpha_1"] ** 2 + plane["descent_beta_1"] ** 2).pow(0.5)
    slopes = gradient.groupby(plane["T"]).mean().to_dict()
    most = max(later / earlier for earlier, later in itertools.pairwise(slopes.values()))
    claim = "as O(T) increases convergence slows down: the gradient is shorter at each larger T (sec. 3.2, fig. 2)"
    words = ", ".join(f"{slope:.3g} at T = {T}" for T, slope in slopes.items())
    yield Comparison.at_most("length of the gradient, mean over the unit square", claim, most, 0.9, shown=words)
    distance = (ends["alpha_1"] - INDUCTION_HEAD[0]).abs() + (ends["beta_1"] - INDUCTION_HEAD[1]).abs()
    what = "largest final distance of a descent from (alpha_1, beta_1) = (0, 1)"
    yield Comparison.at_most(what, "the coefficients move towards the induction head", float(distance.max()), 0, paper=0.0)


def compare_short_texts(ends: pd.DataFrame) -> Iterator[Comparison]:
    """What texts A B A teach, beside longer ones; ``ends`` are those of `ends_of`."""
    losses = [float(short_texts_loss(*torch.tensor(at, dtype=torch.float64))) for at in (PREVIOUS_TOKEN, INDUCTION_HEAD)]
    what = "loss on texts A B A of the head of the previous token, and of the induction head, nats"
    claim = "with T = 2 the previous token is enough for a low loss"
    yield Comparison.at_most(what, claim, losses[0], losses[1], shown="{:.3f} and {:.3f}".format(*losses))
    short, longer = ends[ends["T"] == SHORT], ends[ends["T"] != SHORT]
    to_previous, to_induction = (is_at(short, end) for end in (PREVIOUS_TOKEN, INDUCTION_HEAD))
    what = f"share of {len(short)} random starts from which texts A B A lead to the head of the previous token"
    claim = "with T = 2 descent learns the previous token from most starts"
    yield Comparison.of_share(f"{what} ({to_induction.mean():.3f} to the induction head)", claim, to_previous, 0.5)
    shares = is_at(longer, INDUCTION_HEAD).groupby(longer["T"]).mean()
    what = f"smallest share of starts that lead to the induction head, T = {', '.join(map(str, shares.index))}"
    yield Comparison.at_least(what, "with longer texts descent learns the induction head", float(shares.min()), 1)
    given = continuation(*PREVIOUS_TOKEN)
    what = "probability of B, and of C, that the head of the previous token gives after A B C A"
    claim = "the head of the previous token does not continue A B C A with B"
    yield Comparison.at_most(what, claim, given["B"], given["C"], shown="{B:.3f} and {C:.3f}".format(**given))


def is_at(ends: pd.DataFrame, point: tuple[float, float]) -> pd.Series:
    """Which descents end at a point of the plane."""
    return (ends["alpha_1"] == point[0]) & (ends["beta_1"] == point[1])


# --- figure ---


def draw(plane: pd.DataFrame, path: pd.DataFrame) -> Figure:
    """One panel per T: contour lines of the loss, the model's paths, and the induction head."""
    lengths = sorted(set(plane["T"].tolist()))
    figure = Figure(figsize=(4.6 * len(lengths), 5.1), layout="constrained")
    for axes, T in zip(figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0], lengths, strict=True):
        grid = plane[plane["T"] == T].pivot_table(index="beta_1", columns="alpha_1", values="loss")
        filled = axes.contourf(grid.columns, grid.index, grid, levels=24, cmap=matplotlib.colormaps["viridis"], alpha=0.55)
        figure.colorbar(filled, ax=axes, label="loss, nats", shrink=0.7, format="%.4g").outline.set_visible(False)
        axes.contour(grid.columns, grid.index, grid, levels=9, colors="#334155", linewidths=0.6, alpha=0.8)
        for number, rows in path[path["T"] == T].groupby("start"):
            label = "gradient descent of the model" if number == 0 else "_path"
            axes.plot(rows["alpha_1"], rows["beta_1"], color="#D55E00", linewidth=2, marker="o", markevery=[0], label=label)
        axes.plot(*INDUCTION_HEAD, "*", color="#facc15", markersize=20, clip_on=False, zorder=5, label="induction head")
        axes.set(aspect="equal", xlabel="$\\alpha_1$   (keys: weight of the current token)", title=f"T = {T}, O(T) = {T - 4}")
    figure.axes[0].set_ylabel("$\\beta_1$   (values: weight of the current token)")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=10)
    return figure
