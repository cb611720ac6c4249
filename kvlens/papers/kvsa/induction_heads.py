"""``induction-heads``: which heads become induction heads, and what texts of two tokens teach (KVSA sec. 3.2 and 5).

The paper says three things of heads with KV shift without a figure. *Start*: heads whose (alpha_1, beta_1) start near (0, 1),
the induction head, become one more easily. *Short texts*: a model that only reads A B A is right with the previous token, so
it learns no induction head, and does not answer A B C A with B. *Locating*: induction heads may be easier to find with the
shift, since one head does what otherwise takes two.

A head's *score* is the share of what it reads that it reads where an induction head does, at the token after the earlier
occurrence of its own, on random tokens that repeat:

    score = mean over queries of E[i, i - N + 1] / (|beta_1| + |beta_2|)

with E the attention to tokens, the shift of values included. It is 1 for an induction head, and a factor between beta and W_V
does not change it.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pandas as pd
import torch

from kvlens.analyses import induction_heads as score_heads
from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.learned import Cell, Goal, differences_by_seed, of_heldout, train_cells
from kvlens.papers.harness.plots import PLAIN_COLOR, SHIFTED_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import LLAMA_BLOCKS, MORE_SEEDS, SMALL_SEEDS
from kvlens.tasks import Task, make_task
from kvlens.tasks.task import draw_distinct
from kvlens.training import build_model

SHIFT_1, SHIFT_2, PLAIN_2 = "1 layer, KV shift", "2 layers, KV shift", "2 layers, plain"
MODELS: dict[str, dict[str, Any]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    SHIFT_2: dict(n_layers=2, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
}
COLORS = {SHIFT_1: SHIFTED_COLOR, SHIFT_2: "#009E73", PLAIN_2: PLAIN_COLOR}
BLOCKS, SHORT = "repeated blocks", "A B A"
"""What is read in training."""
FRESH = 1
"""The seed of the texts on which trained models are examined."""


@experiment(
    "KVSA sec. 3.2, 5",
    "Which heads become induction heads, how far do they stand out, and are texts of two tokens enough?",
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
    """Train the models, score their heads, and let them answer A B C A."""
    answers: list[dict[str, Any]] = []
    curves, heads = train_cells(cells(settings, answers), settings, tell)
    found = pd.DataFrame(answers)
    return Reproduction(
        tables={"curves": curves, "heads": heads, "answers": found},
        figure=partial(draw, heads),
        comparisons=[*compare(heads, found, untrained(curves, settings))],
        differences=[
            f"Width {settings['model']['d_model']}, vocabulary {settings['task']['vocab_size']}, length "
            f"{settings['task']['length']}, seeds {settings['seeds']}, {len(settings['seeds_of_one_layer'])} of one layer. A "
            f"run ends at an accuracy of {settings['training']['stop_at_accuracy']:.0%}.",
            "The paper has no experiment on these statements: tasks, scores and sizes are ours.",
        ],
    )


def cells(settings: Settings, answers: list[dict[str, Any]]) -> Iterator[Cell]:
    """Yield one layer and two on repeated blocks, one layer on A B A; what they answer to A B C A goes to ``answers``."""
    task, n_texts = settings["task"], settings["n_texts"]
    # rotary positions have no weights, so that a model that is trained on short texts reads longer ones
    models = {label: {**settings["model"], **own, "n_ctx": task["length"]} for label, own in MODELS.items()}
    blocks = make_task("induction", **task)

    def examine(reads: str, own: Task, label: str, seed: int, model: HookedKVTransformer) -> list[dict[str, Any]]:
        if label == SHIFT_1:
            answers.append(dict(model=label, seed=seed, reads=reads, **answers_to_three(model, n_texts)))
        start = build_model(own, {**models[label], "seed": seed})
        rows = head_rows(start, model, n_texts, task["length"] // 2)
        return [dict(model=label, seed=seed, reads=reads, **row) for row in rows]

    for own, reads, labels, seeds in (
        (blocks, BLOCKS, [SHIFT_1], settings["seeds_of_one_layer"]),
        (make_task("induction", **{**task, "length": 3}, law="first_repeat"), SHORT, [SHIFT_1], settings["seeds_of_one_layer"]),
        (blocks, BLOCKS, [SHIFT_2, PLAIN_2], settings["seeds"]),
    ):
        chosen = {label: models[label] for label in labels}
        yield Cell(own, chosen, dict(reads=reads), seeds=seeds, title=reads, examine=partial(examine, reads, own))


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


@torch.no_grad()
def answers_to_three(model: HookedKVTransformer, n_texts: int) -> dict[str, float]:
    """The shares of texts A B C A that the model continues with B, as an induction head does, and with C, the token before."""
    tokens = draw_distinct(model.cfg.d_vocab, n_texts, 3, torch.Generator().manual_seed(FRESH))
    text = torch.cat([tokens, tokens[:, :1]], dim=1)
    answer = model(text.to(model.cfg.device))[:, -1].argmax(dim=-1).cpu()
    return {name: float((answer == tokens[:, at]).double().mean()) for name, at in (("following", 1), ("previous", 2))}


def untrained(curves: pd.DataFrame, settings: Settings) -> dict[Any, str | None]:
    """Say by what they read and by model why the runs have not learned it; or None."""
    goal = Goal(make_task("induction", **settings["task"]).chance, best=1.0, share=0.9, y="accuracy")
    by_model = of_heldout(curves).groupby(["reads", "model"])
    return {(reads, label): goal.why_not_learned(own, f"{label}, on {reads},") for (reads, label), own in by_model}


def compare(heads: pd.DataFrame, answers: pd.DataFrame, why: dict[Any, str | None]) -> Iterator[Comparison]:
    """Compare the three statements, tested seed by seed; ``why`` is that of `untrained`."""
    blocks = heads[heads["reads"] == BLOCKS]
    yield compare_starts(blocks[blocks["model"] == SHIFT_1]).unless(why[BLOCKS, SHIFT_1])
    for label in (SHIFT_1, SHIFT_2):
        yield compare_gaps(blocks, label).unless(why[BLOCKS, label] or why[BLOCKS, PLAIN_2])
    yield from (one.unless(why[SHORT, SHIFT_1]) for one in compare_short(answers))


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


def compare_short(answers: pd.DataFrame) -> Iterator[Comparison]:
    """What a model that has read nothing but A B A makes of A B C A, beside one that has read longer texts."""
    short, longer = (answers[answers["reads"] == reads].set_index("seed") for reads in (SHORT, BLOCKS))
    what = "texts A B C A continued with C, the previous token, and with B, by a model of texts A B A"
    claim = "with T = 2 the model learns the previous token"
    ours = f"{short['previous'].mean():.2f} and {short['following'].mean():.2f}"
    yield Comparison.tested_on(what, claim, (short["previous"] - short["following"]).tolist(), ours=ours)
    what = "texts A B C A continued with B by a model of texts A B A, and by one of longer texts"
    claim = "with T = 2 the model learns induction less well than from longer texts"
    ours = f"{short['following'].mean():.2f} and {longer['following'].mean():.2f}"
    yield Comparison.tested_on(what, claim, (longer["following"] - short["following"]).dropna().tolist(), ours=ours)


def draw(heads: pd.DataFrame) -> Any:
    """Each head's score against the distance of its start from the induction head."""
    shown = heads[(heads["model"] == SHIFT_1) & (heads["reads"] == BLOCKS)]
    shown = shown.assign(start=(shown["alpha_1"] ** 2 + (1 - shown["beta_1"]) ** 2) ** 0.5)
    title = "Heads of one layer with KV shift; a dot per head"
    xlabel = "distance of $(\\alpha_1, \\beta_1)$ from (0, 1) at the start"
    return draw_panels(shown, "start", "score", colors=COLORS, title=title, xlabel=xlabel, dots=True)
