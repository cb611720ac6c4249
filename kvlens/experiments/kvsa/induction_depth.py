"""``induction-depth``: how many layers, and how many steps, a model needs to learn induction (KVSA fig. 1a).

An induction head finds the token that followed the current token last time. Attention compares the current token with a key,
so the key must represent the *predecessor* of the token whose value is copied. A plain layer's key represents its own token:
one layer must first write predecessors into the residual stream, and only the next can look for them. KV shift mixes each key
(and value) with its predecessor, so one layer suffices. Four models with Llama's blocks are trained on the paper's distribution
of sequences (app. D: random tokens, scored at the first repeat); positions are rotary.
"""

import math
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.kvsa.models import LLAMA_BLOCKS, steps_in_words
from kvlens.experiments.shared.curves import PLAIN, SHIFTED, last_heldout, of_heldout, steps_to
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Outcome, Settings, Tell, experiment
from kvlens.experiments.shared.seeds import differences_by_seed
from kvlens.experiments.shared.sweep import Cell, Reasons, Runs, draw_panels, train_cells
from kvlens.tasks import make_task

SHIFT_1, PLAIN_1, PLAIN_2, PLAIN_4 = "1 layer, KV shift", "1 layer, plain", "2 layers, plain", "4 layers, plain"
MODELS: dict[str, dict[str, Any]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
    PLAIN_1: dict(n_layers=1),
    PLAIN_4: dict(n_layers=4),
}
COLORS = {SHIFT_1: SHIFTED, PLAIN_2: PLAIN, PLAIN_1: "#D55E00", PLAIN_4: "#CC79A7"}
LEARNED = 0.99
"""The accuracy that counts as having learned induction."""


@experiment(
    "KVSA fig. 1a",
    "Does one layer with KV shift learn induction, for which plain attention needs two?",
    cost=(
        "a few seconds",
        "45 minutes on one core",
        "hours on one GPU (the paper's vocabulary and length; not run here)",
    ),
    task=dict(vocab_size=(16, 64, 8000), length=(16, 32, 512), law="first_repeat"),
    model=dict(d_model=(16, 64, 1024), d_head=(8, 16, 64), **LLAMA_BLOCKS),
    training=dict(
        batch_size=(16, 128, 128),
        schedule="constant",
        stop_at_accuracy=0.999,
        warmup_fraction=(..., ..., 0.05),  # 1,000 steps
        steps=(6, 1000, 20_000),
        eval_every=(3, 25, 100),
        eval_sequences=(16, 256, 512),
    ),
    seeds=([0], [11, 12, 13, 14, 15, 16], [0, 1, 2, 3, 4, 5]),
    rates=([5e-3], [1e-3, 3e-3], [1e-4, 2e-4, 6e-4]),
)
def induction_depth(settings: Settings, tell: Tell) -> Outcome:
    """Train the four models, and compare the steps that they need."""
    models = {label: {**settings["model"], **own} for label, own in MODELS.items()}
    runs, task = train_cells([Cell(make_task("induction", **settings["task"]), models)], settings, tell), settings["task"]
    steps = steps_to(runs.curves, LEARNED)
    return Outcome(
        tables={"curves": runs.curves, "steps": steps},
        figure=draw(runs, steps),
        comparisons=compare(runs, steps, untrained(runs)),
        differences=[
            f"Vocabulary {task['vocab_size']} and length {task['length']}; the paper's are 8,000 and 512. A sequence draws its "
            "tokens from a pool of as many as it is long, as the paper's script does.",
            f"Width {settings['model']['d_model']}, seeds {settings['seeds']}, at most {settings['training']['steps']} steps; "
            "the paper's width is 1,024, with 20 million parameters outside the embeddings. A run ends when its held-out "
            "accuracy is nearly perfect.",
            steps_in_words(settings),
            "The loss is taken only at the scored position; the paper does not say which other positions it trains on.",
        ],
    )


def untrained(runs: Runs) -> Reasons:
    """Why nothing can be said about one plain layer, which may fail to learn.

    Its curve must be flat, and one shifted layer must have learned in the same number of steps. Claims about numbers of steps
    need no flat curves (see `compare`).
    """
    goal = Goal(1 / runs.settings["task"]["vocab_size"], best=1.0, y="accuracy")
    by_model = dict(list(of_heldout(runs.curves).groupby("model")))
    still = goal.why_not_flat(by_model[PLAIN_1], PLAIN_1)
    return {PLAIN_1: goal.why_not_learned(by_model[SHIFT_1], SHIFT_1) or still}


def compare(runs: Runs, steps: pd.DataFrame, why: Reasons) -> list[Comparison]:
    """The figure's statements, tested seed by seed; ``why`` is that of `untrained`.

    A run that has not learned by the last step counts with that many steps, and so with fewer than it needs: a model that
    learned in time is then ahead of it by less than it is. Two such runs count as equal, and where all are such there is no
    verdict.
    """
    limit = runs.settings["training"]["steps"]
    last = last_heldout(runs.curves).set_index("model")["accuracy"]
    shifted, one = (last[[label]].tolist() for label in (SHIFT_1, PLAIN_1))
    censored = steps.assign(steps=steps["steps"].clip(upper=limit))
    median = steps.groupby("model")["steps"].median()
    late = {label: int((rows["steps"] > limit).sum()) for label, rows in steps.groupby("model")}
    n_seeds = len(shifted)

    def neither(one: str, other: str) -> str | None:
        return f"no run of either learned within {limit} steps" if late[one] == late[other] == n_seeds else None

    def in_steps(label: str) -> str:
        not_yet = f" ({late[label]} of {n_seeds} runs count with {limit} steps, not having learned)" if late[label] else ""
        return in_words(median[label], limit) + not_yet

    return [
        Comparison.tested_on(
            "smallest held-out accuracy that one layer with KV shift reaches, over seeds",
            None,
            min(shifted),
            f"one layer with KV shift learns induction (significantly above {LEARNED:.0%})",
            shifted,
            LEARNED,
        ),
        Comparison.tested_on(
            f"steps to {LEARNED:.0%}, median over seeds: one shifted layer, against two plain layers",
            None,
            f"{in_steps(SHIFT_1)} against {in_steps(PLAIN_2)}",
            "one layer with KV shift learns induction in fewer steps than two layers without",
            differences_by_seed(censored, PLAIN_2, SHIFT_1, "steps"),
        ).unless(neither(PLAIN_2, SHIFT_1)),
        Comparison.tested_on(
            f"steps to {LEARNED:.0%}, median over seeds: four plain layers, against two",
            None,
            f"{in_steps(PLAIN_4)} against {in_steps(PLAIN_2)}",
            "four plain layers do not learn induction faster than two",
            differences_by_seed(censored, PLAIN_4, PLAIN_2, "steps"),
        ).unless(neither(PLAIN_4, PLAIN_2)),
        Comparison.tested_on(
            "largest held-out accuracy of one plain layer, over seeds",
            None,
            max(one),
            f"one plain layer does not learn induction (significantly below {LEARNED:.0%})",
            one,
            LEARNED,
            below=True,
        ).unless(why.get(PLAIN_1)),
    ]


def in_words(steps: float, limit: int) -> str:
    """A number of steps, or that ``limit`` steps were not enough."""
    return f"{steps:g}" if steps < math.inf else f"more than {limit}"


def draw(runs: Runs, steps: pd.DataFrame) -> Figure:
    """Plot accuracy against step, with a dot where each run has learned induction."""
    heldout = of_heldout(runs.curves)
    figure = draw_panels(
        heldout,
        "step",
        xlabel="step",
        ylabel="held-out accuracy at the first repeat",
        colors=COLORS,
        title=f"Induction: one layer with KV shift, two layers without; dot: a run reaches {LEARNED:.0%}",
    )
    axes = figure.axes[0]
    for label, rows in steps[steps["steps"] < math.inf].groupby("model", sort=False):
        axes.plot(rows["steps"], [LEARNED] * len(rows), "o", color=COLORS[str(label)], markeredgecolor="white", markersize=8)
    axes.axhline(LEARNED, color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, zorder=0)
    return figure
