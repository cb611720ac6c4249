"""``induction-width``: how wide a model must be to learn induction (KVSA fig. 1b).

Two plain layers must carry each token's predecessor beside the token itself through the stream, so th. 1 gives them twice the
width that th. 2 needs, besides the second layer. Here a shifted layer and two plain layers of equal width learn the paper's law
of sequences (app. D) for equally many steps, at several widths, of which 8 is the paper's.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.errors import KVLensError
from kvlens.experiments.kvsa.llama import LLAMA_BLOCKS, steps_in_words
from kvlens.experiments.shared.curves import PLAIN, SHIFTED, draw_curves, last_heldout, of_heldout, train_and_compare
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.seeds import differences_by_seed, mean_and_spread
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.tasks import make_task

SHIFT_1, PLAIN_2 = "1 layer, KV shift", "2 layers, plain"
MODELS: dict[str, dict[str, Any]] = {SHIFT_1: dict(n_layers=1, kv_shift=True), PLAIN_2: dict(n_layers=2)}
COLORS = {SHIFT_1: SHIFTED, PLAIN_2: PLAIN}


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train both models at every width, with every seed, and compare where they end."""
    task, n_heads = make_task("induction", **settings["task"]), settings["n_heads"]
    for width in settings["widths"]:
        if width % (2 * n_heads):  # rotary positions turn pairs of a head's numbers
            raise KVLensError(f"induction-width: a width must be a multiple of 2 * n_heads = {2 * n_heads}, got {width}")
    courses = []
    for width in settings["widths"]:
        tell(f"width {width}")
        size = dict(d_model=width, d_head=width // n_heads, **LLAMA_BLOCKS)
        models = {label: {**size, **own} for label, own in MODELS.items()}
        course = train_and_compare(task, models, settings["training"], settings["seeds"], tell, rates=settings["rates"])
        courses.append(course.assign(d_model=width))
    curves = pd.concat(courses, ignore_index=True)
    accuracy = last_heldout(curves, by=("d_model", "model", "seed"))
    return Outcome(
        tables={"curves": curves, "accuracy": accuracy},
        figure=draw(accuracy),
        comparisons=compare(accuracy, untrained(curves, 1 / settings["task"]["vocab_size"])),
        differences=[
            f"Vocabulary {settings['task']['vocab_size']} and length {settings['task']['length']} (the paper: 8,000 and 512), "
            f"seeds {settings['seeds']}, at most {settings['training']['steps']} steps for every model: a width that "
            "fails here may still learn later.",
            "The paper presses its models at width 8 alone; how many heads they have there, and for how long they train, is "
            "not printed. Trained on is the judged position alone.",
            steps_in_words(settings),
        ],
    )


def untrained(curves: pd.DataFrame, chance: float) -> dict[int, str | None]:
    """Width -> why nothing can be said there; None where something can.

    Two plain layers may be too narrow to learn, which is the claim. So they must learn at the largest width, which shows that
    the steps are enough; elsewhere their curves must be flat, and the shifted layer's where it is behind.
    """
    goal = Goal(chance, best=1.0, y="accuracy")
    runs = {(int(width), str(model)): rows for (width, model), rows in of_heldout(curves).groupby(["d_model", "model"])}
    widest = max(width for width, _ in runs)
    largest = runs[widest, PLAIN_2]
    learned = goal.why_not_learned(largest, f"{PLAIN_2}, width {widest},")
    found: dict[int, str | None] = {}
    for (width, model), rows in runs.items():
        still = goal.why_not_flat(
            rows, f"{model}, width {width},", of=largest, rival=None if model == PLAIN_2 else runs[width, PLAIN_2]
        )
        found[width] = learned or found.get(width) or still
    return found


def compare(accuracy: pd.DataFrame, why: Mapping[int, str | None]) -> list[Comparison]:
    """The figure's statement at each width, judged seed by seed, and what the two models cost at the widest.

    Args:
        accuracy: one row per run: d_model, model, seed, n_parameters, accuracy.
        why: of `untrained`.
    """
    found = []
    for width, runs in accuracy.groupby("d_model"):
        mean = runs.groupby("model")["accuracy"].mean()
        lead = differences_by_seed(runs, SHIFT_1, PLAIN_2, "accuracy")
        found.append(
            Comparison(
                f"accuracy of one shifted layer minus that of two plain layers, width {width} (plain: {mean[PLAIN_2]:.3f})",
                None,
                mean_and_spread(lead),
                "a narrow model learns induction better with one shifted layer than with two plain ones",
                SIGNIFICANCE.above(lead),
            ).unless(why.get(int(str(width))))
        )
    widest = accuracy[accuracy["d_model"] == accuracy["d_model"].max()].groupby("model")["n_parameters"].first()
    stated = Comparison.stated(
        f"parameters of two plain layers over those of one shifted layer, width {accuracy['d_model'].max()}",
        None,
        float(widest[PLAIN_2] / widest[SHIFT_1]),
        "the plain model has twice the parameters, embeddings left out",
    )
    return [*found, stated]


def draw(accuracy: pd.DataFrame) -> Figure:
    """Accuracy at the end against width."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    draw_curves(axes, accuracy, x="d_model", colors=COLORS, marker="o", markersize=5)
    axes.set_xscale("log", base=2)
    widths = sorted(set(accuracy["d_model"].tolist()))
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set(ylim=(-0.02, 1.04), xlabel="width (d_model)", ylabel="held-out accuracy after training")
    axes.set_title("Induction: the width that one shifted layer and two plain ones need", loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=9, title="mean over seeds; band: least to largest", title_fontsize=8)
    return figure


def _scale(
    vocab_size: int, length: int, widths: list[int], seeds: list[int], rates: list[float], **training: Any
) -> dict[str, Any]:
    return dict(
        task=dict(vocab_size=vocab_size, length=length, law="first_repeat"),
        n_heads=2,
        widths=widths,
        training={"batch_size": 128, "stop_at_accuracy": 0.999, **training},
        seeds=seeds,
        rates=rates,
    )


EXPERIMENT = Experiment(
    name="induction-width",
    source="KVSA fig. 1b",
    question="Does induction need less width with KV shift than without?",
    run=run,
    scales={
        "tiny": _scale(16, 16, [8, 16], [0], [5e-3], steps=6, eval_every=3, eval_sequences=16, batch_size=16),
        "small": _scale(64, 32, [8, 16, 32], [0, 1, 2, 3, 4, 5], [3e-3, 1e-2], steps=600, eval_every=50, eval_sequences=256),
        "paper": _scale(
            8000,
            512,
            [8, 16, 32, 64, 128, 256, 512],
            [0, 1, 2, 3, 4, 5],
            [1e-4, 2e-4, 6e-4],
            warmup_fraction=0.05,  # 1,000 steps
            steps=20_000,
            eval_every=500,
            eval_sequences=512,
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "twenty minutes on one core",
        "paper": "a day on one GPU (the paper's vocabulary and length; not run here)",
    },
)
