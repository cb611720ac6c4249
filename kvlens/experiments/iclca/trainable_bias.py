"""``trainable-bias``: linear attention with trainable b_KV and b_D compared with the same model without them (ICLCA fig. 1).

The bias is the initial state of the attention (see :mod:`kvlens.ops.linear_attention`): b_KV alone without a normalizer, b_KV
and b_D with one. It starts at zero, so that a seed gives the same initial function and the same batches with and without it,
and any later difference is due to the bias. The two are therefore compared seed by seed.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import PALETTE, PLAIN, draw_curves, last_heldout, of_heldout
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Experiment
from kvlens.experiments.shared.sweep import Cell, Lead, Reasons, Runs, Settings, Sweep
from kvlens.tasks import make_task
from kvlens.training import find_recipe

WITHOUT, WITH = "without bias terms", "with trainable bias terms"
COLORS = {WITHOUT: PLAIN, WITH: PALETTE[2]}


def cells(settings: Settings) -> Iterator[Cell]:
    """Both models."""
    models = {WITHOUT: settings["model"], WITH: {**settings["model"], "trainable_kv_bias": True}}
    yield Cell(make_task("bigrams", **settings["task"]), models)


def measure(runs: Runs) -> pd.DataFrame:
    """One row per run: ``mean_loss`` (held-out, over all evaluations; lower is faster), final ``accuracy``, ``loss``."""
    speed = of_heldout(runs.curves).groupby(["model", "seed"], sort=False)["loss"].mean().rename("mean_loss")
    return last_heldout(runs.curves)[["model", "seed", "n_parameters", "accuracy", "loss"]].merge(speed.reset_index())


def untrained(runs: Runs) -> Reasons:
    """The model without bias terms must have learned."""
    n_letters = make_task("bigrams", **runs.settings["task"]).d_input
    return {None: Goal(1 / n_letters, best=1.0, y="accuracy").why_untrained(of_heldout(runs.curves), WITHOUT)}


def differences(runs: Runs) -> list[str]:
    """From the paper."""
    settings, model = runs.settings, runs.settings["model"]
    task = make_task("bigrams", **settings["task"])
    found = [
        f"A model of {model['n_layers']} layers and width {model['d_model']}, {settings['training']['steps']} steps, "
        f"{task.d_input} letters, sequences of {task.n_positions}; the paper's has 12 layers of width 128, and 52 letters.",
        "The paper shows one pair of curves, and does not report its seeds and schedule.",
    ]
    if model.get("normalizer") == "none":
        found += ["This model's attention has no normalizer: b_KV is trained, and b_D, which would have no effect, is not."]
    return found


def draw(runs: Runs) -> Figure:
    """Held-out accuracy and loss against the step: mean over seeds, and a band from minimum to maximum."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, y, label in ((left, "accuracy", "in-context accuracy"), (right, "loss", "held-out loss (nats)")):
        draw_curves(axes, of_heldout(runs.curves), y=y, colors=COLORS)
        axes.set(xlabel="step", ylabel=label)
    n_seeds = runs.curves["seed"].nunique()
    left.set_title(f"b_KV and b_D as parameters: mean of {n_seeds} seeds, band over all", loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2)
    return figure


SWEEP = Sweep(
    cells=cells,
    measure=measure,
    leads=[
        Lead(
            "held-out loss averaged over the course of training, in nats: without minus with bias terms (without {of:.3f}, "
            "with {minus:.3f})",
            "the model with bias terms trains slightly faster",
            WITHOUT,
            WITH,
            "mean_loss",
        ),
        Lead(
            "in-context accuracy at the end of training: with minus without bias terms (without {minus:.1%}, with {of:.1%})",
            "the model with bias terms reaches a higher in-context accuracy",
            WITH,
            WITHOUT,
            "accuracy",
        ),
    ],
    untrained=untrained,
    differences=differences,
    draw=draw,
    tables=lambda runs: {"curves": runs.curves, "by_seed": runs.measured},
)


def _scale(**changes: Any) -> dict[str, Any]:
    small = dict(
        task=dict(n_letters=16, n_triggers=4, length=32, trigger_rate=0.5),
        model=dict(n_layers=4, d_model=64, d_head=16, attention="linear", feature_map="identity", normalizer="none"),
        training=dict(steps=1200, batch_size=32, eval_every=50, eval_sequences=128),
        seeds=[11, 12, 13, 14, 15, 16],
        rates=[1e-3, 3e-3],
    )
    return {**small, **changes}


_PAPER = find_recipe("bigram-linear")

EXPERIMENT = Experiment(
    name="trainable-bias",
    source="ICLCA fig. 1 and sec. 6.3",
    question="Does linear attention learn in context faster, or better, when b_KV and b_D are trained with it?",
    run=SWEEP.run,
    scales={
        "tiny": _scale(
            task=dict(n_letters=11, n_triggers=3, length=16, trigger_rate=0.5),
            model=dict(n_layers=2, d_model=16, d_head=8, attention="linear", feature_map="identity", normalizer="none"),
            training=dict(steps=6, batch_size=8, eval_every=2, eval_sequences=16),
            seeds=[0, 1],
            rates=[3e-3],
        ),
        "small": _scale(),
        "paper": _scale(
            task=dict(_PAPER.task_settings),
            model=dict(_PAPER.model),
            training=dict(steps=5000, batch_size=32, eval_every=100, eval_sequences=512),
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "twenty-five minutes on one core",
        "paper": "about a day on two cores, or hours on a GPU (not run here)",
    },
)
