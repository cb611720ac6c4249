"""``dual-variants``: do the attentions that representation learning suggests train better? (DUAL figs. 3, 10 to 13)

Each variant of the paper's layer trains from the same start, on the same sequences, seed by seed; what is compared is the
held-out error at the end, as a logarithm, against plain attention. A second plain layer from another start shows what a
difference of nothing looks like to the judge.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from kvlens.experiments.dual.regression_layer import Variant, draw_layer, draw_tasks, train_layer
from kvlens.experiments.shared.curves import draw_curves
from kvlens.experiments.shared.judge import JUDGE
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome

PLAIN, AGAIN = "plain", "plain, another start"
VARIANTS: dict[str, Variant] = {
    PLAIN: Variant(),
    AGAIN: Variant(),
    **{f"regularised, alpha {alpha}": Variant(alpha=alpha) for alpha in (-1.0, -0.5, -0.1, 0.1, 0.5)},
    "augmented keys, 1 layer": Variant(key_depth=1),
    "augmented keys, 2 layers": Variant(key_depth=2),
    "augmented values, 1 layer": Variant(value_depth=1),
    "augmented both, 1 layer": Variant(key_depth=1, value_depth=1),
    **{f"negative, k {k}, beta {beta}": Variant(negatives=k, beta=beta) for k in (3, 8) for beta in (0.1, 0.5)},
    "negative per label, k 3, beta 0.1": Variant(negatives=3, beta=0.1, per="label"),
    "regularised and augmented": Variant(alpha=-0.5, key_depth=1),
    "all three": Variant(alpha=-0.5, key_depth=1, negatives=3, beta=0.1),
}
FAMILY_STARTS: dict[str, tuple[str, ...]] = {
    "regularised": ("regularised, alpha",),
    "augmented": ("augmented",),
    "negative": ("negative",),
    "combined": ("regularised and", "all three", AGAIN),
}
FAMILIES = {family: [name for name in VARIANTS if name.startswith(starts)] for family, starts in FAMILY_STARTS.items()}
CLAIMS: dict[tuple[str, str], tuple[str, bool]] = {
    ("linear", "regularised, alpha 0.5"): ("with alpha > 0 the layer converges to a poorer result (sec. 5)", False),
    ("linear", "regularised, alpha -0.5"): ("with alpha < 0 it converges faster, to a comparable result (sec. 5)", True),
    ("linear", "augmented keys, 1 layer"): ("augmented keys alone converge slightly faster (sec. 5)", True),
    ("linear", "augmented keys, 2 layers"): ("a two-layer augmentation of keys ends better (sec. 5)", True),
    ("linear", "regularised and augmented"): ("regularised and augmented together suffice (app. E.3)", True),
    ("trigonometric", "augmented values, 1 layer"): ("augmented values degrade the trigonometric task (app. E.2.1)", False),
    ("trigonometric", "negative, k 3, beta 0.1"): ("negatives are worse on the trigonometric task (app. E.2.1)", False),
    ("exponential", "augmented keys, 1 layer"): ("augmented keys alone are better on the exponential task (app. E.2.2)", True),
    ("exponential", "augmented values, 1 layer"): ("augmented values alone are better on it (app. E.2.2)", True),
}
"""What the paper says of a variant against plain attention: better (True) or worse (False)."""


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train every variant on every task."""
    rows, seeds = [], settings["seeds"]
    for task, d_x in settings["d_x"].items():
        W = draw_tasks(seeds, d_x)
        for label, variant in VARIANTS.items():
            layer = draw_layer(seeds, d_x + 1, variant, stream=5 if label == AGAIN else 2)
            course = train_layer(layer, W, settings, task, seeds, settings["learning_rate"])
            for step, values in course:
                rows += [
                    dict(task=task, model=label, seed=seed, step=step, loss=float(value))
                    for seed, value in zip(seeds, values, strict=True)
                ]
            tell(f"{task}, {label}: {float(course[-1][1].nanmean()):.4g}")
    curves = pd.DataFrame(rows)
    return Outcome(
        tables={"curves": curves, "differences": differences(curves)},
        figure=draw(curves),
        comparisons=compare(differences(curves)),
        differences=[
            f"Dimensions of x {settings['d_x']}, {settings['n_demonstrations']} demonstrations, {len(seeds)} seeds, "
            f"{settings['steps']} steps of {settings['batch_size']} sequences at learning rate {settings['learning_rate']}, "
            "the same for every variant; the paper trains on one sequence a step with rates of its own.",
            "The exact softmax kernel, where the paper trains with random features.",
            "Five values of alpha, two of k and two of beta; the paper's claims are judged at one of each, chosen before, "
            "and not at the best.",
        ],
    )


def differences(curves: pd.DataFrame) -> pd.DataFrame:
    """log of the last held-out error of each variant over plain attention's, seed by seed; a run that diverged gives NaN."""
    last = curves[curves["step"] == curves["step"].max()].set_index(["task", "seed"])
    plain = last[last["model"] == PLAIN]["loss"]
    rows = last[last["model"] != PLAIN].join(plain.rename("plain"))
    log_ratio = [
        math.log(a / b) if math.isfinite(a) and a > 0 and b > 0 else math.nan
        for a, b in zip(rows["loss"], rows["plain"], strict=True)
    ]
    return rows.assign(log_ratio=log_ratio).reset_index()[["task", "model", "seed", "log_ratio"]]


def compare(ratios: pd.DataFrame) -> list[Comparison]:
    """Every variant on every task; where the paper says something of it, with a verdict."""
    found = []
    for (task, label), rows in ratios.groupby(["task", "model"], sort=False):
        mean = float(rows["log_ratio"].mean())
        what = f"{task} task, {label}: log of held-out error over plain attention's, mean of {len(rows)} seeds"
        better = JUDGE.above([-x for x in rows["log_ratio"]])
        if label == AGAIN:
            told = {True: "better", False: "worse", None: "not told apart"}[better]
            found.append(Comparison.stated(what, None, mean, f"nothing differs but the start; the judge says: {told}"))
        elif (task, label) in CLAIMS:
            claim, expected = CLAIMS[task, label]
            found.append(Comparison(what, None, mean, claim, None if better is None else better == expected))
        else:
            word = {True: "better", False: "worse", None: "not told apart"}[better]
            found.append(Comparison.stated(what, None, mean, f"no claim in the paper's words; here: {word}"))
    return found


def draw(curves: pd.DataFrame) -> Figure:
    """Held-out error against steps: a column per task, a row per family of variants, plain attention in each."""
    tasks = list(curves["task"].unique())
    figure = Figure(figsize=(4.6 * len(tasks), 3.1 * len(FAMILIES)), layout="constrained")
    panels = figure.subplots(len(FAMILIES), len(tasks), squeeze=False, sharex=True)
    for row, members in zip(panels, FAMILIES.values(), strict=True):
        for axes, task in zip(row, tasks, strict=True):
            draw_curves(axes, curves[(curves["task"] == task) & curves["model"].isin([PLAIN, *members])], y="loss")
            axes.set_yscale("log")
        row[-1].legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
        row[0].set_ylabel("held-out squared error")
    for top, bottom, task in zip(panels[0], panels[-1], tasks, strict=True):
        top.set_title(f"{task} task", loc="left", fontsize=11)
        bottom.set_xlabel("step")
    return figure


def _scale(seeds: list[int], steps: int, batch: int, **changes: Any) -> dict[str, Any]:
    usual = dict(
        d_x=dict(linear=11, trigonometric=6, exponential=5),
        n_demonstrations=15,
        batch_size=batch,
        steps=steps,
        eval_every=max(1, steps // 20),
        heldout_sequences=128,
        learning_rate=0.02,
        seeds=seeds,
    )
    return {**usual, **changes}


EXPERIMENT = Experiment(
    name="dual-variants",
    source="DUAL sec. 4 and 5, figs. 3, 10 to 13",
    question="Do regularised, augmented and negative attention train better than plain attention?",
    run=run,
    scales={
        "tiny": _scale([0, 1], 2, 2, heldout_sequences=8, d_x=dict(linear=11, exponential=5)),
        "small": _scale(list(range(8)), 400, 8),
        "paper": _scale(list(range(16)), 5000, 16),
    },
    cost={
        "tiny": "seconds",
        "small": "under a minute on one core",
        "paper": "about an hour on one core (not run here)",
    },
)
