"""``ngram``: KV shift neither hurts nor much helps the learning of 3-grams (KVSA fig. 3).

What follows two tokens is read off a fixed random table, which a model must store in its weights; nothing can be copied from
the context. The paper's worry was that mixing neighbours blurs them. Models of several sizes with and without KV shift learn
the same table.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import PLAIN, SHIFTED, draw_curves, last_heldout, of_heldout, train_and_compare
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.tasks import make_task

PLAIN_NAME, SHIFT_NAME = "plain", "KV shift"
MODELS: dict[str, dict[str, Any]] = {PLAIN_NAME: dict(kv_shift=False), SHIFT_NAME: dict(kv_shift=True)}
COLOURS = {PLAIN_NAME: PLAIN, SHIFT_NAME: SHIFTED}
EQUAL = 0.02
"""Accuracies no further apart than this count as equal."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train a plain and a shifted model of every size on the 3-grams that go with it."""
    courses = []
    for size in settings["sizes"]:
        tell(f"{size['label']}: {size['model']['n_layers']} layers, vocabulary {size['task']['vocab_size']}")
        task = make_task("ngrams", **size["task"])
        models = {label: {**size["model"], **own} for label, own in MODELS.items()}
        course = train_and_compare(task, models, {**settings["training"], **size["training"]}, settings["seeds"], tell)
        courses.append(course.assign(size=size["label"], chance=1 / size["task"]["vocab_size"]))
    curves = pd.concat(courses, ignore_index=True)
    final = last_heldout(curves, by=("size", "model", "seed"))
    return Outcome(
        tables={"curves": curves, "final": final},
        figure=draw(curves),
        comparisons=compare(curves),
        differences=[
            "The table of 3-grams is random, and larger models get a larger one.",
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
    """The lead of the shifted model at each size, in accuracy, means over seeds.

    That the shift does no harm is judged at the end of training, that it brings little by the largest lead on the way. A size
    at which neither model ends above twice chance cannot tell.

    Args:
        curves: of `train_and_compare`, with columns size and chance; every run of a size has the same steps.
    """
    comparisons = []
    for size, rows in of_heldout(curves).groupby("size", sort=False):
        mean = rows.pivot_table(index="step", columns="model", values="accuracy")
        lead = mean[SHIFT_NAME] - mean[PLAIN_NAME]
        last, most = float(lead.iloc[-1]), float(lead.max())
        learned = mean.iloc[-1].max() > 2 * rows["chance"].iloc[0]
        comparisons += [
            Comparison(
                f"{size}: accuracy with KV shift minus without, after training (plain: {mean[PLAIN_NAME].iloc[-1]:.3f})",
                None,
                last,
                f"KV shift does not hurt the learning of 3-grams (ends no lower by more than {EQUAL})",
                last >= -EQUAL if learned else None,
            ),
            Comparison(
                f"{size}: largest lead of KV shift at any evaluation",
                None,
                most,
                f"nor does it help much (never higher by more than {EQUAL})",
                most <= EQUAL if learned else None,
            ),
        ]
    return comparisons


def draw(curves: pd.DataFrame) -> Figure:
    """One panel a size: accuracy against step."""
    sizes = list(curves["size"].unique())
    figure = Figure(figsize=(4.4 * len(sizes), 4.2), layout="constrained")
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        rows = of_heldout(curves[curves["size"] == size])
        draw_curves(axes, rows, colours=COLOURS)
        axes.axhline(rows["chance"].iloc[0], color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, label="chance")
        axes.set_title(f"{size}, {rows['n_parameters'].min():,} parameters", loc="left", fontsize=11)
        axes.set(xlabel="step", ylim=(0, 1.02))
    figure.axes[0].set_ylabel("held-out accuracy on 3-grams")
    figure.axes[0].legend(frameon=False, fontsize=9, title="mean over seeds; band: least to largest", title_fontsize=8)
    return figure


def _size(label: str, vocab_size: int, length: int, model: dict[str, Any], **training: Any) -> dict[str, Any]:
    return dict(label=label, task=dict(vocab_size=vocab_size, length=length), model=model, training=training)


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
            sizes=[_size("1 layer", 4, 16, _SMALLEST, steps=30)],
            training=dict(learning_rate=1e-2, eval_every=15, eval_sequences=16, batch_size=16),
            seeds=[0],
        ),
        "small": dict(
            sizes=[
                _size("1 layer", 16, 32, _SMALLEST, steps=600, learning_rate=1e-2),
                _size("2 layers", 32, 32, _MIDDLE, steps=300, learning_rate=3e-3),
            ],
            training=dict(eval_every=50, eval_sequences=64, batch_size=16),
            seeds=[0, 1],
        ),
        "paper": dict(
            sizes=[
                _size("1 layer", 8, 64, _SMALLEST, steps=5000, learning_rate=1e-2),
                _size("2 layers", 64, 64, _MIDDLE, steps=20_000, learning_rate=2e-3),
                _size("4 layers", 512, 256, _LARGEST, steps=50_000, learning_rate=3e-4),
            ],
            training=dict(eval_every=500, eval_sequences=128, batch_size=64),
            seeds=[0, 1, 2],
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "a minute and a half on one core",
        "paper": "a day on one GPU (the paper's three sizes of model; not run here)",
    },
)
