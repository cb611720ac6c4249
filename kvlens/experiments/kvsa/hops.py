"""``hops``: how many hops of induction a model of a given depth learns, with and without KV shift (KVSA fig. 9, app. H).

One hop goes from a token to the one that followed its last occurrence; k hops repeat this k times. Plain attention needs one
layer to write predecessors into the stream before any hop can be made. With KV shift the first layer can already make a hop,
and a second layer that attends to the same position copies what the first has found *there*: two layers make two hops, for
which plain attention needs three. For every number of hops k and every depth a plain and a shifted model are trained on targets
of exactly k hops.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from kvlens.experiments.kvsa.models import COLORS, MODELS, PLAIN, SHIFTED
from kvlens.experiments.shared.curves import last_heldout, of_heldout
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Experiment
from kvlens.experiments.shared.sweep import Cell, Lead, Reasons, Runs, Settings, Sweep, draw_panels
from kvlens.tasks import make_task

LEARNED = 0.9
"""The accuracy from which a run counts as having learned k hops completely."""


def cells(settings: Settings) -> Iterator[Cell]:
    """Both models at every depth, on every number of hops."""
    for n_layers in settings["depths"]:
        models = {label: {**settings["model"], "n_layers": n_layers, **own} for label, own in MODELS.items()}
        for k in settings["hops"]:
            task = make_task("hops", k=k, **settings["task"])
            yield Cell(task, models, dict(n_layers=n_layers, k=k), title=f"{layers(n_layers)}, k = {k}")


def layers(n_layers: object) -> str:
    """``"1 layer"``, ``"2 layers"``."""
    return f"{n_layers} layer{'' if n_layers == 1 else 's'}"


def final(runs: Runs) -> pd.DataFrame:
    """One row per run: the last evaluation, and the accuracy of guessing."""
    last = last_heldout(runs.curves, by=("n_layers", "k", "model", "seed"))
    return last.assign(chance=1 / runs.settings["task"]["vocab_size"])


def hops_made(final: pd.DataFrame) -> pd.DataFrame:
    """Number of hops that each run makes at each depth; the last one may be learned in part.

    Each k counts by the fraction of the way from chance to `LEARNED` that its accuracy has come, and at most as much as the k
    before it: 2.5 if one hop and two hops are learned and three hops halfway.

    Args:
        final: one row per run: n_layers, k, model, seed, accuracy, chance.

    Returns:
        Columns n_layers, model, seed, hops (0 if not even the first is above chance).
    """
    keys = ["n_layers", "model", "seed"]
    runs = final.sort_values("k", kind="stable")
    part = ((runs["accuracy"] - runs["chance"]) / (LEARNED - runs["chance"])).clip(0, 1)
    by_run = [runs[key] for key in keys]
    steps = runs["k"] - runs.groupby(keys)["k"].shift(fill_value=0)
    return runs.assign(hops=steps * part.groupby(by_run).cummin()).groupby(keys, as_index=False)["hops"].sum()


def untrained(runs: Runs) -> Reasons:
    """By depth: plain layers may be too few for a number of hops, but they must learn the smallest number."""
    goal = Goal(1 / runs.settings["task"]["vocab_size"], best=1.0, y="accuracy")
    found: dict[Any, str | None] = {}
    for depth, rows in of_heldout(runs.curves).groupby("n_layers"):
        name = (layers(depth) + ", k = {}").format
        by_k = goal.why_not_limited(rows, PLAIN, "k", rows["k"].min(), name)
        found[depth] = next(filter(None, by_k.values()), None)
    return found


def differences(runs: Runs) -> list[str]:
    """From the paper."""
    s = runs.settings
    return [
        f"Vocabulary {s['task']['vocab_size']}, length {s['task']['length']}, width {s['model']['d_model']}, depths "
        f"{s['depths']}, k in {s['hops']}, at most {s['training']['steps']} steps, seeds {s['seeds']}: chosen for a small "
        "machine, not the paper's.",
        "Each model is trained on one k; positions at which a hop does not exist are not scored.",
    ]


SWEEP = Sweep(
    cells=cells,
    measure=final,
    by="n_layers",
    name=layers,
    leads=[
        Lead(
            f"hops made by {{group}}, one learned in part counting as that part ({LEARNED:.0%} accuracy is all), mean over "
            "seeds: KV shift against plain",
            "with KV shift a model of the same depth learns more hops",
            SHIFTED,
            PLAIN,
            "hops",
            runs=hops_made,
            ours="{of:.3g} against {minus:.3g}",
        ),
        Lead(
            "accuracy with KV shift minus without, {group}, mean over k",
            "KV shift is better at hops at the same depth",
            SHIFTED,
            PLAIN,
            "accuracy",
        ),
    ],
    untrained=untrained,
    differences=differences,
    draw=lambda runs: draw_panels(
        runs.measured,
        "k",
        by="n_layers",
        xlabel="hops k",
        ylabel="held-out accuracy after training",
        colors=COLORS,
        title=lambda rows: layers(rows["n_layers"].iloc[0]),
        ticks=True,
    ),
)


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
    run=SWEEP.run,
    scales={
        "tiny": _scale(3, 10, 8, 4, depths=[1, 2], hops=[1], seeds=[0], rates=[1e-2], steps=6, eval_every=3, eval_sequences=16),
        "small": _scale(
            4,
            32,
            64,
            16,
            depths=[2],
            hops=[1, 2, 3],
            seeds=[11, 12, 13, 14, 15, 16],
            rates=[2e-3, 4e-3],
            steps=2000,
            eval_every=100,
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
        "small": "forty minutes on one core",
        "paper": "a week on one GPU (vocabulary, depths and hops chosen here; not run)",
    },
)
