"""``ngram``: KV shift neither hurts nor much helps the learning of 3-grams (KVSA fig. 3).

What follows two tokens is read off a fixed random table, which a model must store in its weights; nothing can be copied from
the context. The paper's worry was that mixing neighbors blurs them. Models of several sizes with and without KV shift learn
the same table; at the paper's scale it has 14 x 14 pairs, for the paper's "approximately 200".
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import PLAIN, SHIFTED, draw_curves, last_heldout, of_heldout, train_and_compare
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.seeds import differences_by_seed, mean_and_spread
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.tasks import make_task

PLAIN_NAME, SHIFT_NAME = "plain", "KV shift"
MODELS: dict[str, dict[str, Any]] = {PLAIN_NAME: dict(kv_shift=False), SHIFT_NAME: dict(kv_shift=True)}
COLORS = {PLAIN_NAME: PLAIN, SHIFT_NAME: SHIFTED}


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train a plain and a shifted model of every size on the 3-grams that go with it."""
    courses = []
    for size in settings["sizes"]:
        tell(f"{size['label']}: {size['model']['n_layers']} layers, vocabulary {size['task']['vocab_size']}")
        task = make_task("ngrams", **size["task"])
        models = {label: {**size["model"], **own} for label, own in MODELS.items()}
        training = {**settings["training"], **size["training"]}
        course = train_and_compare(task, models, training, settings["seeds"], tell, rates=size["rates"])
        courses.append(course.assign(size=size["label"], chance=1 / size["task"]["vocab_size"]))
    curves = pd.concat(courses, ignore_index=True)
    final = last_heldout(curves, by=("size", "model", "seed"))
    return Outcome(
        tables={"curves": curves, "final": final},
        figure=draw(curves),
        comparisons=compare(curves),
        differences=[
            "The paper's models learn about 200 random 3-grams; these "
            + ", ".join(f"{size['task']['vocab_size'] ** 2:,} ({size['label']})" for size in settings["sizes"])
            + ", every pair of tokens having its own.",
            "A shift by one brings the two tokens of a context together before any attention, for which a plain model spends a "
            "head: on a task of nothing but 3-grams some gain is to be expected.",
            "Sizes: " + ", ".join(_size_in_words(final, size["label"]) for size in settings["sizes"]) + "; the paper's are "
            f"50M, 0.4M and 0.8K. Seeds {settings['seeds']}.",
        ],
    )


def _size_in_words(final: pd.DataFrame, label: str) -> str:
    counts = final[(final["size"] == label) & (final["model"] == PLAIN_NAME)]["n_parameters"]
    return f"{label} ({counts.iloc[0]:,} parameters)"


def compare(curves: pd.DataFrame) -> list[Comparison]:
    """The lead of the shifted model at each size, in accuracy, seed by seed: at the end, and on the way there.

    The paper says "neither"; two models that are alike give no verdict, and the figures say how far apart they may be. A size
    at which the plain model has not learned is not judged.

    Args:
        curves: of `train_and_compare`, with columns size and chance; every run of a size has the same steps.
    """
    comparisons = []
    for size, rows in of_heldout(curves).groupby("size", sort=False):
        last = rows[rows["step"] == rows["step"].max()]
        end, way = (differences_by_seed(part, SHIFT_NAME, PLAIN_NAME, "accuracy") for part in (last, rows))
        plain = last.loc[last["model"] == PLAIN_NAME, "accuracy"].mean()
        untrained = Goal(rows["chance"].iloc[0], best=1.0, y="accuracy").why_untrained(rows, PLAIN_NAME)
        helps = SIGNIFICANCE.above(way)
        comparisons += [
            Comparison(
                f"{size}: accuracy with KV shift minus without, after training (plain: {plain:.3f})",
                None,
                mean_and_spread(end),
                "KV shift does not weaken the learning of 3-grams",
                SIGNIFICANCE.above(end),
            ).unless(untrained),
            Comparison(
                f"{size}: the same, mean over the evaluations of the training",
                None,
                mean_and_spread(way),
                "nor does it enhance it",
                None if helps is None else not helps,
            ).unless(untrained),
        ]
    return comparisons


def draw(curves: pd.DataFrame) -> Figure:
    """One panel a size: accuracy against step."""
    sizes = list(curves["size"].unique())
    figure = Figure(figsize=(4.4 * len(sizes), 4.2), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        rows = of_heldout(curves[curves["size"] == size])
        draw_curves(axes, rows, colors=COLORS)
        axes.axhline(rows["chance"].iloc[0], color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, label="chance")
        axes.set_title(f"{size}, {rows['n_parameters'].min():,} parameters", loc="left", fontsize=11)
        axes.set(xlabel="step", ylim=(0, 1.02))
    figure.axes[0].set_ylabel("held-out accuracy on 3-grams")
    figure.axes[0].legend(frameon=False, fontsize=9, title="mean over seeds; band: least to largest", title_fontsize=8)
    return figure


def _size(
    label: str, vocab_size: int, length: int, model: dict[str, Any], rates: list[float], **training: Any
) -> dict[str, Any]:
    return dict(label=label, task=dict(vocab_size=vocab_size, length=length), model=model, rates=rates, training=training)


_SMALLEST = dict(n_layers=1, d_model=8, d_head=8, d_mlp=16)
_MIDDLE = dict(n_layers=2, d_model=128, d_head=32)
_LARGEST = dict(n_layers=4, d_model=1024, d_head=64)

EXPERIMENT = Experiment(
    name="ngram",
    source="KVSA fig. 3",
    question="Does KV shift change how well a model learns 3-grams, which need no induction?",
    run=run,
    scales={
        "tiny": dict(
            sizes=[_size("1 layer", 4, 16, _SMALLEST, [1e-2], steps=6)],
            training=dict(eval_every=3, eval_sequences=16, batch_size=16),
            seeds=[0],
        ),
        "small": dict(
            sizes=[
                _size("1 layer", 16, 32, _SMALLEST, [1e-2, 3e-2], steps=600),
                _size("2 layers", 32, 32, _MIDDLE, [1e-3, 3e-3], steps=300),
            ],
            training=dict(eval_every=50, eval_sequences=64, batch_size=16),
            seeds=[0, 1, 2, 3, 4, 5],
        ),
        "paper": dict(
            sizes=[
                _size("1 layer", 14, 64, _SMALLEST, [3e-3, 1e-2, 3e-2], steps=5000),
                _size("2 layers", 14, 64, _MIDDLE, [6e-4, 2e-3], steps=20_000),
                _size("4 layers", 14, 64, _LARGEST, [1e-4, 3e-4], steps=20_000),
            ],
            training=dict(eval_every=500, eval_sequences=128, batch_size=64),
            seeds=[0, 1, 2, 3, 4, 5],
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "ten minutes on one core",
        "paper": "two days on one GPU (the paper's three sizes of model; not run here)",
    },
)
