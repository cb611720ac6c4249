"""``scaling``: plain and shifted language models of several sizes (KVSA figs. 4, 6 and 7).

Loss curves, and the final loss against the number of parameters outside the embeddings, to which the shift itself (four per
head) contributes little. A power law, loss = c N^(-p), a straight line in a log-log plot, is fitted to each kind's mean losses.
It has no constant for the entropy of text, so it only describes these sizes and does not extrapolate.
"""

import itertools
from collections.abc import Hashable, Iterator, Mapping

import numpy as np
import pandas as pd
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import nn

from kvlens.papers.harness.learned import (
    Cell,
    Goal,
    differences_by_seed,
    final_losses,
    lead,
    mean_and_spread,
    of_heldout,
    train_cells,
)
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import (
    MODEL_COLORS,
    MODELS,
    PLAIN,
    RATES,
    SEEDS,
    SHIFTED,
    SMALL_MODEL,
    TEXT_TASK,
    TRAINING,
    text_goal,
    tokens_seen,
)
from kvlens.tasks.text import TextTask
from kvlens.training import build_model


@experiment(
    "KVSA figs. 4, 6 and 7",
    "Does KV shift lower a language model's loss at every size, and does the gain persist as models grow?",
    cost=(
        "seconds",
        "seventy minutes on one core, fifty-five after `variants`",
    ),
    task=TEXT_TASK,
    sizes=(
        {"d 16": dict(n_layers=1, d_model=16, d_head=8), "d 24": dict(n_layers=1, d_model=24, d_head=8)},
        {
            "d 32": dict(n_layers=2, d_model=32, d_head=16),
            "d 64": SMALL_MODEL,
            "d 128": dict(n_layers=2, d_model=128, d_head=32, rates=[3e-3, 5e-3]),
        },
    ),
    training=TRAINING,
    rates=RATES,
    seeds=SEEDS,
)
def scaling(settings: Settings, tell: Tell) -> Reproduction:
    """Train both models at every size, and compare their losses and how these fall with size."""
    curves, _ = train_cells(cells(settings), settings, tell)
    sizes = curves[["model", "size", "non_embedding"]].drop_duplicates()
    finals = final_losses(curves, by=("model", "size", "seed")).merge(sizes, on=["model", "size"])
    why = untrained(curves, text_goal(settings["task"]))
    return Reproduction(
        tables={"course": curves, "scaling": finals},
        figure=lambda: draw(finals),
        comparisons=[*compare(finals, why), *compare_sizes(finals, why), compare_course(curves, why)],
        differences=[
            "The paper's models have up to billions of parameters and tokens to match; here the largest has "
            f"{curves['non_embedding'].max():,} outside its embeddings, and all see the same {tokens_seen(settings)} "
            "tokens, each at the learning rate, of a few for its size, that suits it best on other seeds.",
        ],
    )


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield both models at every size, at the best of its own ``rates`` or of those of the settings."""
    task = TextTask(**settings["task"])
    for (size, fields), (label, own) in itertools.product(settings["sizes"].items(), MODELS.items()):
        rates = fields.get("rates", settings["rates"])
        model = {**{name: value for name, value in fields.items() if name != "rates"}, **own}
        count = non_embedding_parameters(build_model(task, model))
        columns = dict(size=size, non_embedding=count)
        yield Cell(
            task, {label: model}, columns, rates=rates, title=f"{size}, {label}: {count:,} parameters outside the embeddings"
        )


def non_embedding_parameters(model: nn.Module) -> int:
    """Parameters of blocks and final norm; embedding, positions and unembedding are left out."""
    return sum(parameter.numel() for name, parameter in model.named_parameters() if "embed" not in name)


def power_law(n: object, loss: object) -> Float[np.ndarray, "*seed"]:
    """The p of loss = c n^(-p), by least squares on the logarithms.

    Args:
        n: number of parameters of each size.
        loss: a row for each size; one seed, or a column for each of several.
    """
    return np.asarray(-np.polyfit(np.log(np.asarray(n, dtype=float)), np.log(np.asarray(loss, dtype=float)), 1)[0])


def untrained(curves: pd.DataFrame, goal: Goal) -> dict[Hashable, str | None]:
    """Say by size what is too little trained: the plain model must have learned."""
    return {size: goal.why_untrained(rows, PLAIN) for size, rows in of_heldout(curves).groupby("size", sort=False)}


def compare(finals: pd.DataFrame, why: Mapping[Hashable, str | None]) -> list[Comparison]:
    """The losses at each size."""
    claim = "KV shift has the lower loss at every size (figs. 4 and 6)"
    what, by_size = "held-out loss of the plain model above the shifted one's, {}, nats", finals.groupby("size", sort=False)
    return [
        lead(rows, PLAIN, SHIFTED, "heldout_loss", what.format(size), claim).unless(why.get(size)) for size, rows in by_size
    ]


def compare_sizes(finals: pd.DataFrame, why: Mapping[Hashable, str | None]) -> list[Comparison]:
    """Whether the losses fall with size, and whether the gain of KV shift persists; nothing for a single size."""
    order = finals.groupby("size")["non_embedding"].min().sort_values().index
    if len(order) < 2:
        return []
    smallest, largest = order[0], order[-1]
    ends = (finals[finals["size"] == size] for size in (smallest, largest))
    first, last = (differences_by_seed(rows, PLAIN, SHIFTED, "heldout_loss") for rows in ends)
    change = [b - a for a, b in zip(first, last, strict=True)]
    anywhere = next((f"{size}: {reason}" for size, reason in why.items() if reason), None)
    found = []
    for kind in MODELS:
        runs = finals[finals["model"] == kind]
        by_size = runs.pivot_table(index="non_embedding", columns="seed", values="heldout_loss")
        exponents = power_law(by_size.index, by_size).tolist()
        what, ours = f"p of loss = c N^(-p), {kind}", mean_and_spread(exponents)
        claim = "the loss falls as models grow (fig. 7a)"
        found.append(Comparison.tested_on(what, claim, exponents, ours=ours).unless(anywhere))
    what = f"the gain of KV shift at {largest} less that at {smallest}, nats"
    claim = "the gain does not vanish as models grow (fig. 7a): it is not significantly smaller in the largest model"
    lasts = Comparison.tested_on(what, claim, change, ours=mean_and_spread(change))
    return [*found, lasts.unless(why.get(smallest) or why.get(largest))]


def compare_course(course: pd.DataFrame, why: Mapping[Hashable, str | None]) -> Comparison:
    """Fig. 7b: whether the gain of KV shift shrinks while the largest model trains on, from half of the steps to the end."""
    heldout = of_heldout(course)
    largest = heldout.loc[heldout["non_embedding"].idxmax(), "size"]
    rows = heldout[heldout["size"] == largest]
    steps = sorted(set(rows["step"].tolist()))
    middle = min(steps, key=lambda step: abs(step - steps[-1] / 2))
    at = {step: differences_by_seed(rows[rows["step"] == step], PLAIN, SHIFTED, "loss") for step in (middle, steps[-1])}
    change = [last - half for half, last in zip(at[middle], at[steps[-1]], strict=True)]
    what = f"the gain of KV shift in held-out loss at step {steps[-1]} less that at step {middle}, {largest}, nats"
    claim = "trained on, the difference of the two losses does not decrease (fig. 7b)"
    return Comparison.tested_on(what, claim, change, ours=mean_and_spread(change)).unless(why.get(str(largest)))


def draw(finals: pd.DataFrame) -> Figure:
    """Final loss against parameters outside the embeddings; on these axes a power law is a straight line."""
    return draw_panels(
        finals, "non_embedding", "heldout_loss", xlabel="parameters outside the embeddings", colors=MODEL_COLORS, log="xy"
    )
