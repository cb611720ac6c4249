"""``learning-rate``: plain and shifted models under several learning rates and seeds (KVSA fig. 5).

The paper reports that at a learning rate of 1e-2 its plain model diverges while the one with KV shift trains stably, and that
the shift helps for every seed. Here a run counts as *diverged* if its final held-out loss is above that of the token
frequencies alone (of the training part, with one added to each count), that is, worse than a prediction without any context. A
run that stops because a loss or gradient is not finite also counts as diverged. Where losses are compared, a diverged run
counts with that loss of the token frequencies.
"""

from collections.abc import Iterator

import pandas as pd
from matplotlib.figure import Figure

from kvlens.papers.harness.learned import Cell, Goal, final_losses, lead, of_heldout, train_cells
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import (
    MODEL,
    MODEL_COLORS,
    MODELS,
    PLAIN,
    SHIFTED,
    SMALL_RATES,
    SMALL_SEEDS,
    TEXT_TASK,
    TRAINING,
    text_goal,
    tokens_seen,
)
from kvlens.tasks.text import TextTask

PAPER_RATE = 1e-2
"""The rate at which the paper's plain model diverged, with all of five seeds, and its shifted one with none."""


@experiment(
    "KVSA fig. 5",
    "Does KV shift help for every seed and learning rate, and is it stable at larger learning rates?",
    cost=("seconds", "forty minutes on one core, twenty after `variants`"),
    task=TEXT_TASK,
    model=MODEL,
    training=(dict(steps=2, batch_size=4, eval_every=2, eval_sequences=4), *TRAINING[1:]),
    rates=([3e-2, 3.0], [1e-3, *SMALL_RATES, 3e-2]),
    seeds=([0, 1], SMALL_SEEDS),
)
def learning_rate(settings: Settings, tell: Tell) -> Reproduction:
    """Train both models at every learning rate, and compare their losses and their divergence."""
    (curves, _), goal = train_cells(cells(settings), settings, tell), text_goal(settings["task"])
    measured, no_context = measure(curves, goal.chance), goal.chance
    unlearned, why = untrained(curves, measured, goal)
    plain, shifted = (best_rate(measured, label) for label in MODELS)
    return Reproduction(
        tables={"course": curves, "runs": measured},
        figure=lambda: draw(measured, no_context),
        comparisons=[*compare(measured, why), *compare_stability(measured, unlearned)],
        differences=[
            f"The models have {curves['n_parameters'].max():,.0f} parameters and see {tokens_seen(settings)} tokens of "
            "another corpus. Small models tolerate larger learning rates than the paper's do: the plain model does best at "
            f"{plain:g}, the shifted one at {shifted:g}.",
            f"Gradients are clipped at norm {settings['training'].get('max_grad_norm', 1):g} (the paper mentions no "
            "clipping). A run counts as diverged when its held-out loss ends above that of the token "
            f"frequencies ({no_context:.3f} nats).",
        ],
    )


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield both models at every learning rate."""
    task = TextTask(**settings["task"])
    models = {label: {**settings["model"], **own} for label, own in MODELS.items()}
    for rate in settings["rates"]:
        yield Cell(task, models, rates=[rate], title=f"learning rate {rate:g}", keep_diverged=True)


def measure(curves: pd.DataFrame, bar: float) -> pd.DataFrame:
    """One row per run: the loss at the end, whether it diverged, and ``counted``: the loss, or the bar if it diverged."""
    finals = final_losses(curves, by=("model", "learning_rate", "seed"))
    return finals.assign(diverged=finals["heldout_loss"] > bar, counted=finals["heldout_loss"].clip(upper=bar))


def untrained(curves: pd.DataFrame, measured: pd.DataFrame, goal: Goal) -> tuple[str | None, str | None]:
    """Why divergence says nothing, and why losses do not: the plain model must have learned, and for losses be flat, at the
    learning rate that is best for it.

    At other rates the models are compared as they are: how well they train at a rate that is too high or too low is the claim.
    """
    best, heldout = best_rate(measured, PLAIN), of_heldout(curves)
    own = heldout[(heldout["learning_rate"] == best) & (heldout["model"] == PLAIN)]
    unlearned, why = goal.why_not_learned(own, PLAIN), goal.why_untrained(own, PLAIN)
    at_best = f"at {best:g}, its best learning rate: "
    return unlearned and at_best + unlearned, why and at_best + why


def compare(runs: pd.DataFrame, why: str | None) -> list[Comparison]:
    """Compare the losses at each learning rate."""
    what = "held-out loss of the plain model above the shifted one's at learning rate {:g}, nats"
    claim = (
        "KV shift lowers the loss under every learning rate and seed (a run that diverged counts with the loss of the token "
        "frequencies)"
    )
    by_rate = runs.groupby("learning_rate", sort=False)
    return [lead(rows, PLAIN, SHIFTED, "counted", what.format(rate), claim).unless(why) for rate, rows in by_rate]


def compare_stability(runs: pd.DataFrame, why: str | None) -> list[Comparison]:
    """Whether the plain model alone diverges at the paper's rate, where that is trained.

    Where neither diverges the differences are 0, and inconclusive: a model of a ten-thousandth of the size is not the paper's.
    """
    rows = runs[runs["learning_rate"] == PAPER_RATE].astype({"diverged": float})
    what, paper = f"share of seeds that diverge at learning rate {PAPER_RATE:g}", "plain 1, KV shift 0 (5 seeds)"
    claim, ours = (
        "the plain model diverges at learning rate 1e-2, the shifted one stays stable",
        "plain {of:g}, KV shift {minus:g}",
    )
    found = [lead(rows, PLAIN, SHIFTED, "diverged", what, claim, ours=ours, paper=paper)] if len(rows) else []
    return [one.unless(why) for one in found]


def best_rate(runs: pd.DataFrame, label: str) -> float:
    """The learning rate at which that model's mean held-out loss is lowest."""
    return float(runs[runs["model"] == label].groupby("learning_rate")["heldout_loss"].mean().idxmin())


def draw(runs: pd.DataFrame, no_context: float) -> Figure:
    """Plot the final held-out loss against the learning rate; losses off the chart are drawn at its top."""
    top = no_context + 0.25 * (no_context - runs["heldout_loss"].min())
    shown, lines = runs.assign(heldout_loss=runs["heldout_loss"].clip(upper=top)), {"token frequencies alone": no_context}
    return draw_panels(shown, "learning_rate", "heldout_loss", colors=MODEL_COLORS, lines=lines, log="x")
