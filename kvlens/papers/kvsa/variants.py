"""``variants``: which form of KV shift trains a language model best (KVSA fig. 8, sec. 4.6 and 4.7, app. J).

Nine small models that differ only in their shift are trained on the same batches of documentation text: without shift, with
the paper's free coefficients, with coefficients bounded by a gate or a clamp, with only keys or only values shifted, with
windows of two and three predecessors, and with queries shifted too. The held-out loss at the end is compared, seed by seed,
with that of the free form (the paper shows training losses, of runs that see no text twice).
"""

from collections.abc import Iterator, Mapping

import pandas as pd
from matplotlib.figure import Figure

from kvlens.errors import check_known
from kvlens.papers.harness.learned import Cell, Goal, final_losses, lead, of_heldout, train_cells
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import MODEL, MORE_SEEDS, RATES, SMALL_SEEDS, TEXT_TASK, TRAINING, text_goal, tokens_seen
from kvlens.tasks.text import TextTask

FREE = "keys + values (free)"
NONE = "no shift"
VARIANTS: dict[str, dict[str, object] | None] = {
    NONE: None,
    FREE: {},
    "gate": {"parametrization": "gate"},
    "clamp": {"parametrization": "clamp"},
    "keys only": {"values": False},
    "values only": {"keys": False},
    "window 2": {"window": 2},
    "window 3": {"window": 3},
    "keys + values + queries": {"queries": True},
}
"""Label -> fields of :class:`kvlens.KVShiftConfig`; window 1 and free coefficients where nothing else is said."""

CLAIMS = {
    NONE: "without KV shift the loss is higher (figs. 4 to 6)",
    "gate": "bounding the coefficients by a gate does not beat the free form (sec. 4.6, fig. 8a)",
    "clamp": "bounding the coefficients by a clamp does not beat the free form (sec. 4.6, fig. 8a)",
    "keys only": "removing the shift of the values raises the loss (sec. 4.7, fig. 8b)",
    "values only": "removing the shift of the keys raises the loss (sec. 4.7, fig. 8b)",
    "window 2": "a longer window does not improve performance: two predecessors do not lower the loss (sec. 4.7, fig. 8c)",
    "window 3": "a longer window does not improve performance: three do not lower the loss (sec. 4.7, fig. 8c)",
    "keys + values + queries": "shifting queries too does not help: the two losses are similar (app. J, fig. 10)",
}
"""The paper's claims about each variant's loss, compared with the free form's."""

CLEAR = (NONE, "window 2")
"""Variants whose difference from the free form is large next to the spread of seeds, so that fewer seeds will do."""


@experiment(
    "KVSA fig. 8, app. J",
    "Which form of KV shift trains a language model best: which projections, which window, bounded or free?",
    cost=("seconds", "two hours on one core (132 runs)"),
    task=TEXT_TASK,
    model=MODEL,
    variants=list(CLAIMS),
    training=TRAINING,
    rates=RATES,
    seeds=([0, 1], [*SMALL_SEEDS, *MORE_SEEDS]),
    n_seeds_of_clear=(1, 6),
)
def variants(settings: Settings, tell: Tell) -> Reproduction:
    """Train every variant on the same batches, and compare its held-out loss with the free form's."""
    curves, _ = train_cells(cells(settings), settings, tell)
    finals = final_losses(curves)
    return Reproduction(
        tables={"course": curves, "variants": finals},
        figure=lambda: draw(finals),
        comparisons=compare(finals, untrained(of_heldout(curves), text_goal(settings["task"]))),
        differences=[
            "The paper trains 1.5 billion parameters on 10 billion tokens; here the largest model has "
            f"{curves['n_parameters'].max():,} and each sees {tokens_seen(settings)} tokens of another corpus.",
            "Held-out losses are compared, seed by seed on equal batches, each variant at the best of a few rates; the paper "
            "shows the training loss of one run of each variant. Where the paper finds losses similar, no test can show that "
            "they are: beside an inconclusive verdict stands the difference that would have been found.",
            "App. J compares queries at 19 billion parameters, and finds its benchmarks worse at a similar loss; there are no "
            "benchmarks here.",
        ],
    )


def cells(settings: Settings) -> Iterator[Cell]:
    """The free form and the variants of ``settings["variants"]``; `CLEAR` ones with the first ``n_seeds_of_clear`` seeds."""
    check_known("variants: no variant", settings["variants"], CLAIMS)
    chosen = [FREE, *(name for name in CLAIMS if name in settings["variants"])]
    models = {label: {**settings["model"], "kv_shift": VARIANTS[label]} for label in chosen}
    few = settings["seeds"][: settings["n_seeds_of_clear"]]
    task = TextTask(**settings["task"])
    for seeds, labels in ((few, [x for x in chosen if x in CLEAR]), ((), [x for x in chosen if x not in CLEAR])):
        if labels:
            yield Cell(task, {label: models[label] for label in labels}, seeds=seeds)


def untrained(heldout: pd.DataFrame, goal: Goal) -> dict[str, str | None]:
    """Say by variant what is too little trained: the free form must have learned, and a variant that is behind it be flat."""
    labels = heldout["model"].unique()
    return {label: goal.why_untrained(heldout[heldout["model"].isin([FREE, label])], FREE) for label in labels}


def compare(finals: pd.DataFrame, why: Mapping[str, str | None]) -> list[Comparison]:
    """Compare every variant's held-out loss with the free form's, above which every claim has it."""
    what, trained = "held-out loss of {!r} above that of {!r}, nats", set(finals["model"].unique())
    return [
        lead(finals, label, FREE, "heldout_loss", what.format(label, FREE), claim).unless(why.get(label))
        for label, claim in CLAIMS.items()
        if label in trained
    ]


def draw(finals: pd.DataFrame) -> Figure:
    """Plot each variant's held-out loss at the end minus the free form's, seed by seed; the best is on the left."""
    free, order = (
        finals[finals["model"] == FREE].set_index("seed")["heldout_loss"],
        finals.groupby("model")["heldout_loss"].mean(),
    )
    above = finals.assign(above=finals["heldout_loss"] - finals["seed"].map(free), place=finals["model"].map(order.rank()))
    title = "Held-out loss above the free form's, same seed (nats); a dot per seed"
    return draw_panels(above.sort_values("place", kind="stable"), "place", "above", title=title, lines={FREE: 0.0}, dots=True)
