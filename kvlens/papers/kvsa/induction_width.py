"""``induction-width``: how wide a model must be to learn induction (KVSA fig. 1b).

Two plain layers must carry each token's predecessor along with the token itself through the residual stream, so th. 1 needs
twice the width of th. 2, and a second layer. Here one shifted layer and two plain layers of equal width are trained on the
paper's distribution of sequences (app. D) for the same number of steps, at several widths; the paper's width is 8.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd

from kvlens.errors import KVLensError
from kvlens.papers.harness.learned import Cell, last_heldout, lead, steps_to, train_cells
from kvlens.papers.harness.plots import PLAIN_COLOR, SHIFTED_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import LLAMA_BLOCKS, steps_in_words
from kvlens.tasks import make_task

SHIFT_1, PLAIN_2 = "1 layer, KV shift", "2 layers, plain"
MODELS: dict[str, dict[str, Any]] = {SHIFT_1: dict(n_layers=1, kv_shift=True), PLAIN_2: dict(n_layers=2)}
LEARNED = 0.5
"""The accuracy at which a run counts as having learned: about half of the way from chance to all."""


@experiment(
    "KVSA fig. 1b",
    "Does induction need less width with KV shift than without?",
    cost=(
        "a few seconds",
        "a quarter of an hour on one core",
    ),
    task=dict(vocab_size=(16, 64), length=(16, 32), law="first_repeat"),
    n_heads=2,
    widths=([8, 16], [8, 16, 32]),
    training=dict(
        batch_size=(16, 128),
        stop_at_accuracy=0.999,
        steps=(6, 600),
        eval_every=(3, 50),
        eval_sequences=(16, 256),
    ),
    seeds=([0], [11, 12, 13, 14, 15, 16]),
    rates=([5e-3], [3e-3, 1e-2]),
)
def induction_width(settings: Settings, tell: Tell) -> Reproduction:
    """Train both models at every width, and compare them at each."""
    (curves, _), task = train_cells(cells(settings), settings, tell), settings["task"]
    accuracy = last_heldout(curves, by=("d_model", "model", "seed"))
    title, colors = (
        "Induction: the width needed by one shifted layer and by two plain layers",
        {SHIFT_1: SHIFTED_COLOR, PLAIN_2: PLAIN_COLOR},
    )
    figure = partial(draw_panels, accuracy, "d_model", title=title, colors=colors, log="x", ticks=True)
    differences = [
        f"Vocabulary {task['vocab_size']} and length {task['length']} (the paper: 8,000 and 512), seeds {settings['seeds']}, "
        f"at most {settings['training']['steps']} steps for every model: one that has not learned here may still do so later. "
        "That it learns slowly *because* it is narrow is not tested.",
        "The paper tests its models only at width 8, and gives neither their number of heads nor their number of steps. The "
        "loss is taken only at the scored position.",
        steps_in_words(settings),
    ]
    steps = steps_to(curves, LEARNED, by=("d_model", "model", "seed"))
    comparisons = compare(steps, settings["training"]["steps"])
    return Reproduction({"curves": curves, "accuracy": accuracy, "steps": steps}, figure, comparisons, differences)


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield both models at every width."""
    task, n_heads = make_task("induction", **settings["task"]), settings["n_heads"]
    for width in settings["widths"]:
        if width % (2 * n_heads):  # rotary positions rotate pairs of a head's dimensions
            raise KVLensError(f"induction-width: a width must be a multiple of 2 * n_heads = {2 * n_heads}, got {width}")
    for width in settings["widths"]:
        size = dict(d_model=width, d_head=width // n_heads, **LLAMA_BLOCKS)
        models = {label: {**size, **own} for label, own in MODELS.items()}
        yield Cell(task, models, dict(d_model=width), title=f"width {width}")


def compare(steps: pd.DataFrame, limit: int) -> list[Comparison]:
    """Compare how many steps the two models need at each width.

    Args:
        steps: columns d_model, model, seed, steps; infinite for a run that has not learned.
        limit: steps of training, with which such a run counts: two plain layers are then behind by less than they are.
    """
    claim = "two plain layers learn induction more slowly than one shifted layer of the same width"
    what = f"steps to {LEARNED:.0%} accuracy: two plain layers minus one shifted layer, width {{}} (means {{{{of:.0f}}}} and "
    what += f"{{{{minus:.0f}}}}; a run that has not come so far counts with {limit})"
    steps = steps.assign(steps=steps["steps"].clip(upper=limit))
    by_width = steps.groupby("d_model", sort=False)
    return [lead(rows, PLAIN_2, SHIFT_1, "steps", what.format(width), claim) for width, rows in by_width]
