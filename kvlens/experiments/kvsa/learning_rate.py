"""``learning-rate``: plain and shifted models under several learning rates and seeds (KVSA fig. 5).

The paper reports that at a learning rate of 1e-2 its plain model diverges while the one with KV shift trains on, and that the
shift helps whatever the seed. A run counts here as *diverged* when it ends with a held-out loss above that of the token
frequencies alone (the training part's, with one added to each count): it predicts worse than a model that reads nothing. A run
that stops at a loss or gradient that is not finite counts as diverged, too; its loss is then infinite.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlens.experiments.kvsa.text_scales import PAPER_TEXT, PAPER_TRAINING, SMALL_TEXT, TINY_TEXT, text_goal
from kvlens.experiments.shared.curves import PLAIN, SHIFTED, of_heldout, train_and_compare
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.seeds import differences_by_seed, final_losses, mean_and_spread, tokens_seen
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.tasks import Task
from kvlens.tasks.text import TextTask
from kvlens.training import NotFiniteError

MODELS = {"plain": False, "KV shift": True}
COLORS = {"plain": PLAIN, "KV shift": SHIFTED}
PAPER_RATE = 1e-2


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train both models at every learning rate with every seed of ``settings``."""
    task = TextTask(**settings["task"])
    course = pd.concat(
        [
            train_or_diverge(task, label, {**settings["model"], "kv_shift": shift}, settings["training"], rate, seed, tell)
            for rate, (label, shift), seed in itertools.product(settings["rates"], MODELS.items(), settings["seeds"])
        ],
        ignore_index=True,
    )
    goal = text_goal(task)
    no_context = goal.chance
    runs = final_losses(course, by=("model", "learning_rate", "seed"))
    runs = runs.assign(diverged=runs["heldout_loss"] > no_context)
    return Outcome(
        tables={"course": course, "runs": runs},
        figure=draw(runs, no_context),
        comparisons=compare(runs, untrained(of_heldout(course), goal)),
        differences=[
            f"The models have {course['n_parameters'].max():,.0f} parameters and see {tokens_seen(settings):,} tokens of "
            "another corpus. Small models bear larger learning rates than the paper's do: the plain model does best at "
            f"{best_rate(runs, 'plain'):g}, the shifted one at {best_rate(runs, 'KV shift'):g}.",
            "Gradients are clipped at norm 1; a run counts as diverged when its held-out loss ends above that of the token "
            f"frequencies ({no_context:.3f} nats).",
        ],
    )


def train_or_diverge(
    task: Task,
    label: str,
    model: Mapping[str, Any],
    training: Mapping[str, Any],
    rate: float,
    seed: int,
    tell: Callable[[str], None],
) -> pd.DataFrame:
    """The course of one run; where loss or gradient is not finite, a single held-out row with an infinite loss."""
    try:
        tell(f"learning rate {rate:g}")
        course = train_and_compare(task, {label: model}, {**training, "learning_rate": rate}, [seed], tell)
    except NotFiniteError as error:
        tell(f"{label}, seed {seed}: {error}")
        end = dict(model=label, seed=seed, step=training["steps"], split="heldout", loss=math.inf, accuracy=0.0)
        course = pd.DataFrame([end])
    return course.assign(learning_rate=rate)


def untrained(heldout: pd.DataFrame, goal: Goal) -> dict[float, str | None]:
    """Learning rate -> why nothing can be said of the losses there; None where something can.

    At key 0: why nothing can be said of who bears which rates: the plain model has learned at none.
    """
    found: dict[float, str | None] = {}
    for rate, rows in heldout.groupby("learning_rate"):
        found[float(str(rate))] = goal.why_untrained(rows, "plain")
    plain = heldout[heldout["model"] == "plain"]
    learned = [goal.why_not_learned(rows, "plain") for _, rows in plain.groupby("learning_rate")]
    return {**found, 0.0: None if None in learned else f"at no learning rate: {learned[0]}"}


def compare(runs: pd.DataFrame, why: Mapping[float, str | None]) -> list[Comparison]:
    """Shifted against plain at each learning rate, and where each of the two diverges.

    Args:
        runs: one row per run: model, learning_rate, seed, heldout_loss, diverged.
        why: of `untrained`.
    """
    by_rate = {float(str(rate)): rows for rate, rows in runs.groupby("learning_rate")}
    found = []
    for rate, rows in by_rate.items():
        differences = differences_by_seed(rows, "plain", "KV shift", "heldout_loss")
        found.append(
            Comparison(
                f"held-out loss of the plain model above the shifted one's at learning rate {rate:g}, nats",
                None,
                mean_and_spread(differences),
                "KV shift lowers the loss under every learning rate and seed",
                SIGNIFICANCE.above(differences),
            ).unless(why.get(rate))
        )
    stability = [*_compare_at_paper_rate(by_rate), _compare_stability(runs)]
    return [*found, *(one.unless(why.get(0.0)) for one in stability)]


def _compare_at_paper_rate(by_rate: Mapping[float, pd.DataFrame]) -> list[Comparison]:
    if PAPER_RATE not in by_rate:
        return []
    runs = by_rate[PAPER_RATE].astype({"diverged": float})
    share = runs.groupby("model")["diverged"].mean()
    return [
        Comparison(
            f"share of seeds that diverge at learning rate {PAPER_RATE:g}",
            "plain 1, KV shift 0 (5 seeds)",
            f"plain {share['plain']:g}, KV shift {share['KV shift']:g}",
            "the plain model diverges at learning rate 1e-2, the shifted one stays stable",
            SIGNIFICANCE.above(differences_by_seed(runs, "plain", "KV shift", "diverged")),
        )
    ]


def best_rate(runs: pd.DataFrame, label: str) -> float:
    """The learning rate at which that model's mean held-out loss is lowest."""
    return float(runs[runs["model"] == label].groupby("learning_rate")["heldout_loss"].mean().idxmin())


def largest_stable_rate(runs: pd.DataFrame) -> float:
    """The largest learning rate up to which no run of ``runs`` diverged; 0 where some did at the smallest one."""
    stable = 0.0
    for rate, rows in runs.groupby("learning_rate"):
        if rows["diverged"].any():
            break
        stable = float(str(rate))
    return stable


def rates_borne(runs: pd.DataFrame) -> pd.DataFrame:
    """How many of the learning rates each run bears, the smallest first: all below the first at which it diverged.

    Returns:
        Columns model, seed, borne.
    """
    by_run = ["model", "seed"]
    runs = runs.sort_values("learning_rate", kind="stable").assign(diverged=lambda rows: rows["diverged"].astype(bool))
    stable = ~runs.groupby(by_run)["diverged"].cummax()
    return runs.assign(borne=stable.astype(int)).groupby(by_run, as_index=False)["borne"].sum()


def _compare_stability(runs: pd.DataFrame) -> Comparison:
    plain, shifted = (largest_stable_rate(runs[runs["model"] == label]) for label in MODELS)
    return Comparison(
        "largest learning rate up to which no seed diverges",
        None,
        f"plain {plain:g}, KV shift {shifted:g}",
        "KV shift bears learning rates that the plain model does not (judged by how many rates each seed bears)",
        SIGNIFICANCE.above(differences_by_seed(rates_borne(runs), "KV shift", "plain", "borne")),
    )


def draw(runs: pd.DataFrame, no_context: float) -> Figure:
    """Final held-out loss against learning rate; a dot per seed, a line through the means."""
    figure = Figure(figsize=(7.6, 5), layout="constrained")
    axes = figure.subplots()
    top = no_context + 0.25 * (no_context - runs["heldout_loss"].min())
    for label, color in COLORS.items():
        _draw_model(axes, runs[runs["model"] == label].assign(shown=lambda r: r["heldout_loss"].clip(upper=top)), label, color)
    axes.axhline(no_context, color="#78350f", linestyle=(0, (5, 3)), linewidth=1)
    axes.annotate(
        "token frequencies alone; above: diverged",
        (runs["learning_rate"].min(), no_context),
        xytext=(0, 4),
        textcoords="offset points",
        color="#78350f",
        fontsize=9,
    )
    axes.set(xscale="log", xlabel="learning rate (peak)", ylabel="held-out loss at the end (nats)")
    axes.set_title("A dot per seed, lines through the means; losses off the chart stand at its top", loc="left", fontsize=11)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _draw_model(axes: Axes, runs: pd.DataFrame, label: str, color: str) -> None:
    axes.plot(runs["learning_rate"], runs["shown"], "o", color=color, alpha=0.5, markersize=7, markeredgewidth=0)
    mean = runs.groupby("learning_rate")["shown"].mean()
    axes.plot(mean.index, mean, color=color, linewidth=2, label=label)


EXPERIMENT = Experiment(
    name="learning-rate",
    source="KVSA fig. 5",
    question="Does KV shift help whatever the seed and the learning rate, and bear larger learning rates?",
    run=run,
    scales={
        "tiny": dict(
            task=TINY_TEXT,
            model=dict(n_layers=1, d_model=16, d_head=8, attn_only=True),
            training=dict(steps=2, batch_size=4, eval_every=2, eval_sequences=4),
            rates=[3e-2, 3.0],
            seeds=[0, 1],
        ),
        "small": dict(
            task=SMALL_TEXT,
            model=dict(n_layers=2, d_model=64, d_head=16),
            training=dict(steps=150, batch_size=8, eval_every=50, eval_sequences=32),
            rates=[1e-3, 3e-3, 1e-2, 3e-2, 1e-1],
            seeds=[0, 1, 2, 3, 4, 5],
        ),
        "paper": dict(
            task=PAPER_TEXT,
            model=dict(n_layers=24, d_model=2048, d_head=128, act_fn="silu", gated_mlp=True, normalization_type="RMS"),
            training=PAPER_TRAINING,
            rates=[1e-4, 2e-4, 1e-3, 1e-2],
            seeds=[0, 1, 2, 3, 4, 5],
        ),
    },
    cost={
        "tiny": "seconds",
        "small": "eight minutes on one core",
        "paper": "months on one large GPU (48 runs of about 1.5 billion parameters and 10 billion tokens), and a folder "
        "pretraining-text with that much text in .txt files; not run here",
    },
)
