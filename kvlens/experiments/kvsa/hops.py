"""``hops``: how many hops of induction a model of a given depth learns, with and without KV shift (KVSA fig. 9, app. H).

One hop goes from a token to what followed it last time; k hops ask again and again. Plain attention spends a layer on writing
predecessors into the stream before any hop can be made. With KV shift the first layer hops already, and a second layer that
attends to the same place copies what the first has found *there*: two layers make two hops, where plain ones need three. For
every number of hops k and every depth a plain and a shifted model are trained on targets of exactly k hops.
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
LEARNED = 0.9
"""The accuracy from which on a run counts as having learned k hops altogether."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train both models at every depth on every number of hops."""
    courses = []
    for n_layers in settings["depths"]:
        models = {label: {**settings["model"], "n_layers": n_layers, **own} for label, own in MODELS.items()}
        for k in settings["hops"]:
            tell(f"{_layers(n_layers)}, k = {k}")
            task = make_task("hops", k=k, **settings["task"])
            course = train_and_compare(task, models, settings["training"], settings["seeds"], tell, rates=settings["rates"])
            courses.append(course.assign(n_layers=n_layers, k=k))
    curves = pd.concat(courses, ignore_index=True)
    chance = 1 / settings["task"]["vocab_size"]
    final = last_heldout(curves, by=("n_layers", "k", "model", "seed")).assign(chance=chance)
    return Outcome(
        tables={"curves": curves, "final": final},
        figure=draw(final),
        comparisons=compare(final, untrained(curves, chance)),
        differences=[
            f"Vocabulary {settings['task']['vocab_size']}, length {settings['task']['length']}, width "
            f"{settings['model']['d_model']}, depths {settings['depths']}, k in {settings['hops']}, at most "
            f"{settings['training']['steps']} steps, seeds {settings['seeds']}: chosen for a small machine, not the paper's.",
            "Each model is trained on one k; positions where a hop is missing are not judged.",
        ],
    )


def hops_made(final: pd.DataFrame) -> pd.DataFrame:
    """How many hops each run makes at each depth, up to the first k that it did not learn, of which a part may count.

    A k counts for the part of the way from chance to `LEARNED` that its accuracy has gone, and for no larger part than the k
    before it: 2.5 where one hop and two are learned and a third half.

    Args:
        final: one row per run: n_layers, k, model, seed, accuracy, chance.

    Returns:
        Columns n_layers, model, seed, hops (0 where not even the first is above chance).
    """
    keys = ["n_layers", "model", "seed"]
    runs = final.sort_values("k", kind="stable")
    part = ((runs["accuracy"] - runs["chance"]) / (LEARNED - runs["chance"])).clip(0, 1)
    by_run = [runs[key] for key in keys]
    steps = runs["k"] - runs.groupby(keys)["k"].shift(fill_value=0)
    return runs.assign(hops=steps * part.groupby(by_run).cummin()).groupby(keys, as_index=False)["hops"].sum()


def untrained(curves: pd.DataFrame, chance: float) -> dict[int, str | None]:
    """Depth -> why nothing can be said there; None where something can.

    Plain layers may be too few for a number of hops, which is the claim. So they must learn the fewest, which shows that the
    steps are enough; of the other numbers their curves must be flat, and those of the shifted model where it is behind.
    """
    goal = Goal(chance, best=1.0, y="accuracy")
    found: dict[int, str | None] = {}
    for n_layers, rows in of_heldout(curves).groupby("n_layers"):
        fewest = rows[(rows["k"] == rows["k"].min()) & (rows["model"] == PLAIN_NAME)]
        depth = int(str(n_layers))
        found[depth] = goal.why_not_learned(fewest, f"plain, {_layers(n_layers)}, k = {rows['k'].min()},")
        for (k, model), own in rows.groupby(["k", "model"]):
            rival = None if model == PLAIN_NAME else rows[(rows["k"] == k) & (rows["model"] == PLAIN_NAME)]
            still = goal.why_not_flat(own, f"{model}, {_layers(n_layers)}, k = {k},", of=fewest, rival=rival)
            found[depth] = found[depth] or still
    return found


def compare(final: pd.DataFrame, why: Mapping[int, str | None]) -> list[Comparison]:
    """At each depth: how many hops were made, and how far the shifted model is ahead; judged seed by seed.

    Args:
        final: one row per run: n_layers, k, model, seed, accuracy, chance.
        why: of `untrained`.
    """
    hops = hops_made(final)
    comparisons = []
    for n_layers, runs in final.groupby("n_layers"):
        made = hops[hops["n_layers"] == n_layers]
        mean = made.groupby("model")["hops"].mean()
        lead = differences_by_seed(runs, SHIFT_NAME, PLAIN_NAME, "accuracy")
        comparisons += [
            Comparison(
                f"hops made by {_layers(n_layers)}, one learned to a part counting as that part ({LEARNED:.0%} accuracy is "
                "all), mean over seeds: KV shift against plain",
                None,
                f"{mean[SHIFT_NAME]:.3g} against {mean[PLAIN_NAME]:.3g}",
                "with KV shift a model of the same depth learns more hops",
                SIGNIFICANCE.above(differences_by_seed(made, SHIFT_NAME, PLAIN_NAME, "hops")),
            ).unless(why.get(int(str(n_layers)))),
            Comparison(
                f"accuracy with KV shift minus without, {_layers(n_layers)}, mean over k",
                None,
                mean_and_spread(lead),
                "KV shift is better at hops at the same depth",
                SIGNIFICANCE.above(lead),
            ).unless(why.get(int(str(n_layers)))),
        ]
    return comparisons


def _layers(n_layers: object) -> str:
    return f"{n_layers} layer{'s' if n_layers != 1 else ''}"


def draw(final: pd.DataFrame) -> Figure:
    """One panel a depth: accuracy at the end against the number of hops."""
    depths = sorted(set(final["n_layers"].tolist()))
    figure = Figure(figsize=(4.2 * len(depths), 4.4), layout="constrained")
    for axes, n_layers in zip(figure.subplots(1, len(depths), sharey=True, squeeze=False)[0], depths, strict=True):
        rows = final[final["n_layers"] == n_layers]
        draw_curves(axes, rows, x="k", colors=COLORS, marker="o", markersize=6)
        axes.set_title(_layers(n_layers), loc="left", fontsize=11)
        axes.set_xticks(sorted(set(rows["k"].tolist())))
        axes.set(xlabel="hops k", ylim=(0, 1.03))
    figure.axes[0].set_ylabel("held-out accuracy after training")
    figure.axes[0].legend(
        frameon=False, fontsize=9, loc="lower left", title="mean over seeds; band: least to largest", title_fontsize=8
    )
    return figure


def _scale(
    vocab_size: int,
    length: int,
    d_model: int,
    d_head: int,
    *,
    depths: list[int],
    hops: list[int],
    seeds: list[int],
    rates: list[float],
    **training: Any,
) -> dict[str, Any]:
    return dict(
        task=dict(vocab_size=vocab_size, length=length),
        model=dict(d_model=d_model, d_head=d_head, attn_only=True),
        depths=depths,
        hops=hops,
        seeds=seeds,
        rates=rates,
        training=dict(batch_size=32, stop_at_accuracy=0.99, **training),
    )


EXPERIMENT = Experiment(
    name="hops",
    source="KVSA fig. 9, app. H",
    question="Does a model of the same depth learn more hops of induction with KV shift?",
    run=run,
    scales={
        "tiny": _scale(3, 10, 8, 4, depths=[1, 2], hops=[1], seeds=[0], rates=[1e-2], steps=6, eval_every=3, eval_sequences=16),
        "small": _scale(
            4,
            32,
            64,
            16,
            depths=[2],
            hops=[1, 2, 3],
            seeds=[0, 1, 2, 3, 4, 5],
            rates=[2e-3, 4e-3],
            steps=300,
            eval_every=50,
            eval_sequences=128,
        ),
        "paper": _scale(
            16,
            256,
            128,
            32,
            depths=[2, 3, 4],
            hops=[1, 2, 4, 8, 16],
            seeds=[0, 1, 2, 3, 4, 5],
            rates=[3e-4, 1e-3],
            steps=100_000,
            eval_every=1000,
            eval_sequences=256,
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "six minutes on one core",
        "paper": "a week on one GPU (vocabulary, depths and hops chosen here; not run)",
    },
)
