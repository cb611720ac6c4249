"""``induction-depth``: how many layers, and how many steps, a model needs to learn induction (KVSA fig. 1a).

An induction head finds the token that followed the current token last time. Attention compares the current token with a key,
so the key must hold the *predecessor* of the token whose value is copied. A plain layer's key holds its own token: one layer
must first write predecessors into the stream, and only the next can look for them. KV shift hands each key (and value) its
predecessor, so one layer does. Three attention-only models on the same repeated random tokens show it; positions are rotary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import (
    PLAIN,
    SHIFTED,
    draw_curves,
    last_heldout,
    of_heldout,
    steps_to,
    train_and_compare,
)
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.tasks import make_task

SHIFT_1, PLAIN_2, PLAIN_1 = "1 layer, KV shift", "2 layers, plain", "1 layer, plain"
MODELS: dict[str, dict[str, Any]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
    PLAIN_1: dict(n_layers=1),
}
COLOURS = {SHIFT_1: SHIFTED, PLAIN_2: PLAIN, PLAIN_1: "#d1662a"}
LEARNED = 0.99
"""The accuracy that counts as having learned induction."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train the three models with every seed and note when each has learned induction."""
    task = make_task("induction", **settings["task"])
    models = {label: {**settings["model"], **own} for label, own in MODELS.items()}
    curves = train_and_compare(task, models, settings["training"], settings["seeds"], tell)
    steps = steps_to(curves, LEARNED)
    limit = settings["training"]["steps"]
    return Outcome(
        tables={"curves": curves, "steps": steps},
        figure=draw(curves, steps),
        comparisons=compare(curves, steps, limit),
        differences=[
            f"Vocabulary {settings['task']['vocab_size']} and length {settings['task']['length']}; the paper's are 8,000 and "
            "512.",
            f"Attention-only models of width {settings['model']['d_model']}, seeds {settings['seeds']}, at most {limit} steps; "
            "a run ends when its held-out accuracy is as good as perfect.",
        ],
    )


def compare(curves: pd.DataFrame, steps: pd.DataFrame, limit: int) -> list[Comparison]:
    """The figure's three statements, each over all seeds.

    Args:
        curves: of `train_and_compare`.
        steps: of `steps_to`.
        limit: steps that a run had at most.
    """
    last = last_heldout(curves).groupby("model")["accuracy"]
    shifted, two, one = (steps.loc[steps["model"] == label, "steps"] for label in (SHIFT_1, PLAIN_2, PLAIN_1))
    return [
        Comparison(
            "smallest held-out accuracy that one layer with KV shift reaches, over seeds",
            None,
            float(last.min()[SHIFT_1]),
            "one layer with KV shift learns induction as two plain layers do",
            bool(shifted.max() < math.inf),
        ),
        Comparison(
            f"steps to {LEARNED:.0%}, median over seeds: one shifted layer, against two plain layers",
            None,
            f"{in_words(shifted.median(), limit)} against {in_words(two.median(), limit)}",
            "one layer with KV shift learns induction in fewer steps than two layers without (true of every seed here, if it "
            "holds)",
            _each_seed_is_faster(steps),
        ),
        Comparison(
            "largest held-out accuracy of one plain layer, over seeds",
            None,
            float(last.max()[PLAIN_1]),
            f"one plain layer does not learn induction (stays below {LEARNED:.0%})",
            bool(one.min() == math.inf),
        ),
    ]


def in_words(steps: float, limit: int) -> str:
    """A number of steps, or that ``limit`` steps were not enough."""
    return f"{steps:g}" if steps < math.inf else f"more than {limit}"


def _each_seed_is_faster(steps: pd.DataFrame) -> bool:
    by_model = steps.set_index(["model", "seed"])["steps"]
    return bool((by_model[SHIFT_1] < by_model[PLAIN_2]).all())


def draw(curves: pd.DataFrame, steps: pd.DataFrame) -> Figure:
    """Accuracy against step, with a dot where each run has learned induction."""
    figure = Figure(figsize=(7.6, 4.7), layout="constrained")
    axes = figure.subplots()
    heldout = of_heldout(curves)
    draw_curves(axes, heldout, colours=COLOURS)
    for label, rows in steps[steps["steps"] < math.inf].groupby("model", sort=False):
        axes.plot(rows["steps"], [LEARNED] * len(rows), "o", color=COLOURS[str(label)], markeredgecolor="white", markersize=8)
    axes.axhline(LEARNED, color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, zorder=0)
    axes.text(heldout["step"].max(), LEARNED - 0.01, f"{LEARNED:.0%}", ha="right", va="top", fontsize=9)
    axes.set(ylim=(-0.02, 1.04), xlabel="step", ylabel="held-out accuracy on repeated tokens")
    axes.set_title("Induction: one layer with KV shift, two layers without", loc="left", fontsize=11)
    figure.legend(
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        title="mean over seeds; band: least to largest; dot: a run reaches the line",
        title_fontsize=8,
    )
    return figure


def _scale(vocab_size: int, length: int, d_model: int, d_head: int, seeds: list[int], **training: Any) -> dict[str, Any]:
    return dict(
        task=dict(vocab_size=vocab_size, length=length),
        model=dict(d_model=d_model, d_head=d_head, attn_only=True),
        training=dict(batch_size=32, schedule="constant", stop_at_accuracy=0.999, **training),
        seeds=seeds,
    )


EXPERIMENT = Experiment(
    name="induction-depth",
    source="KVSA fig. 1a",
    question="Does one layer with KV shift learn induction, for which plain attention needs two?",
    run=run,
    scales={
        "tiny": _scale(16, 16, 16, 8, [0], learning_rate=5e-3, steps=40, eval_every=10, eval_sequences=16),
        "small": _scale(256, 64, 64, 16, [0, 1, 2], learning_rate=2e-3, steps=800, eval_every=25, eval_sequences=64),
        "paper": _scale(
            8000, 512, 128, 32, [0, 1, 2, 3, 4], learning_rate=1e-3, steps=20_000, eval_every=100, eval_sequences=128
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "two minutes on one core",
        "paper": "hours on one GPU (the paper's vocabulary and length; not run here)",
    },
)
