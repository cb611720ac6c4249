"""``trainable-bias``: linear attention with trainable b_KV and b_D compared with the same model without them (ICLCA fig. 1).

The bias is the initial state of the attention (see :mod:`kvlens.ops.linear_attention`): b_KV alone without a normalizer, b_KV
and b_D with one. It starts at zero, so that a seed gives the same initial function and the same batches with and without it,
and any later difference is due to the bias. The two are therefore compared seed by seed.
"""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from kvlens.papers.harness.learned import Cell, Goal, last_heldout, lead, of_heldout, train_cells
from kvlens.papers.harness.plots import PALETTE, PLAIN_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.tasks import make_task
from kvlens.training import find_recipe

WITHOUT, WITH = "without bias terms", "with trainable bias terms"
COLORS = {WITHOUT: PLAIN_COLOR, WITH: PALETTE[2]}


_PAPER = find_recipe("bigram-linear")


@experiment(
    "ICLCA fig. 1 and sec. 6.3",
    "Does linear attention learn in context faster, or better, when b_KV and b_D are trained with it?",
    cost=("a few seconds", "twenty-five minutes on one core"),
    task=(
        dict(n_letters=11, n_triggers=3, length=16, trigger_rate=0.5),
        dict(n_letters=16, n_triggers=4, length=32, trigger_rate=0.5),
    ),
    model={**_PAPER.model, **dict(n_layers=(2, 4), d_model=(16, 64), d_head=(8, 16))},
    training=dict(steps=(6, 1200), batch_size=(8, 32), eval_every=(2, 50), eval_sequences=(16, 128)),
    seeds=([0, 1], [11, 12, 13, 14, 15, 16]),
    rates=([3e-3], [1e-3, 3e-3]),
)
def trainable_bias(settings: Settings, tell: Tell) -> Reproduction:
    """Train the model without bias terms and with them, and compare how fast and how well they learn."""
    model, task = settings["model"], make_task("bigrams", **settings["task"])
    curves, _ = train_cells([Cell(task, {WITHOUT: model, WITH: {**model, "trainable_kv_bias": True}})], settings, tell)
    by_seed = measure(curves)
    differences = [
        f"A model of {model['n_layers']} layers and width {model['d_model']}, {settings['training']['steps']} steps, "
        f"{task.d_input} letters, sequences of {task.n_positions}; the paper's has 12 layers of width 128, and 52 letters.",
        "The paper shows one pair of curves, and does not report its seeds and schedule.",
    ]
    if model.get("normalizer") == "none":
        words = "b_KV is trained, and b_D, which would have no effect, is not."
        differences.append(f"This model's attention has no normalizer: {words}")
    why = Goal(task.chance, best=1.0, y="accuracy").why_untrained(of_heldout(curves), WITHOUT)
    comparisons = [one.unless(why) for one in compare(by_seed)]
    return Reproduction({"curves": curves, "by_seed": by_seed}, lambda: draw(curves), comparisons, differences)


def measure(curves: pd.DataFrame) -> pd.DataFrame:
    """One row per run: ``mean_loss`` (held-out, over all evaluations; lower is faster), final ``accuracy``, ``loss``."""
    speed = of_heldout(curves).groupby(["model", "seed"], sort=False)["loss"].mean().rename("mean_loss")
    return last_heldout(curves)[["model", "seed", "n_parameters", "accuracy", "loss"]].merge(speed.reset_index())


def compare(by_seed: pd.DataFrame) -> Iterator[Comparison]:
    """Compare the course of training and its end."""
    what = "held-out loss averaged over the course of training, in nats: without minus with bias terms "
    what, claim = what + "(without {of:.3f}, with {minus:.3f})", "the model with bias terms trains slightly faster"
    yield lead(by_seed, WITHOUT, WITH, "mean_loss", what, claim)
    what = "in-context accuracy at the end of training: with minus without bias terms (without {minus:.1%}, with {of:.1%})"
    yield lead(by_seed, WITH, WITHOUT, "accuracy", what, "the model with bias terms reaches a higher in-context accuracy")


def draw(curves: pd.DataFrame) -> Figure:
    """Held-out accuracy against the step."""
    return draw_panels(of_heldout(curves), "step", title="In-context accuracy with b_KV and b_D as parameters", colors=COLORS)
