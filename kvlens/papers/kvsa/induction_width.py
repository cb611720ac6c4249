"""``induction-width``: how wide a model must be to learn induction (KVSA fig. 1b, app. J).

Two plain layers must carry each token's predecessor along with the token itself through the residual stream, so th. 1 needs
twice the width of th. 2, and a second layer. Here one shifted layer and two plain layers of equal width are trained on the
paper's distribution of sequences (app. D) for the same number of steps, at several widths; the paper's width is 8.

A layer may mix its stream with that of the position before it instead, at one of the four places that app. J names. Queries,
keys and values then read one mixture, or none:

    before Norm  x + A(N(mix x))    after Norm  x + A(mix N(x))    before Add  x + mix A(N(x))    after Add  mix (x + A(N(x)))
"""

import itertools
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvlens.errors import KVLensError
from kvlens.papers.harness.learned import Cell, TrainingRun, last_heldout, lead, steps_to, train_cells
from kvlens.papers.harness.plots import PLAIN_COLOR, SHIFTED_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import LLAMA_BLOCKS, steps_in_words
from kvlens.tasks import make_task
from kvlens.tasks.task import Model
from kvlens.training import TrainResult, build_model, train

SHIFT_1, PLAIN_2 = "1 layer, KV shift", "2 layers, plain"
PLACES = {f"1 layer, shift {place} {part}": (place, part) for part in ("Norm", "Add") for place in ("before", "after")}
MODELS: dict[str, dict[str, object]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
    **{label: dict(n_layers=1) for label in PLACES},
}
LEARNED = 0.5
"""The accuracy at which a run counts as having learned: about half of the way from chance to all."""


class Mix(nn.Module):
    """a x + b (x of the position before), 0 before the first; a is drawn from U(0, 1) and b starts as 1 - a (sec. 2.2)."""

    def __init__(self, seed: int):
        super().__init__()
        share = torch.rand(1, generator=torch.Generator().manual_seed(seed))
        self.coefficients = nn.Parameter(torch.cat([share, 1 - share]))

    def forward(self, x: Tensor) -> Tensor:
        return self.coefficients[0] * x + self.coefficients[1] * pad(x, (0, 0, 1, -1))


def shift_at(model: Any, label: str, seed: int) -> None:
    """Mix the stream of every block at the place of that label, one of `PLACES`."""
    place, part = PLACES[label]
    for number, block in enumerate(model.blocks):
        block.mix = mix = Mix(seed + number)
        if (place, part) == ("before", "Norm"):
            block.ln1.register_forward_pre_hook(lambda module, given, mix=mix: (mix(given[0]),))
        else:
            where = block.ln1 if part == "Norm" else block.hook_attn_out if place == "before" else block.hook_resid_mid
            where.register_forward_hook(lambda module, given, out, mix=mix: mix(out))


class ElsewhereRun(TrainingRun):
    """A run of a model with `shift_at`; it is never kept, as its name would be that of a plain one."""

    def train(self) -> tuple[Model, TrainResult]:
        model = build_model(self.task, {**self.model, "seed": self.seed})
        shift_at(model, self.label, self.seed)
        return model, train(model, self.task, progress=False, **self.training)


class WidthCell(Cell):
    """A cell some of whose models are shifted elsewhere."""

    def trials(self, label: str, seeds: Iterable[int], **changes: float) -> list[TrainingRun]:
        runs = super().trials(label, seeds, **changes)
        return [ElsewhereRun(**vars(run)) for run in runs] if label in PLACES else runs


@experiment(
    "KVSA fig. 1b, app. J",
    "Does induction need less width with KV shift than without, or than with a shift elsewhere?",
    cost=(
        "a few seconds",
        "a quarter of an hour on one core",
    ),
    task=dict(vocab_size=(16, 64), length=(16, 32), law="first_repeat"),
    n_heads=2,
    models=([*MODELS], [SHIFT_1, PLAIN_2]),
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
    title, colors = "Induction: the width that models need", {SHIFT_1: SHIFTED_COLOR, PLAIN_2: PLAIN_COLOR}
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
    comparisons = [*compare(steps, settings["training"]["steps"]), *compare_places(accuracy)]
    return Reproduction({"curves": curves, "accuracy": accuracy, "steps": steps}, figure, comparisons, differences)


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield both models at every width."""
    task, n_heads = make_task("induction", **settings["task"]), settings["n_heads"]
    for width in settings["widths"]:
        if width % (2 * n_heads):  # rotary positions rotate pairs of a head's dimensions
            raise KVLensError(f"induction-width: a width must be a multiple of 2 * n_heads = {2 * n_heads}, got {width}")
    for width in settings["widths"]:
        size = dict(d_model=width, d_head=width // n_heads, **LLAMA_BLOCKS)
        models = {label: {**size, **MODELS[label]} for label in settings["models"]}
        yield WidthCell(task, models, dict(d_model=width), title=f"width {width}")


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
    by_width = steps[steps["model"].isin([SHIFT_1, PLAIN_2])].groupby("d_model", sort=False)
    return [lead(rows, PLAIN_2, SHIFT_1, "steps", what.format(width), claim) for width, rows in by_width if PLAIN_2 in of(rows)]


def compare_places(accuracy: pd.DataFrame) -> Iterator[Comparison]:
    """Compare how well one layer ends with KV shift, and with the shift elsewhere."""
    claim = "shifted elsewhere one layer does not learn induction as well as with KV shift"
    for (width, rows), (label, place) in itertools.product(accuracy.groupby("d_model", sort=False), PLACES.items()):
        what = f"accuracy at the end, one layer with KV shift, {{of:.2f}}, less one shifted {' '.join(place)}, {{minus:.2f}}, "
        if label in of(rows):
            yield lead(rows, SHIFT_1, label, "accuracy", f"{what}width {width}", claim)


def of(rows: pd.DataFrame) -> set[str]:
    """The models that were trained."""
    return set(rows["model"].unique())
