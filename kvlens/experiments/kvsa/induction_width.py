"""``induction-width``: how wide a model must be to learn induction (KVSA fig. 1b).

Two plain layers must carry each token's predecessor beside the token itself through the stream, so th. 1 gives them twice the
width that th. 2 needs, besides the second layer. Here a shifted layer and two plain layers of equal width learn the same
repeated tokens for equally many steps, at several widths; at each width the plain model has the larger number of parameters.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import PLAIN, SHIFTED, draw_curves, last_heldout, train_and_compare
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.tasks import make_task

SHIFT_1, PLAIN_2 = "1 layer, KV shift", "2 layers, plain"
MODELS: dict[str, dict[str, Any]] = {SHIFT_1: dict(n_layers=1, kv_shift=True), PLAIN_2: dict(n_layers=2)}
COLOURS = {SHIFT_1: SHIFTED, PLAIN_2: PLAIN}
SLACK = 0.01
"""Accuracies closer than this count as equal: both models of a pair may be as good as perfect."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train both models at every width, with every seed, and compare where they end."""
    task = make_task("induction", **settings["task"])
    courses = []
    for width in settings["widths"]:
        tell(f"width {width}")
        size = dict(d_model=width, d_head=width // settings["n_heads"], attn_only=True)
        models = {label: {**size, **own} for label, own in MODELS.items()}
        courses.append(train_and_compare(task, models, settings["training"], settings["seeds"], tell).assign(d_model=width))
    curves = pd.concat(courses, ignore_index=True)
    accuracy = last_heldout(curves, by=("d_model", "model", "seed"))
    return Outcome(
        tables={"curves": curves, "accuracy": accuracy},
        figure=draw(accuracy),
        comparisons=compare(accuracy),
        differences=[
            f"Vocabulary {settings['task']['vocab_size']} and length {settings['task']['length']} (the paper: 8,000 and 512), "
            f"seeds {settings['seeds']}, at most {settings['training']['steps']} steps for every model: a width that "
            "fails here may still learn later.",
            "Attention-only models, so that all parameters but embeddings and unembedding belong to attention.",
        ],
    )


def compare(accuracy: pd.DataFrame) -> list[Comparison]:
    """The figure's statement, at each width and at the narrowest, from one row a run."""
    mean = accuracy.pivot_table(index="d_model", columns="model", values="accuracy")
    ahead = mean[SHIFT_1] - mean[PLAIN_2]
    size = accuracy.groupby(["model", "d_model"])["n_parameters"].first()
    widest = int(mean.index.max())
    return [
        Comparison(
            "smallest lead of one shifted layer over two plain layers of the same width, in accuracy, over widths "
            "(means over seeds)",
            None,
            float(ahead.min()),
            "at every width one layer with KV shift is at least as good as two layers without",
            bool((ahead >= -SLACK).all()),
        ),
        Comparison(
            "largest lead over widths",
            None,
            float(ahead.max()),
            "at some width it is clearly better (by 0.1 or more)",
            bool(ahead.max() >= 0.1),
        ),
        Comparison(
            f"parameters of two plain layers over those of one shifted layer, width {widest}",
            None,
            float(size[PLAIN_2, widest] / size[SHIFT_1, widest]),
            "the plain model has more parameters: twice as many in attention",
            bool(size[PLAIN_2, widest] > size[SHIFT_1, widest]),
        ),
    ]


def draw(accuracy: pd.DataFrame) -> Figure:
    """Accuracy at the end against width."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    draw_curves(axes, accuracy, x="d_model", colours=COLOURS, marker="o", markersize=5)
    axes.set_xscale("log", base=2)
    widths = sorted(set(accuracy["d_model"].tolist()))
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set(ylim=(-0.02, 1.04), xlabel="width (d_model)", ylabel="held-out accuracy after training")
    axes.set_title("Induction: the width that one shifted layer and two plain ones need", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, title="mean over seeds; band: least to largest", title_fontsize=8)
    return figure


def _scale(vocab_size: int, length: int, widths: list[int], seeds: list[int], **training: Any) -> dict[str, Any]:
    return dict(
        task=dict(vocab_size=vocab_size, length=length),
        n_heads=2,
        widths=widths,
        training=dict(batch_size=32, stop_at_accuracy=0.999, **training),
        seeds=seeds,
    )


EXPERIMENT = Experiment(
    name="induction-width",
    source="KVSA fig. 1b",
    question="Does induction need less width with KV shift than without?",
    run=run,
    scales={
        "tiny": _scale(16, 16, [8, 16], [0], learning_rate=5e-3, steps=30, eval_every=15, eval_sequences=16),
        "small": _scale(128, 64, [16, 32, 64], [0, 1], learning_rate=4e-3, steps=400, eval_every=50, eval_sequences=64),
        "paper": _scale(
            8000,
            512,
            [16, 32, 64, 128, 256, 512],
            [0, 1, 2, 3, 4],
            learning_rate=1e-3,
            steps=20_000,
            eval_every=500,
            eval_sequences=128,
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "a minute and a half on one core",
        "paper": "a day on one GPU (the paper's vocabulary and length; not run here)",
    },
)
