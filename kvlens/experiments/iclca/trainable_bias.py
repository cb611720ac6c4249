"""``trainable-bias``: linear attention with b_KV and b_D as parameters beside the same model without them (ICLCA fig. 1).

The bias is the state that the attention starts from (see :mod:`kvlens.ops.linear_attention`): b_KV alone where nothing
normalises, b_KV and b_D where the features do. It starts at zero, so that with and without it a seed gives the same function
and the same batches; what differs afterwards is the bias' doing. The two are therefore compared seed by seed; whether their
differences are more than noise is for :data:`kvlens.experiments.shared.significance.SIGNIFICANCE` to say.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import PALETTE, PLAIN, draw_curves, last_heldout, of_heldout, train_and_compare
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.seeds import differences_by_seed, mean_and_spread
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.tasks import Task, make_task
from kvlens.training import find_recipe

WITHOUT, WITH = "without bias terms", "with trainable bias terms"
COLORS = {WITHOUT: PLAIN, WITH: PALETTE[2]}


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train both models with every seed of ``settings``."""
    task = make_task("bigrams", **settings["task"])
    models = {WITHOUT: settings["model"], WITH: {**settings["model"], "trainable_kv_bias": True}}
    curves = train_and_compare(task, models, settings["training"], settings["seeds"], tell, rates=settings["rates"])
    by_seed = measures_by_seed(curves)
    untrained = Goal(1 / task.d_input, best=1.0, y="accuracy").why_untrained(of_heldout(curves), WITHOUT)
    comparisons = [comparison.unless(untrained) for comparison in compare(by_seed)]
    return Outcome(
        tables={"curves": curves, "by_seed": by_seed},
        figure=draw(curves),
        comparisons=comparisons,
        differences=[*_differences(task, settings, comparisons)],
    )


def measures_by_seed(curves: pd.DataFrame) -> pd.DataFrame:
    """One row per run: ``mean_loss`` (held-out, over all evaluations: the lower, the faster), final ``accuracy``, ``loss``."""
    speed = of_heldout(curves).groupby(["model", "seed"], sort=False)["loss"].mean().rename("mean_loss")
    return last_heldout(curves)[["model", "seed", "n_parameters", "accuracy", "loss"]].merge(speed.reset_index())


def compare(by_seed: pd.DataFrame) -> list[Comparison]:
    """Figure 1's two claims: trains faster, ends at a higher in-context accuracy."""
    mean = by_seed.groupby("model")[["mean_loss", "accuracy"]].mean()
    saved = differences_by_seed(by_seed, WITHOUT, WITH, "mean_loss")
    better = differences_by_seed(by_seed, WITH, WITHOUT, "accuracy")
    return [
        Comparison(
            "held-out loss averaged over the course of training, in nats: without minus with bias terms "
            f"(without {mean.loc[WITHOUT, 'mean_loss']:.3f}, with {mean.loc[WITH, 'mean_loss']:.3f})",
            None,
            mean_and_spread(saved),
            "the model with bias terms trains slightly faster",
            SIGNIFICANCE.above(saved),
        ),
        Comparison(
            "in-context accuracy at the end of training: with minus without bias terms "
            f"(without {mean.loc[WITHOUT, 'accuracy']:.1%}, with {mean.loc[WITH, 'accuracy']:.1%})",
            None,
            mean_and_spread(better),
            "the model with bias terms reaches a higher in-context accuracy",
            SIGNIFICANCE.above(better),
        ),
    ]


def _differences(task: Task, settings: Mapping[str, Any], comparisons: list[Comparison]) -> Iterator[str]:
    model = settings["model"]
    yield (
        f"A model of {model['n_layers']} layers and width {model['d_model']}, {settings['training']['steps']} steps, "
        f"{task.d_input} letters, sequences of {task.n_positions}; the paper's has 12 layers of width 128, and 52 letters."
    )
    yield "The paper prints one pair of curves; its seeds and schedule are not known to us."
    if model.get("normalizer") == "none":
        yield "Nothing normalises the attention of this model: b_KV is trained, and b_D, which would have no effect, is not."
    if all(comparison.holds is None and comparison.untrained is None for comparison in comparisons):
        yield "With and without bias terms the model learns alike here: seeds differ by more than the bias terms change."


def draw(curves: pd.DataFrame) -> Figure:
    """Held-out accuracy and loss against the step, a line through the mean of the seeds and a band over all."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    heldout = of_heldout(curves)
    for axes, measure, label in ((left, "accuracy", "in-context accuracy"), (right, "loss", "held-out loss (nats)")):
        draw_curves(axes, heldout, y=measure, colors=COLORS)
        axes.set(xlabel="step", ylabel=label)
    n_seeds = curves["seed"].nunique()
    left.set_title(f"b_KV and b_D as parameters: mean of {n_seeds} seeds, band over all", loc="left", fontsize=11)
    left.legend(frameon=False, fontsize=9)
    return figure


def _scale(**changes: Any) -> dict[str, Any]:
    small = dict(
        task=dict(n_letters=16, n_triggers=4, length=32, trigger_rate=0.5),
        model=dict(n_layers=4, d_model=64, d_head=16, attention="linear", feature_map="identity", normalizer="none"),
        training=dict(steps=600, batch_size=32, eval_every=25, eval_sequences=128),
        seeds=[0, 1, 2, 3, 4, 5],
        rates=[1e-3, 3e-3],
    )
    return {**small, **changes}


_PAPER = find_recipe("bigram-linear")

EXPERIMENT = Experiment(
    name="trainable-bias",
    source="ICLCA fig. 1 and sec. 6.3",
    question="Does linear attention learn in context faster, or better, when b_KV and b_D are trained with it?",
    run=run,
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
        "small": "about ten minutes on one core",
        "paper": "about a day on two cores, or hours on a GPU (not run here)",
    },
)
