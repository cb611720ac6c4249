"""``ngram``: KV shift neither hurts nor much helps the learning of 3-grams (KVSA fig. 3).

The token after two tokens comes from a fixed random table, which a model must store in its weights; nothing can be copied from
the context. The paper's concern is that mixing neighboring tokens blurs them. Models of several sizes with and without KV shift
learn the same table; at the paper's scale it has 14 x 14 pairs, for the paper's "approximately 200".
"""

from collections.abc import Iterator
from typing import Any

from kvlens.experiments.kvsa.models import COLORS, MODELS, PLAIN, SHIFTED
from kvlens.experiments.shared.curves import last_heldout, of_heldout
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Experiment
from kvlens.experiments.shared.sweep import Cell, Lead, Reasons, Runs, Settings, Sweep, draw_panels
from kvlens.tasks import make_task

RUN = ("size", "model", "seed")


def cells(settings: Settings) -> Iterator[Cell]:
    """A plain and a shifted model of every size, on the 3-grams that go with it."""
    for size in settings["sizes"]:
        vocab_size = size["task"]["vocab_size"]
        yield Cell(
            make_task("ngrams", **size["task"]),
            {label: {**size["model"], **own} for label, own in MODELS.items()},
            dict(size=size["label"], chance=1 / vocab_size),
            training=size["training"],
            rates=size["rates"],
            title=f"{size['label']}: {size['model']['n_layers']} layers, vocabulary {vocab_size}",
        )


def untrained(runs: Runs) -> Reasons:
    """By size: the plain model must have learned."""
    return {
        size: Goal(rows["chance"].iloc[0], best=1.0, y="accuracy").why_untrained(rows, PLAIN)
        for size, rows in runs.measured.groupby("size", sort=False)
    }


def differences(runs: Runs) -> list[str]:
    """From the paper."""
    sizes = runs.settings["sizes"]
    pairs = [f"{size['task']['vocab_size'] ** 2:,} ({size['label']})" for size in sizes]
    parameters = runs.curves[runs.curves["model"] == PLAIN].groupby("size")["n_parameters"].first()
    counts = [f"{size['label']} ({parameters[size['label']]:,} parameters)" for size in sizes]
    return [
        f"The paper's models learn about 200 random 3-grams; these {', '.join(pairs)}, every pair of tokens having its own.",
        "A shift by one combines the two tokens of a context before any attention, for which a plain model needs a head, so "
        "some gain is to be expected on a task that consists only of 3-grams.",
        f"Sizes: {', '.join(counts)}; the paper's are 50M, 0.4M and 0.8K. Seeds {runs.settings['seeds']}.",
    ]


SWEEP = Sweep(
    cells=cells,
    measure=lambda runs: of_heldout(runs.curves),
    tables=lambda runs: {"curves": runs.curves, "final": last_heldout(runs.curves, by=RUN)},
    by="size",
    leads=[  # the paper says "neither": two equal models give no verdict, and the numbers show how far apart they may be
        Lead(
            "{group}: accuracy with KV shift minus without, after training (plain: {minus:.3f})",
            "KV shift does not weaken the learning of 3-grams",
            SHIFTED,
            PLAIN,
            "accuracy",
            runs=lambda rows: rows[rows["step"] == rows["step"].max()],
        ),
        Lead(
            "{group}: the same, mean over the evaluations of the training",
            "nor does it enhance it",
            SHIFTED,
            PLAIN,
            "accuracy",
            denied=True,
        ),
    ],
    untrained=untrained,
    differences=differences,
    draw=lambda runs: draw_panels(
        runs.measured,
        "step",
        by="size",
        xlabel="step",
        ylabel="held-out accuracy on 3-grams",
        colors=COLORS,
        title=lambda rows: f"{rows['size'].iloc[0]}, {rows['n_parameters'].min():,} parameters",
    ),
)


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
    run=SWEEP.run,
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
            seeds=[11, 12, 13, 14, 15, 16],
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
        "small": "six minutes on one core",
        "paper": "two days on one GPU (the paper's three sizes of model; not run here)",
    },
)
