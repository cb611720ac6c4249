"""``hops``: how many hops of induction a model of a given depth learns, with and without KV shift (KVSA fig. 9, app. H).

One hop goes from a token to the one that followed its last occurrence; k hops repeat this k times. Plain attention needs one
layer to write predecessors into the stream before any hop can be made. With KV shift the first layer can already make a hop,
and a second layer that attends to the same position copies what the first has found *there*: two layers make two hops, for
which plain attention needs three. For every number of hops k and every depth a plain and a shifted model are trained on targets
of exactly k hops; or, with ``mixed``, one model for all numbers of hops, as in the paper: each text begins with a token that
says how many lead to its answers.
"""

from collections.abc import Hashable, Iterator, Mapping
from functools import partial

import pandas as pd
import torch

from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.learned import Cell, Goal, last_heldout, lead, of_heldout, train_cells
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import MODEL_COLORS, MODELS, PLAIN, SHIFTED
from kvlens.tasks import HopsTask, make_task
from kvlens.tasks.task import Model

LEARNED = 0.9
"""The accuracy from which a run counts as having learned k hops completely."""

FRESH = 1
"""The seed of the held-out sequences on which models for all numbers of hops are compared."""


@experiment(
    "KVSA fig. 9, app. H",
    "Does a model of the same depth learn more hops of induction with KV shift?",
    cost=("a few seconds", "22 minutes on one core"),
    task=dict(vocab_size=(3, 4), length=(10, 32)),
    model=dict(d_model=(8, 64), d_head=(4, 16), attn_only=True),
    depths=([1, 2], [2]),
    hops=([1], [1, 2, 3]),
    mixed=False,
    n_sequences=1000,
    seeds=([0], [11, 12, 13, 14, 15, 16]),
    rates=([1e-2], [2e-3, 4e-3]),
    training=dict(
        batch_size=32,
        stop_at_accuracy=0.99,
        steps=(6, 2000),
        eval_every=(3, 100),
        eval_sequences=(16, 128),
    ),
)
def hops(settings: Settings, tell: Tell) -> Reproduction:
    """Train both models at every depth on every number of hops, and compare them at each depth."""
    curves, final = train_cells(cells(settings), settings, tell)
    if settings["mixed"]:
        curves = curves.assign(k=max(settings["hops"]))  # the curve of all of them
    else:
        final = last_heldout(curves, by=("n_layers", "k", "model", "seed"))
    chances = {k: HopsTask(k=k, **settings["task"]).chance for k in settings["hops"]}
    final = final.assign(chance=final["k"].map(chances))
    figure = partial(draw_panels, final, "k", panel="n_layers", xlabel="hops k", colors=MODEL_COLORS, ticks=True)
    differences = [
        f"Vocabulary {settings['task']['vocab_size']}, length {settings['task']['length']}, width "
        f"{settings['model']['d_model']}, depths {settings['depths']}, k in {settings['hops']}, at most "
        f"{settings['training']['steps']} steps, seeds {settings['seeds']}: chosen for a small machine, not the paper's.",
        f"Each model is trained on {'all numbers of hops' if settings['mixed'] else 'one k'}; positions at which a hop does "
        "not exist are not scored.",
    ]
    comparisons = [*compare(final, untrained(curves, chances))]
    return Reproduction({"curves": curves, "final": final}, figure, comparisons, differences)


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield both models at every depth, on every number of hops, or on all of them at once."""
    for n_layers in settings["depths"]:
        models = {label: {**settings["model"], "n_layers": n_layers, **own} for label, own in MODELS.items()}
        if settings["mixed"]:
            yield of_all_hops(settings, models, n_layers)
        for k in settings["hops"] * (not settings["mixed"]):
            task = make_task("hops", k=k, **settings["task"])
            yield Cell(task, models, dict(n_layers=n_layers, k=k), title=f"{layers(n_layers)}, k = {k}")


def of_all_hops(settings: Settings, models: Mapping[str, Mapping[str, object]], n_layers: int) -> Cell:
    """Models that learn all numbers of hops up to the largest, and are examined on each."""
    task = HopsTask(k=max(settings["hops"]), mixed=True, **settings["task"])

    def examine(label: str, seed: int, model: HookedKVTransformer) -> list[dict[str, object]]:
        by_hops = accuracies(model, task, settings["n_sequences"])
        return [dict(model=label, seed=seed, k=k, accuracy=by_hops[k]) for k in settings["hops"]]

    return Cell(task, models, dict(n_layers=n_layers), title=f"{layers(n_layers)}, all k", examine=examine)


@torch.no_grad()
def accuracies(model: Model, task: HopsTask, n_sequences: int) -> dict[int, float]:
    """Number of hops -> share of right answers, on sequences that chose no weights."""
    inputs, targets, scored = task.heldout(n_sequences, seed=FRESH)
    right = model(inputs.to(model.cfg.device)).argmax(dim=-1).cpu() == targets
    said = inputs[:, :1] - task.vocab_size + 1
    return {k: float(right[scored & (said == k)].double().mean()) for k in range(1, task.k + 1)}


def layers(n_layers: object) -> str:
    """``"1 layer"``, ``"2 layers"``."""
    return f"{n_layers} layer{'' if n_layers == 1 else 's'}"


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


def untrained(curves: pd.DataFrame, chances: Mapping[int, float]) -> dict[Hashable, str | None]:
    """Say by depth why plain layers that do not learn a number of hops may be too little trained, not too few; or None.

    They must have learned the smallest number of hops (or half of all, where one model learns all). At the others, their curve
    must be flat, and so must that of a model that is behind them.
    """
    goals = {k: Goal(chance, best=1.0, y="accuracy") for k, chance in chances.items()}
    found: dict[Hashable, str | None] = {}
    for depth, rows in of_heldout(curves).groupby("n_layers"):
        runs, easiest = dict(list(rows.groupby(["k", "model"]))), rows["k"].min()
        found[depth] = goals[easiest].why_not_learned(runs[easiest, PLAIN], f"{PLAIN}, {layers(depth)}, k = {easiest},")
        for (k, model), own in runs.items():
            rival = None if model == PLAIN else runs[k, PLAIN]
            found[depth] = found[depth] or goals[k].why_not_flat(own, f"{model}, {layers(depth)}, k = {k},", rival=rival)
    return found


def compare(final: pd.DataFrame, why: Mapping[Hashable, str | None]) -> Iterator[Comparison]:
    """Hops made and accuracy at each depth; ``final`` has one row per run."""
    for depth, rows in final.groupby("n_layers", sort=False):
        what = (
            f"hops made by {layers(depth)}, one learned in part counting as that part ({LEARNED:.0%} accuracy is all), "
            "mean over seeds: KV shift against plain"
        )
        claim, ours = "with KV shift a model of the same depth learns more hops", "{of:.3g} against {minus:.3g}"
        yield lead(hops_made(rows), SHIFTED, PLAIN, "hops", what, claim, ours=ours).unless(why.get(depth))
        what = f"accuracy with KV shift minus without, {layers(depth)}, mean over k"
        claim = "KV shift is better at hops at the same depth"
        yield lead(rows, SHIFTED, PLAIN, "accuracy", what, claim).unless(why.get(depth))
