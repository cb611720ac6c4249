"""``induction-depth``: how many layers, and how many steps, a model needs to learn induction (KVSA fig. 1a).

An induction head finds the token that followed the current token last time. Attention compares the current token with a key,
so the key must hold the *predecessor* of the token whose value is copied. A plain layer's key holds its own token: one layer
must first write predecessors into the stream, and only the next can look for them. KV shift hands each key (and value) its
predecessor, so one layer does. Four models of Llama's blocks on the paper's own law of sequences (app. D: random tokens, judged
at the first that came before) show it; positions are rotary.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.kvsa.llama import LLAMA_BLOCKS, steps_in_words
from kvlens.experiments.shared.curves import (
    PLAIN,
    SHIFTED,
    draw_curves,
    last_heldout,
    of_heldout,
    steps_to,
    train_and_compare,
)
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.seeds import differences_by_seed
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.tasks import make_task

SHIFT_1, PLAIN_1, PLAIN_2, PLAIN_4 = "1 layer, KV shift", "1 layer, plain", "2 layers, plain", "4 layers, plain"
MODELS: dict[str, dict[str, Any]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
    PLAIN_1: dict(n_layers=1),
    PLAIN_4: dict(n_layers=4),
}
COLORS = {SHIFT_1: SHIFTED, PLAIN_2: PLAIN, PLAIN_1: "#d1662a", PLAIN_4: "#7c3aed"}
LEARNED = 0.99
"""The accuracy that counts as having learned induction."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train the four models with every seed and note when each has learned induction."""
    task = make_task("induction", **settings["task"])
    models = {label: {**settings["model"], **own} for label, own in MODELS.items()}
    curves = train_and_compare(task, models, settings["training"], settings["seeds"], tell, rates=settings["rates"])
    steps = steps_to(curves, LEARNED)
    limit = settings["training"]["steps"]
    return Outcome(
        tables={"curves": curves, "steps": steps},
        figure=draw(curves, steps),
        comparisons=compare(curves, steps, limit, untrained(curves, 1 / settings["task"]["vocab_size"])),
        differences=[
            f"Vocabulary {settings['task']['vocab_size']} and length {settings['task']['length']}; the paper's are 8,000 and "
            "512. A sequence draws its tokens from a pool of as many as it is long, as the paper's script does.",
            f"Width {settings['model']['d_model']}, seeds {settings['seeds']}, at most {limit} steps; the paper's width is "
            "1,024, with 20 million parameters outside the embeddings. A run ends when its held-out "
            "accuracy is as good as perfect.",
            steps_in_words(settings),
            "Trained on is the judged position alone; what the paper trains on besides is not printed.",
        ],
    )


def untrained(curves: pd.DataFrame, chance: float) -> dict[str, str | None]:
    """Model -> why nothing can be said against it; None where something can.

    Who needs fewer steps than two plain layers is asked where these have learned; that one plain layer does not learn, where
    its curve is flat and the steps are enough for one shifted layer.
    """
    goal = Goal(chance, best=1.0, y="accuracy")
    runs = dict(list(of_heldout(curves).groupby("model")))
    still = goal.why_not_flat(runs[PLAIN_1], PLAIN_1, of=runs[SHIFT_1])
    return {
        PLAIN_2: goal.why_not_learned(runs[PLAIN_2], PLAIN_2),
        PLAIN_1: goal.why_not_learned(runs[SHIFT_1], SHIFT_1) or still,
    }


def compare(curves: pd.DataFrame, steps: pd.DataFrame, limit: int, why: Mapping[str, str | None]) -> list[Comparison]:
    """The figure's statements, judged seed by seed.

    Args:
        curves: of `train_and_compare`.
        steps: of `steps_to`.
        limit: steps that a run had at most.
        why: of `untrained`.
    """
    two = why.get(PLAIN_2)
    last = last_heldout(curves).set_index("model")["accuracy"]
    shifted, one = (last[[label]].tolist() for label in (SHIFT_1, PLAIN_1))
    censored = steps.assign(steps=steps["steps"].clip(upper=limit))  # a run that never got there needed more than its limit
    median = steps.groupby("model")["steps"].median()
    return [
        Comparison(
            "smallest held-out accuracy that one layer with KV shift reaches, over seeds",
            None,
            min(shifted),
            f"one layer with KV shift learns induction (told to reach {LEARNED:.0%})",
            SIGNIFICANCE.above(shifted, LEARNED),
        ),
        Comparison(
            f"steps to {LEARNED:.0%}, median over seeds: one shifted layer, against two plain layers",
            None,
            f"{in_words(median[SHIFT_1], limit)} against {in_words(median[PLAIN_2], limit)}",
            "one layer with KV shift learns induction in fewer steps than two layers without",
            SIGNIFICANCE.above(differences_by_seed(censored, PLAIN_2, SHIFT_1, "steps")),
        ).unless(two),
        Comparison(
            f"steps to {LEARNED:.0%}, median over seeds: four plain layers, against two",
            None,
            f"{in_words(median[PLAIN_4], limit)} against {in_words(median[PLAIN_2], limit)}",
            "four plain layers do not learn induction faster than two",
            SIGNIFICANCE.above(differences_by_seed(censored, PLAIN_4, PLAIN_2, "steps")),
        ).unless(two),
        Comparison(
            "largest held-out accuracy of one plain layer, over seeds",
            None,
            max(one),
            f"one plain layer does not learn induction (told to stay below {LEARNED:.0%})",
            SIGNIFICANCE.above([LEARNED - accuracy for accuracy in one]),
        ).unless(why.get(PLAIN_1)),
    ]


def in_words(steps: float, limit: int) -> str:
    """A number of steps, or that ``limit`` steps were not enough."""
    return f"{steps:g}" if steps < math.inf else f"more than {limit}"


def draw(curves: pd.DataFrame, steps: pd.DataFrame) -> Figure:
    """Accuracy against step, with a dot where each run has learned induction."""
    figure = Figure(figsize=(7.6, 4.7), layout="constrained")
    axes = figure.subplots()
    heldout = of_heldout(curves)
    draw_curves(axes, heldout, colors=COLORS)
    for label, rows in steps[steps["steps"] < math.inf].groupby("model", sort=False):
        axes.plot(rows["steps"], [LEARNED] * len(rows), "o", color=COLORS[str(label)], markeredgecolor="white", markersize=8)
    axes.axhline(LEARNED, color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, zorder=0)
    axes.text(heldout["step"].max(), LEARNED - 0.01, f"{LEARNED:.0%}", ha="right", va="top", fontsize=9)
    axes.set(ylim=(-0.02, 1.04), xlabel="step", ylabel="held-out accuracy at the first repeat")
    axes.set_title("Induction: one layer with KV shift, two layers without", loc="left", fontsize=11)
    figure.legend(
        loc="outside lower center",
        ncols=4,
        frameon=False,
        fontsize=9,
        title="mean over seeds; band: least to largest; dot: a run reaches the line",
        title_fontsize=8,
    )
    return figure


def _scale(
    vocab_size: int, length: int, d_model: int, d_head: int, seeds: list[int], rates: list[float], **training: Any
) -> dict[str, Any]:
    return dict(
        task=dict(vocab_size=vocab_size, length=length, law="first_repeat"),
        model=dict(d_model=d_model, d_head=d_head, **LLAMA_BLOCKS),
        training={"batch_size": 128, "schedule": "constant", "stop_at_accuracy": 0.999, **training},
        seeds=seeds,
        rates=rates,
    )


EXPERIMENT = Experiment(
    name="induction-depth",
    source="KVSA fig. 1a",
    question="Does one layer with KV shift learn induction, for which plain attention needs two?",
    run=run,
    scales={
        "tiny": _scale(16, 16, 16, 8, [0], [5e-3], steps=6, eval_every=3, eval_sequences=16, batch_size=16),
        "small": _scale(64, 32, 64, 16, [0, 1, 2, 3, 4, 5], [1e-3, 3e-3], steps=800, eval_every=25, eval_sequences=256),
        "paper": _scale(
            8000,
            512,
            1024,
            64,
            [0, 1, 2, 3, 4, 5],
            [1e-4, 2e-4, 6e-4],
            warmup_fraction=0.05,  # 1,000 steps
            steps=20_000,
            eval_every=100,
            eval_sequences=512,
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "five minutes on one core",
        "paper": "hours on one GPU (the paper's vocabulary and length; not run here)",
    },
)
