"""``ngram``: KV shift neither hurts nor much helps the learning of 3-grams (KVSA fig. 3).

The token after two tokens comes from a fixed random table, which a model must store in its weights; nothing can be copied from
the context. The paper's concern is that mixing neighboring tokens blurs them. Models of several sizes with and without KV shift
learn the same table.
"""

from collections.abc import Hashable, Iterator, Mapping
from functools import partial

import pandas as pd

from kvlens.papers.harness.learned import Cell, Goal, last_heldout, lead, of_heldout, train_cells
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import MODEL_COLORS, MODELS, PLAIN, SHIFTED
from kvlens.tasks import make_task


def _size(
    label: str, vocab_size: int, length: int, model: Mapping[str, object], rates: list[float], **training: object
) -> dict[str, object]:
    return dict(label=label, task=dict(vocab_size=vocab_size, length=length), model=model, rates=rates, training=training)


_SMALLEST = dict(n_layers=1, d_model=8, d_head=8, d_mlp=16)
_MIDDLE = dict(n_layers=2, d_model=128, d_head=32)


@experiment(
    "KVSA fig. 3",
    "Does KV shift change how well a model learns 3-grams, which need no induction?",
    cost=("a few seconds", "six minutes on one core"),
    sizes=(
        [_size("1 layer", 4, 16, _SMALLEST, [1e-2], steps=6)],
        [
            _size("1 layer", 16, 32, _SMALLEST, [1e-2, 3e-2], steps=600),
            _size("2 layers", 32, 32, _MIDDLE, [1e-3, 3e-3], steps=300),
        ],
    ),
    training=dict(eval_every=(3, 50), eval_sequences=(16, 64), batch_size=(16, 16)),
    seeds=([0], [11, 12, 13, 14, 15, 16]),
)
def ngram(settings: Settings, tell: Tell) -> Reproduction:
    """Train both models of every size, and compare them at each."""
    curves, _ = train_cells(cells(settings), settings, tell)
    heldout, sizes = of_heldout(curves), settings["sizes"]
    figure = partial(draw_panels, heldout, "step", panel="size", ylabel="held-out accuracy on 3-grams", colors=MODEL_COLORS)
    pairs = [f"{size['task']['vocab_size'] ** 2:,} ({size['label']})" for size in sizes]
    parameters = curves[curves["model"] == PLAIN].groupby("size")["n_parameters"].first()
    counts = [f"{size['label']} ({parameters[size['label']]:,} parameters)" for size in sizes]
    differences = [
        f"The paper's models learn about 200 random 3-grams; these {', '.join(pairs)}, every pair of tokens having its own.",
        "A shift by one combines the two tokens of a context before any attention, for which a plain model needs a head, so "
        "some gain is to be expected on a task that consists only of 3-grams.",
        f"Sizes: {', '.join(counts)}; the paper's are 50M, 0.4M and 0.8K. Seeds {settings['seeds']}.",
    ]
    tables = {"curves": curves, "final": last_heldout(curves, by=("size", "model", "seed"))}
    return Reproduction(tables, figure, [*compare(heldout, untrained(heldout))], differences)


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield a plain and a shifted model of every size, on the 3-grams that go with it."""
    for size in settings["sizes"]:
        task = make_task("ngrams", **size["task"])
        yield Cell(
            task,
            {label: {**size["model"], **own} for label, own in MODELS.items()},
            dict(size=size["label"], chance=task.chance),
            training=size["training"],
            rates=size["rates"],
            title=f"{size['label']}: {size['model']['n_layers']} layers, vocabulary {task.d_input}",
        )


def untrained(heldout: pd.DataFrame) -> dict[Hashable, str | None]:
    """Say by size what is too little trained: the plain model must have learned."""
    return {
        size: Goal(rows["chance"].iloc[0], best=1.0, y="accuracy").why_untrained(rows, PLAIN)
        for size, rows in heldout.groupby("size", sort=False)
    }


def compare(heldout: pd.DataFrame, why: Mapping[Hashable, str | None]) -> Iterator[Comparison]:
    """Compare both models at each size; equal ones give no verdict, and the numbers show how far apart they may be."""
    pair = (SHIFTED, PLAIN, "accuracy")
    for size, rows in heldout.groupby("size", sort=False):
        what = f"{size}: accuracy with KV shift minus without, after training (plain: {{minus:.3f}})"
        claim, last = "KV shift does not weaken the learning of 3-grams", rows[rows["step"] == rows["step"].max()]
        yield lead(last, *pair, what, claim).unless(why.get(size))
        what = f"{size}: the same, mean over the evaluations of the training"
        yield lead(rows, *pair, what, "nor does it enhance it", denied=True).unless(why.get(size))
