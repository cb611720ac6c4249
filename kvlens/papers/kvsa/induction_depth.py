"""``induction-depth``: how many layers, and how many steps, a model needs to learn induction (KVSA fig. 1a).

An induction head finds the token that followed the current token last time. Attention compares the current token with a key,
so the key must represent the *predecessor* of the token whose value is copied. A plain layer's key represents its own token:
one layer must first write predecessors into the residual stream, and only the next can look for them. KV shift mixes each key
(and value) with its predecessor, so one layer suffices. Models with Llama's blocks are trained on the paper's distribution
of sequences (app. D: random tokens, scored at the first repeat); positions are rotary. Two plain layers learn it in thousands
of steps, so two and four of them are compared on blocks of tokens that repeat, which they learn in hundreds.
"""

import math

import pandas as pd
from matplotlib.figure import Figure

from kvlens.papers.harness.learned import Cell, Goal, differences_by_seed, last_heldout, of_heldout, steps_to, train_cells
from kvlens.papers.harness.plots import PLAIN_COLOR, SHIFTED_COLOR, draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import LLAMA_BLOCKS, steps_in_words
from kvlens.tasks import make_task

SHIFT_1, PLAIN_1, PLAIN_2, PLAIN_4 = "1 layer, KV shift", "1 layer, plain", "2 layers, plain", "4 layers, plain"
MODELS: dict[str, dict[str, object]] = {
    SHIFT_1: dict(n_layers=1, kv_shift=True),
    PLAIN_2: dict(n_layers=2),
    PLAIN_1: dict(n_layers=1),
    PLAIN_4: dict(n_layers=4),
}
FEW, DEEP = "one layer or two", "two layers or four"
"""What is compared, on sequences of ``task`` and on those of ``deep_task``."""
COMPARED = {FEW: (SHIFT_1, PLAIN_2, PLAIN_1), DEEP: (PLAIN_2, PLAIN_4)}
COLORS = {SHIFT_1: SHIFTED_COLOR, PLAIN_2: PLAIN_COLOR, PLAIN_1: "#D55E00", PLAIN_4: "#CC79A7"}
LEARNED = 0.99
"""The accuracy that counts as having learned induction."""


@experiment(
    "KVSA fig. 1a",
    "Does one layer with KV shift learn induction, for which plain attention needs two?",
    cost=("a few seconds", "two hours on one core"),
    task=dict(vocab_size=(16, 64), length=(16, 32), law="first_repeat"),
    deep_task=dict(law=("repeated_block", "repeated_block")),
    model=dict(d_model=(16, 64), d_head=(8, 16), **LLAMA_BLOCKS),
    training=dict(
        batch_size=(16, 128),
        schedule="constant",
        stop_at_accuracy=0.999,
        steps=(6, 8000),
        eval_every=(3, 25),
        eval_sequences=(16, 256),
    ),
    seeds=([0], [11, 12, 13, 14, 15, 16]),
    rates=([5e-3], [1e-3]),
)
def induction_depth(settings: Settings, tell: Tell) -> Reproduction:
    """Train the models, and compare the steps that they need."""
    task, deep = settings["task"], {**settings["task"], **settings["deep_task"]}
    cells = [
        Cell(
            make_task("induction", **own),
            {label: {**settings["model"], **MODELS[label]} for label in COMPARED[compared]},
            columns=dict(compared=compared, law=own["law"].replace("_", " ")),
        )
        for compared, own in ((FEW, task), (DEEP, deep))
    ]
    (curves, _), limit = train_cells(cells, settings, tell), settings["training"]["steps"]
    steps = steps_to(curves, LEARNED, by=("compared", "law", "model", "seed"))
    return Reproduction(
        tables={"curves": curves, "steps": steps},
        figure=lambda: draw(curves),
        comparisons=compare(curves, steps, limit, *untrained(curves, cells[0].task.chance)),
        differences=[
            f"Vocabulary {task['vocab_size']} and length {task['length']}; the paper's are 8,000 and 512. A sequence draws its "
            "tokens from a pool of as many as it is long, as the paper's script does.",
            f"Width {settings['model']['d_model']}, seeds {settings['seeds']}, at most {limit} steps; "
            "the paper's width is 1,024, with 20 million parameters outside the embeddings. A run ends when its held-out "
            "accuracy is nearly perfect.",
            steps_in_words(settings),
            f"Two and four plain layers are compared on sequences of law {deep['law']!r}; the paper's are first repeats.",
            "The loss is taken only at scored positions; the paper does not say which other positions it trains on.",
        ],
    )


def untrained(curves: pd.DataFrame, chance: float) -> tuple[str | None, str | None]:
    """Why nothing can be said about one plain layer, which may fail to learn, and about two; None where something can.

    The curve of one must be flat, and one shifted layer must have learned in the same number of steps. Two must have learned,
    and their curve must be flat. Claims about numbers of steps need no flat curves (see `compare`).
    """
    goal = Goal(chance, best=1.0, y="accuracy")
    heldout = of_heldout(curves)
    runs = dict(list(heldout[heldout["compared"] == FEW].groupby("model")))
    one = goal.why_not_learned(runs[SHIFT_1], SHIFT_1) or goal.why_not_flat(runs[PLAIN_1], PLAIN_1)
    return one, goal.why_not_learned(runs[PLAIN_2], PLAIN_2) or goal.why_not_flat(runs[PLAIN_2], PLAIN_2)


def compare(
    curves: pd.DataFrame, steps: pd.DataFrame, limit: int, why_not_one: str | None, why_not_two: str | None
) -> list[Comparison]:
    """Compare the figure's statements, tested seed by seed; the last two arguments are from `untrained`."""
    last = last_heldout(curves[curves["compared"] == FEW]).set_index("model")["accuracy"]
    shifted, two, one = (last[[label]].tolist() for label in (SHIFT_1, PLAIN_2, PLAIN_1))
    learned = f"(significantly above {LEARNED:.0%})"
    what = "smallest held-out accuracy that one layer with KV shift reaches, over seeds"
    claim = f"one layer with KV shift learns induction {learned}"
    learns = Comparison.tested_on(what, claim, shifted, LEARNED, ours=min(shifted))
    what = f"smallest held-out accuracy that two plain layers reach within {limit} steps, over seeds"
    both = Comparison.tested_on(what, f"two plain layers learn induction {learned}", two, LEARNED, ours=min(two))
    claim = "one layer with KV shift learns induction in fewer steps than two without"
    faster = compare_steps(steps, limit, FEW, (SHIFT_1, PLAIN_2), claim)
    claim = "four plain layers do not learn induction faster than two"
    deeper = compare_steps(steps, limit, DEEP, (PLAIN_4, PLAIN_2), claim, denied=True)
    what = "largest held-out accuracy of one plain layer, over seeds"
    claim = f"one plain layer does not learn induction (significantly below {LEARNED:.0%})"
    fails = Comparison.tested_on(what, claim, one, LEARNED, below=True, ours=max(one))
    return [learns, both.unless(why_not_two), faster, deeper, fails.unless(why_not_one)]


def compare_steps(
    steps: pd.DataFrame, limit: int, compared: str, models: tuple[str, str], claim: str, *, denied: bool = False
) -> Comparison:
    """Whether the first of two ``models`` learns in fewer steps than the second; ``denied``: the claim is that it does not.

    A run that has not learned by the last step counts with that many steps, and so with fewer than it needs: a model that
    learned in time is then ahead of it by less than it is. Two such runs count as equal, and where all are such there is no
    verdict.
    """
    rows = steps[(steps["compared"] == compared) & steps["model"].isin(models)]
    late = {label: int((own["steps"] > limit).sum()) for label, own in rows.groupby("model")}
    median, n_seeds = rows.groupby("model")["steps"].median(), rows["seed"].nunique()

    def words(label: str) -> str:
        not_yet = f" ({late[label]} of {n_seeds} runs count with {limit} steps, not having learned)" if late[label] else ""
        return in_words(median[label], limit) + not_yet

    first, second = models
    lead = differences_by_seed(rows.assign(steps=rows["steps"].clip(upper=limit)), second, first, "steps")
    neither = f"no run of either learned within {limit} steps" if late[first] == late[second] == n_seeds else None
    what = f"steps to {LEARNED:.0%}, median over seeds, on {rows['law'].iloc[0]}s: {first}, against {second}"
    ours = f"{words(first)} against {words(second)}"
    return Comparison.tested_on(what, claim, lead, below=denied, ours=ours).unless(neither)


def in_words(steps: float, limit: int) -> str:
    """A number of steps, or that ``limit`` steps were not enough."""
    return f"{steps:g}" if steps < math.inf else f"more than {limit}"


def draw(curves: pd.DataFrame) -> Figure:
    """Plot accuracy against step."""
    table = of_heldout(curves)
    table = table.assign(compared=table["compared"] + ", " + table["law"] + "s")
    return draw_panels(table, "step", panel="compared", colors=COLORS, lines={f"learned: {LEARNED:.0%}": LEARNED})
