"""``induction-heads``: which heads become induction heads, and how far they stand out (KVSA sec. 3.2 and 5).

The paper says two things of heads with KV shift without a figure. *Start*: heads whose (alpha_1, beta_1) start near (0, 1),
the induction head, become one more easily. *Locating*: induction heads may be easier to find with the shift, since one head
does what otherwise takes two.

A head's *score* is the share of what it reads that it reads where an induction head does, at the token after the earlier
occurrence of its own, on random tokens that repeat:

    score = mean over queries of E[i, i - N + 1] / (|beta_1| + |beta_2|)

with E the attention to tokens, the shift of values included. It is 1 for an induction head, and a factor between beta and W_V
does not change it.
"""

from collections.abc import Hashable, Iterator
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.analyses import induction_heads as score_heads
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.learned import Cell, Goal, differences_by_seed, of_heldout, train_cells
from kvlens.papers.harness.plots import PLAIN_COLOR, SHIFTED_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import LLAMA_BLOCKS, MORE_SEEDS, SMALL_SEEDS
from kvlens.tasks import make_task
from kvlens.training import build_model

SHIFT_1, SHIFT_2, PLAIN_2 = "1 layer, KV shift", "2 layers, KV shift", "2 layers, plain"
MODELS: dict[str, dict[str, object]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    SHIFT_2: dict(n_layers=2, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
}
COLORS = {SHIFT_1: SHIFTED_COLOR, SHIFT_2: "#009E73", PLAIN_2: PLAIN_COLOR}
FRESH = 1
"""The seed of the texts on which trained models are examined."""


@experiment(
    "KVSA sec. 3.2, 5",
    "Which heads become induction heads, and how far do they stand out?",
    cost=("a few seconds", "ten minutes on one core"),
    task=dict(vocab_size=(16, 64), length=(16, 32)),
    model=dict(d_model=(16, 64), d_head=(8, 16), **LLAMA_BLOCKS),
    training=dict(
        batch_size=(8, 32),
        schedule="constant",
        stop_at_accuracy=0.99,
        steps=(6, 1500),
        eval_every=(3, 25),
        eval_sequences=(16, 256),
    ),
    seeds=([0], SMALL_SEEDS),
    seeds_of_one_layer=([0, 1], [*SMALL_SEEDS, *MORE_SEEDS, *range(23, 35)]),
    rates=([5e-3], [3e-3]),
    n_texts=(10, 200),
)
def induction_heads(settings: Settings, tell: Tell) -> Reproduction:
    """Train the models and score their heads."""
    curves, heads = train_cells(cells(settings), settings, tell)
    return Reproduction(
        tables={"curves": curves, "heads": heads},
        figure=partial(draw, heads),
        comparisons=[*compare(heads, untrained(curves, settings))],
        differences=[
            f"Width {settings['model']['d_model']}, vocabulary {settings['task']['vocab_size']}, length "
            f"{settings['task']['length']}, seeds {settings['seeds']}, {len(settings['seeds_of_one_layer'])} of one layer. A "
            f"run ends at an accuracy of {settings['training']['stop_at_accuracy']:.0%}.",
            "The paper has no experiment on these statements: tasks, scores and sizes are ours.",
        ],
    )


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield one layer, and two, on repeated blocks."""
    blocks, n_texts = make_task("induction", **settings["task"]), settings["n_texts"]
    models = {label: {**settings["model"], **own} for label, own in MODELS.items()}

    def examine(label: str, seed: int, model: HookedKVTransformer) -> list[dict[str, object]]:
        start = build_model(blocks, {**models[label], "seed": seed})
        rows = head_rows(start, model, n_texts, settings["task"]["length"] // 2)
        return [dict(model=label, seed=seed, **row) for row in rows]

    for labels, seeds in (([SHIFT_1], settings["seeds_of_one_layer"]), ([SHIFT_2, PLAIN_2], settings["seeds"])):
        yield Cell(blocks, {label: models[label] for label in labels}, seeds=seeds, title=labels[0], examine=examine)


def head_rows(start: Any, model: HookedKVTransformer, n_texts: int, n_repeated: int) -> list[dict[str, object]]:
    """One row per head of a trained model: where its coefficients started (None without a shift), and its score."""
    found = score_heads(model, n_sequences=n_texts, n_repeated=n_repeated, seed=FRESH)
    found = found[found["kind"] == "prefix_matching"]
    rows = []
    for layer, head, score in zip(found["layer"], found["head"], found["score_value"], strict=True):
        if model.cfg.kv_shift is None:
            rows.append(dict(layer=layer, head=head, alpha_1=None, beta_1=None, score=score))
            continue
        (alpha, beta), (_, read) = (coefficients(m.blocks[layer].attn, head) for m in (start, model))
        rows.append(dict(layer=layer, head=head, alpha_1=alpha[0], beta_1=beta[0], score=score / sum(map(abs, read))))
    return rows


def coefficients(attn: Any, head: int) -> tuple[list[float], list[float]]:
    """The alphas and the betas of a head; without grouped queries."""
    return attn.k_shift_coef[head].tolist(), attn.v_shift_coef[head].tolist()


def untrained(curves: pd.DataFrame, settings: Settings) -> dict[Hashable, str | None]:
    """Say by model why the runs have not learned it; or None."""
    goal = Goal(make_task("induction", **settings["task"]).chance, best=1.0, share=0.9, y="accuracy")
    return {label: goal.why_not_learned(own, str(label)) for label, own in of_heldout(curves).groupby("model")}


def compare(heads: pd.DataFrame, why: dict[Hashable, str | None]) -> Iterator[Comparison]:
    """Compare both statements, tested seed by seed; ``why`` is that of `untrained`."""
    yield compare_starts(heads[heads["model"] == SHIFT_1]).unless(why[SHIFT_1])
    for label in (SHIFT_1, SHIFT_2):
        yield compare_gaps(heads, label).unless(why[label] or why[PLAIN_2])


def compare_starts(heads: pd.DataFrame) -> Comparison:
    """Whether the head of a model that starts nearest to the induction head has a higher score than the others."""
    distance = (heads["alpha_1"] ** 2 + (1 - heads["beta_1"]) ** 2) ** 0.5
    nearest = distance == distance.groupby(heads["seed"]).transform("min")
    by_seed = [heads.loc[mask].groupby("seed")["score"].mean() for mask in (nearest, ~nearest)]
    what = "induction score of the head that starts nearest to (0, 1), and mean of its model's other heads"
    claim = "the head that starts nearest to (0, 1) has the higher score after training"
    ours = "{:.2f} against {:.2f}".format(*(scores.mean() for scores in by_seed))
    return Comparison.tested_on(what, claim, (by_seed[0] - by_seed[1]).tolist(), ours=ours)


def compare_gaps(heads: pd.DataFrame, label: str) -> Comparison:
    """Compare how far induction heads stand out: the largest gap between scores of a model that are next to each other."""
    run, ordered = ["model", "seed"], heads.sort_values("score")
    gaps = ordered.assign(score=ordered.groupby(run)["score"].diff()).groupby(run, as_index=False)["score"].max()
    means = gaps.groupby("model")["score"].mean()
    what = f"largest gap between the induction scores of a model's heads: {label}, against {PLAIN_2}"
    claim = f"induction heads stand out more with KV shift than in two plain layers: {label}"
    ours = f"{means[label]:.2f} against {means[PLAIN_2]:.2f}"
    return Comparison.tested_on(what, claim, differences_by_seed(gaps, label, PLAIN_2, "score"), ours=ours)


def draw(heads: pd.DataFrame) -> Figure:
    """Each head's score against the distance of its start from the induction head."""
    shown = heads[heads["model"] == SHIFT_1]
    shown = shown.assign(start=(shown["alpha_1"] ** 2 + (1 - shown["beta_1"]) ** 2) ** 0.5)
    title = "Heads of one layer with KV shift; a dot per head"
    xlabel = "distance of $(\\alpha_1, \\beta_1)$ from (0, 1) at the start"
    return draw_panels(shown, "start", "score", colors=COLORS, title=title, xlabel=xlabel, dots=True)
