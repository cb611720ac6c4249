"""``dual-variants``: do the attentions that representation learning suggests train better? (DUAL figs. 3, 10 to 13)

Each variant of the paper's layer trains from the same initialization and on the same sequences, seed by seed, at its own best
learning rate. The logarithm of the held-out error is compared with plain attention's, at the end of training or as a mean over
training, depending on the paper's claim. Where a plain layer ends depends on its initialization, so two are trained from two
starts, and what counts is the distance from the nearer one; it is 0 between the two. (It would be as often above 0
as below for a third plain layer, which is what the significance test assumes.) There is no verdict if plain attention has
not explained half of the labels' variance.

Where the paper says that some setting is better, it is chosen together with the learning rate, on the same other seeds.
Combinations are compared in the same way with the nearer of the two changes that they are made of. One layer is trained on
several tasks, another W for each sequence, and compared with those that have one. Whether a training is unstable is read from
how far the held-out error rises again, at the paper's own rate.

On the linear task errors fall as a power of the number of steps, so there is no end: a layer of softmax attention is linear
only in the limit of small scores and large values. Errors that fall with the same power keep their ratio. So a claim about
where two layers end is decided while errors fall, unless their ratio comes nearer to one: unless the second half of the steps
took more than an eighth (`LATE`) of its logarithm. As the steps double, it would go on losing as much.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.errors import check_known
from kvlens.papers.dual.regression_layer import Variant, draw_layer, draw_tasks, train_layer
from kvlens.papers.harness.learned import LATE, Goal, kept_table, lead, mean_and_spread
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison

PLAIN, AGAIN, SEVERAL = "plain", "plain, another start", "plain, several tasks"
VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(),
    AGAIN: Variant(),
    **{f"regularised, alpha {alpha}": Variant(alpha=alpha) for alpha in (-1.0, -0.5, -0.1, 0.1, 0.5)},
    **{f"eq. 13, alpha {alpha}": Variant(alpha=alpha, form="one_step") for alpha in (-0.5, 0.5)},
    "augmented keys, 1 layer": Variant(key_depth=1),
    "augmented keys, 2 layers": Variant(key_depth=2),
    "augmented values, 1 layer": Variant(value_depth=1),
    "augmented both, 1 layer": Variant(key_depth=1, value_depth=1),
    **{f"negative, k {k}, beta {beta}": Variant(negatives=k, beta=beta) for k in (3, 8) for beta in (0.1, 0.5)},
    "negative per label, k 3, beta 0.1": Variant(negatives=3, beta=0.1, per="label"),
    **{f"negative, {choice}": Variant(negatives=3, beta=0.1, choice=choice) for choice in ("least alike", "noise")},
    "augmented values, convolution": Variant(convolved=True),
    "regularised and augmented": Variant(alpha=-0.5, key_depth=1),
    "eq. 13 and augmented": Variant(alpha=-0.5, form="one_step", key_depth=1),
    "all three": Variant(alpha=-0.5, key_depth=1, negatives=3, beta=0.1),
    SEVERAL: Variant(several=True),
}
CHOSEN_ALPHA, CHOSEN_NEGATIVES = "regularised, alpha chosen", "negatives, k and beta chosen"
CHOICES = {
    CHOSEN_ALPHA: [label for label in VARIANTS if label.startswith("regularised, alpha")],
    CHOSEN_NEGATIVES: [label for label in VARIANTS if label.startswith("negative, k")],
}
"""What is chosen together with the learning rate, on the same seeds, where the paper says of some setting that it is better."""


@dataclass(frozen=True)
class Hypothesis:
    """A claim of the paper about a variant compared with plain attention, or with other variants.

    Attributes:
        words: the claim, and its source.
        better: better (True) or worse (False).
        measure: "end", the last error, "apart", how far its logarithm is from the other's, or "course", the mean of that
            over training (lower is faster).
        pair: what it is compared with: the nearer of these two, so that it is better or worse than both.
        bound: what the logarithm of the ratio is compared with.
    """

    words: str
    better: bool
    measure: str = "end"
    pair: tuple[str, str] = (PLAIN, AGAIN)
    bound: float = 0.0


UNCLAIMED = Hypothesis("", False)
A_TENTH = math.log(1.1)
"""By less than this two errors are comparable. That they are equal cannot be shown."""
END, COURSE, APART = "end", "course", "apart"
LOWEST, SINGLE = "negative, k 3, beta 0.1", ("regularised, alpha -0.5", "augmented keys, 1 layer")
"""The simple negatives, and what combinations are made of."""
CLAIMS: dict[tuple[str, str], Hypothesis] = {
    ("linear", "eq. 13, alpha 0.5"): Hypothesis("with alpha > 0 the layer converges to a poorer result (sec. 5)", False),
    ("linear", "eq. 13, alpha -0.5"): Hypothesis("with alpha < 0 it converges faster (sec. 5)", True, COURSE),
    ("linear", "regularised, alpha 0.5"): Hypothesis("normalised, with alpha > 0 it converges to a poorer result", False),
    ("linear", "regularised, alpha -0.5"): Hypothesis("normalised, with alpha < 0 it converges faster", True, COURSE),
    ("linear", "augmented keys, 1 layer"): Hypothesis("augmented keys alone converge slightly faster (sec. 5)", True, COURSE),
    ("linear", "augmented keys, 2 layers"): Hypothesis("a two-layer augmentation of keys ends better (sec. 5)", True),
    ("linear", "eq. 13 and augmented"): Hypothesis("regularised and augmented together suffice (app. E.3)", True),
    ("linear", CHOSEN_NEGATIVES): Hypothesis("negatives in a suitable setting converge slightly faster (sec. 5)", True, COURSE),
    ("linear", SEVERAL): Hypothesis("several tasks at once are too much for a single layer (app. E.1)", False),
    ("trigonometric", CHOSEN_ALPHA): Hypothesis(
        "with a suitable alpha it converges slightly faster (app. E.2.1)", True, COURSE
    ),
    ("exponential", CHOSEN_ALPHA): Hypothesis("with a suitable alpha it converges faster (app. E.2.2)", True, COURSE),
    **{
        (task, label): Hypothesis("combinations are worse than regularised or augmented alone (app. E.3)", False, pair=SINGLE)
        for task in ("trigonometric", "exponential")
        for label in ("regularised and augmented", "all three")
    },
    ("trigonometric", "augmented values, 1 layer"): Hypothesis("augmented values degrade the task (app. E.2.1)", False),
    ("trigonometric", "augmented both, 1 layer"): Hypothesis("keys and values both augmented degrade it (app. E.2.1)", False),
    ("trigonometric", "augmented keys, 1 layer"): Hypothesis(
        "augmented keys alone are comparable: within a tenth (app. E.2.1)", True, APART, bound=A_TENTH
    ),
    ("trigonometric", "augmented keys, 2 layers"): Hypothesis("keys augmented twice are faster (app. E.2.1)", True, COURSE),
    ("trigonometric", "augmented values, convolution"): Hypothesis("values of a convolution are better (app. D.2)", True),
    **{
        ("trigonometric", f"negative, {choice}"): Hypothesis(
            "other negatives are better than the lowest scores, and than none (app. D.3)", True, pair=(PLAIN, LOWEST)
        )
        for choice in ("least alike", "noise")
    },
    **{
        ("exponential", label): Hypothesis("negatives are not better by a tenth (app. E.2.2)", False, bound=-A_TENTH)
        for label in CHOICES[CHOSEN_NEGATIVES]
    },
    ("trigonometric", LOWEST): Hypothesis("negatives are worse on the task (app. E.2.1)", False),
    ("exponential", "augmented keys, 1 layer"): Hypothesis("augmented keys alone are better on the task (app. E.2.2)", True),
    ("exponential", "augmented values, 1 layer"): Hypothesis("augmented values alone are better on it (app. E.2.2)", True),
}
MEASURES = {
    END: "log of the last held-out error over that of {}",
    COURSE: "the same of {}, mean over the course of the training",
    APART: "distance of log of the last held-out error from that of {}",
}
UNSTABLE = "augmented both, 1 layer"
"""What is trained once more at the paper's rate, where it says that the training becomes unstable (app. E.2.2)."""
GOAL = Goal(chance=1.0)
"""Errors are relative to the variance of the labels; half of it must be explained."""
N_TUNING = 6
"""The number of seeds from which each variant's learning rate is chosen, different from those that are compared.

A rate at which one of them diverges is not chosen.
"""

DRAWN = 100.0
"""Errors up to this are drawn."""

D_X = dict(linear=11, trigonometric=6, exponential=5)


def claimed(task: str) -> list[str]:
    """The variants that claims are about on this task, and those that they are compared with."""
    labels = [label for (of, name), claim in CLAIMS.items() if of == task for label in (name, *claim.pair)]
    return list(dict.fromkeys(label for label in labels if label not in (PLAIN, AGAIN)))


@experiment(
    "DUAL sec. 4 and 5, figs. 3, 10 to 13",
    "Do regularised, augmented and negative attention train better than plain attention?",
    cost=("seconds", "about two hours on one core"),
    d_x=(dict(linear=11, exponential=5), D_X),
    n_demonstrations=15,
    batch_size=(2, 8),
    steps=(
        dict(linear=2, exponential=2),
        dict(linear=10_000, trigonometric=40_000, exponential=40_000),
    ),
    heldout_sequences=(8, 256),
    rates=([0.03, 0.1], [0.03, 0.1, 0.3, 1.0, 2.0]),
    models=(
        dict(linear=[*VARIANTS, *CHOICES], exponential=[PLAIN, AGAIN, *SINGLE, "all three"]),
        {task: [PLAIN, AGAIN, *claimed(task)] for task in D_X},
    ),
    as_printed=dict(batch_size=1, learning_rate=0.005, steps=(20, 10_000)),
    seeds=([0, 1], list(range(51, 59))),
)
def dual_variants(settings: Settings, tell: Tell) -> Reproduction:
    """Train every variant on every task, at its best learning rate."""
    seeds, courses = settings["seeds"], []
    for name in ("steps", "models"):
        check_known(f"dual-variants: {name} has no task, as in d_x, that", settings["d_x"], settings[name])
    for task in settings["d_x"]:
        for label in settings["models"][task]:
            setting, rate = best_setting(label, task, settings)
            course = kept_course(setting, task, settings, seeds, [rate] * len(seeds))
            courses.append(course.assign(task=task, model=label, setting=setting, learning_rate=rate))
            last = course[course["step"] == course["step"].max()]["loss"].mean()
            tell(f"{task}, {label}: {last:.3g} of the variance left, at rate {rate:g}, {setting}")
    curves, steps = pd.concat(courses, ignore_index=True), {task: settings["steps"][task] for task in settings["d_x"]}
    ratios, rises = differences(curves), rises_as_printed(settings)
    chosen = curves[curves["model"].isin(CHOICES)].groupby(["task", "model"], sort=False)["setting"].first()
    return Reproduction(
        tables={"curves": curves, "differences": ratios, "rises": rises},
        figure=lambda: draw(curves),
        comparisons=[*compare(ratios, untrained(curves)), *compare_rises(rises)],
        differences=[
            f"Dimensions of x {settings['d_x']}, {settings['n_demonstrations']} demonstrations, {len(seeds)} seeds, "
            f"{steps} steps of {settings['batch_size']} sequences; the paper takes a step after each sequence, at "
            "rates of 0.003 (linear task) and 0.005 (the others), for an unreported number of steps: "
            "`--set batch_size=1` and `rates`.",
            f"Each variant uses the rate of {settings['rates']} with the best final error on {N_TUNING} other seeds.",
            *(f"Chosen on these, {task} task: {setting}." for (task, _), setting in chosen.items()),
            "The exact softmax kernel; the paper trains with random features.",
            "Five values of alpha, two of k and two of beta. What the paper says of some suitable value is tested at the best "
            "on the other seeds, everything else at one that was chosen in advance.",
        ],
    )


def train_variant(label: str, task: str, settings: Settings, seeds: Sequence[int], rates: Sequence[float]) -> pd.DataFrame:
    """Held-out errors over the labels' variance: seed, step, loss; one run for each of ``seeds``, which may repeat."""
    rows, d_x = list(seeds), settings["d_x"][task]
    layer = draw_layer(rows, d_x + 1, VARIANTS[label], stream=5 if label == AGAIN else 2)
    W, steps = draw_tasks(rows, d_x), settings["steps"][task]
    course = train_layer(layer, W, settings, task, steps, rows, torch.tensor(rates, dtype=torch.float64))
    return pd.concat(
        [pd.DataFrame(dict(seed=rows, step=step, loss=values.tolist())) for step, values in course], ignore_index=True
    )


def kept_course(label: str, task: str, settings: Settings, seeds: Sequence[int], rates: Sequence[float]) -> pd.DataFrame:
    """Return what `train_variant` does, read from the kept runs where they have it."""
    own = {name: settings[name] for name in ("n_demonstrations", "batch_size", "heldout_sequences")}
    own |= dict(d_x=settings["d_x"][task], steps=settings["steps"][task], seeds=list(seeds), rates=list(rates))
    run = dict(name="dual-variants", again=label == AGAIN, variant=vars(VARIANTS[label]), task=task, **own)
    return kept_table(run, lambda: train_variant(label, task, settings, seeds, rates))


def best_setting(label: str, task: str, settings: Settings) -> tuple[str, float]:
    """The variant (one of `CHOICES`, or this one) and the learning rate whose last error is lowest on seeds not compared.

    The mean of its logarithm counts.
    """
    rates, first, variants = settings["rates"], max(settings["seeds"]) + 1, CHOICES.get(label, [label])
    if len(rates) == len(variants) == 1:
        return variants[0], rates[0]
    rows = [(rate, seed) for rate in rates for seed in range(first, first + N_TUNING)]
    found: dict[tuple[str, float], float] = {}
    for variant in variants:
        course = kept_course(variant, task, settings, [seed for _, seed in rows], [rate for rate, _ in rows])
        last = np.log(course["loss"].tail(len(rows)).to_numpy().reshape(len(rates), N_TUNING)).mean(axis=1)
        found |= {(variant, rate): float(error) for rate, error in zip(rates, last, strict=True)}
    return min(found, key=lambda setting: found[setting])


def differences(curves: pd.DataFrame) -> pd.DataFrame:
    """log of the held-out error of each variant over that of the nearer of its `Hypothesis.pair`; NaN if a run diverged.

    Returns:
        task, model, seed, half (of the error after half of the steps), end (of the last error), apart (its size), course (mean
        over all evaluations but the first, which is before any step).
    """
    log = curves[curves["step"] > 0].assign(log=np.log(curves["loss"].where(curves["loss"] < np.inf)))
    found = []
    for (task, label), rows in log[~log["model"].isin([PLAIN, AGAIN])].groupby(["task", "model"], sort=False):
        pair = CLAIMS.get((task, label), UNCLAIMED).pair
        others = log[(log["task"] == task) & log["model"].isin(pair)].groupby(["seed", "step"])["log"]
        ends = others.agg(low="min", high="max", n="count")
        own = rows.join(ends.where(ends["n"] == 2), on=["seed", "step"])
        nearer = own["log"].clip(own["low"], own["high"]).where(own["low"].notna())
        ratio = (own["log"] - nearer).groupby([own[key] for key in ("task", "model", "seed")], sort=False)
        measures = dict(
            half=ratio.agg(lambda run: run.iloc[(len(run) - 1) // 2]),
            end=ratio.agg(lambda run: run.iloc[-1]),
            apart=ratio.agg(lambda run: abs(run.iloc[-1])),
            course=ratio.agg(lambda run: run.mean(skipna=False)),
        )
        found.append(pd.DataFrame(measures).reset_index())
    return pd.concat(found, ignore_index=True)


def rises_as_printed(settings: Settings) -> pd.DataFrame:
    """How far the held-out error rises again during training at the paper's rate, one sequence a step, exponential task.

    Returns:
        model, seed, rise: the sum of all rises of its logarithm from one evaluation to the next; an error counts up to `DRAWN`.
    """
    task, printed = "exponential", settings["as_printed"]
    changed = {**settings, "batch_size": printed["batch_size"], "steps": {task: printed["steps"]}}
    changed["d_x"] = {task: settings["d_x"].get(task, D_X[task])}
    seeds, found = settings["seeds"], []
    for label in (PLAIN, UNSTABLE):
        course = kept_course(label, task, changed, seeds, [printed["learning_rate"]] * len(seeds))
        log = np.log(course["loss"].clip(upper=DRAWN)).groupby(course["seed"])
        found.append(log.agg(lambda run: run.diff().clip(lower=0).sum()).rename("rise").reset_index().assign(model=label))
    return pd.concat(found, ignore_index=True)


def compare_rises(rises: pd.DataFrame) -> list[Comparison]:
    """Keys and values augmented together against plain attention."""
    what = f"exponential task, {UNSTABLE}: sum of all rises of log held-out error, as printed, minus plain attention's"
    return [lead(rises, UNSTABLE, PLAIN, "rise", what, "keys and values augmented together become unstable (app. E.2.2)")]


def untrained(curves: pd.DataFrame) -> dict[str, str | None]:
    """Task -> why nothing can be said about it, as far as plain attention decides; None if something can."""
    found: dict[str, str | None] = {}
    for (task, label), rows in curves[curves["model"].isin([PLAIN, AGAIN])].groupby(["task", "model"], sort=False):
        found[task] = found.get(task) or GOAL.why_not_learned(rows, label)
    return found


def why_unsettled(rows: pd.DataFrame) -> str | None:
    """Why a variant's last error cannot be compared with plain attention's: their ratio goes to one. None if it does not.

    ``rows`` are those of `differences` of one variant on one task.
    """
    half, end = rows["half"].mean(), rows["end"].mean()
    if (half - end) * np.sign(end) <= LATE * abs(end):
        return None
    return f"the ratio still goes to one: its logarithm was {half:+.2f} after half of the steps, and is {end:+.2f}"


def compare(ratios: pd.DataFrame, why: Mapping[str, str | None]) -> list[Comparison]:
    """Compare every variant on every task, with a verdict where the paper makes a claim; ``why`` is that of `untrained`."""
    found = []
    for (task, label), rows in ratios.groupby(["task", "model"], sort=False):
        claim = CLAIMS.get((task, label), UNCLAIMED)
        other = "the nearer plain layer" if claim.pair == (PLAIN, AGAIN) else f"the nearer of {' and '.join(claim.pair)}"
        what = f"{task} task, {label}: {MEASURES[claim.measure].format(other)}, {len(rows)} seeds"
        values, ours = rows[claim.measure].tolist(), mean_and_spread(rows[claim.measure].tolist())
        tested = Comparison.tested_on(what, claim.words, values, claim.bound, below=claim.better, ours=ours).unless(
            why.get(task)
        )
        if claim.measure == END and tested.holds is not None and not (claim.bound and tested.holds):
            tested = tested.unless(why_unsettled(rows))
        if claim is UNCLAIMED:
            verdict = {True: "worse", False: "better", None: tested.verdict}[tested.holds]
            tested = Comparison.stated(what, f"the paper makes no claim; here: {verdict}", ours)
        found.append(tested)
    return found


def draw(curves: pd.DataFrame) -> Figure:
    """Held-out error against steps, a panel per task. A run that diverges leaves the figure."""
    shown = curves.assign(loss=curves["loss"].where(curves["loss"] < DRAWN))
    return draw_panels(shown, "step", "loss", panel="task", ylabel="held-out error / variance", log="y")
