"""``arithmetic``: chains of sums, trained up to some number of operations and tested on more (KVSA table 7, app. I).

A problem is a set of equations in random order and a question; the solution solves them one by one. Each step must *find* the
equation of the next variable and the values after the names of its operands, which takes repeated induction. A row "TrX-TeY" of
the paper's table trains with at most X operations and tests with exactly Y.

The answer is scored in three ways. *some step*, as in the paper: the model is given the question and writes the solution
greedily, with room for one more step than needed; any of the steps must give the requested variable its correct value. *free*:
the same, but the token at the answer's own position must be correct. *forced*: the model reads the correct solution up to the
answer, and predicts only the last number.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.experiments.kvsa.models import COLORS, MODELS, PLAIN, SHIFTED
from kvlens.experiments.shared.curves import of_heldout
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment
from kvlens.experiments.shared.seeds import differences_by_seed, mean_and_spread
from kvlens.experiments.shared.sweep import Cell, Reasons, Runs, Settings, Sweep, draw_panels
from kvlens.model import HookedKVTransformer
from kvlens.tasks import ArithmeticTask
from kvlens.tasks.arithmetic import STEP_LENGTH

PRINTED = {
    "Tr12-Te15": {PLAIN: 0.8154, SHIFTED: 0.8909},
    "Tr21-Te24": {PLAIN: 0.8711, SHIFTED: 0.9062},
}
"""Table 7: accuracy, scored by "some step"."""
SOME_STEP = "some step"
COLUMNS = ["model", "seed", "n_ops", "way", "accuracy", "row", "stands_for", "max_ops", "test_ops", "chance"]


def cells(settings: Settings) -> Iterator[Cell]:
    """Both models for every row of the paper's table."""
    for row in settings["rows"]:
        task = ArithmeticTask(max_ops=row["max_ops"], test_ops=row["test_ops"], **settings["task"])
        name = f"Tr{row['max_ops']}-Te{row['test_ops']}"
        n_ctx = task.n_positions + STEP_LENGTH
        yield Cell(
            replace(task, test_ops=0),  # problems of the test's length are not used to select the best weights
            {label: {**settings["model"], "n_ctx": n_ctx, **own} for label, own in MODELS.items()},
            dict(row=name, stands_for=row["stands_for"]),
            title=f"{name}, for the paper's {row['stands_for']}",
            examine=partial(examine, task, settings["n_problems"]),
        )


def examine(task: ArithmeticTask, n_problems: int, label: str, seed: int, model: Any) -> list[dict[str, Any]]:
    """One row for each number of operations and way of scoring."""
    fixed = dict(max_ops=task.max_ops, test_ops=task.test_ops, chance=1 / task.modulus)
    return [
        dict(model=label, seed=seed, n_ops=n_ops, way=way, accuracy=share, **fixed)
        for n_ops in range(1, task.test_ops + 1)
        for way, share in answer_accuracy(model, task, n_ops, n_problems, seed).items()
    ]


@torch.no_grad()
def answer_accuracy(
    model: HookedKVTransformer, task: ArithmeticTask, n_ops: int, n_problems: int, seed: int = 0
) -> dict[str, float]:
    """The share of correct answers, on held-out problems of exactly ``n_ops`` operations.

    Returns:
        "some step": a step that the model wrote gives the requested variable its value; "free": the token at the answer's own
        position is correct; "forced": so is the prediction after the correct solution.
    """
    exact = replace(task, test_ops=n_ops)
    inputs, targets, _ = exact.heldout(n_problems, seed)
    question, solution = exact.question_length(n_ops), exact.solution_length(n_ops)
    answer = question + solution - 1  # its position in the text; it is predicted one position earlier
    device = next(model.parameters()).device
    inputs, right = inputs[:, :answer].to(device), targets[:, answer - 1].to(device)
    text = model.generate(
        inputs[:, :question],
        max_new_tokens=solution + STEP_LENGTH,
        do_sample=False,
        stop_at_eos=False,
        prepend_bos=False,
        return_type="tokens",
        verbose=False,
    )
    asked = inputs[:, question - 2]  # "? v :"
    forced = model(inputs)[:, -1].argmax(dim=-1)
    return {
        SOME_STEP: _share(exact.some_step_answers(text[:, question:], asked, right)),
        "free": _share(text[:, answer] == right),
        "forced": _share(forced == right),
    }


def _share(is_right: torch.Tensor) -> float:
    return float(is_right.double().mean())


def untrained(runs: Runs) -> Reasons:
    """By row: the plain model must solve the longest training problems, and the curves of both models must be flat."""
    found = {}
    for name, rows in _scored(runs.measured).groupby("row", sort=False):
        goal = Goal(rows["chance"].iloc[0], best=1.0, y="accuracy")
        solved = rows[(rows["n_ops"] == rows["max_ops"]) & (rows["model"] == PLAIN)].assign(step=0)
        course = of_heldout(runs.curves[runs.curves["row"] == name])
        learned = goal.why_not_learned(solved, f"{PLAIN}, on the longest training problems,")
        found[str(name)] = learned or goal.why_untrained(course, PLAIN)
    return found


def _scored(answers: pd.DataFrame) -> pd.DataFrame:
    return answers[answers["way"] == SOME_STEP]


def compare(answers: pd.DataFrame, why: Reasons) -> list[Comparison]:
    """For each row its two numbers, and the lead of the shifted model on the longest training problems.

    Both are scored by "some step", as in the paper, and tested seed by seed.

    Args:
        answers: columns `COLUMNS`.
        why: of `untrained`.
    """
    return [
        comparison.unless(why.get(str(name)))
        for name, rows in _scored(answers).groupby("row", sort=False)
        for comparison in _compare_row(rows)
    ]


def _compare_row(rows: pd.DataFrame) -> Iterator[Comparison]:
    first = rows.iloc[0]
    printed = PRINTED[first["stands_for"]]
    asked, trained = (rows[rows["n_ops"] == first[n]] for n in ("test_ops", "max_ops"))
    mean = asked.groupby("model")["accuracy"].mean()
    what = f"final answers right, {first['row']} (in place of the paper's {first['stands_for']})"
    yield Comparison.stated(
        f"{what}: plain",
        printed[PLAIN],
        float(mean[PLAIN]),
        "the baseline; problems and models differ, so the numbers are not comparable",
    )
    yield Comparison.tested_on(
        f"{what}: KV shift (lead, seed by seed: {mean_and_spread(_lead(asked))})",
        printed[SHIFTED],
        float(mean[SHIFTED]),
        "KV shift answers more problems than plain attention",
        _lead(asked),
    )
    yield Comparison.tested_on(
        f"final answers right with KV shift minus without, {first['max_ops']} operations, the longest of the training",
        None,
        mean_and_spread(_lead(trained)),
        "KV shift is better at arithmetic (the paper prints longer problems only)",
        _lead(trained),
    )


def _lead(rows: pd.DataFrame) -> list[float]:
    return differences_by_seed(rows, SHIFTED, PLAIN, "accuracy")


def draw(runs: Runs) -> Figure:
    """Accuracy against the number of operations; numbers that were not trained on are shaded."""
    scored = _scored(runs.measured)
    figure = draw_panels(
        scored,
        "n_ops",
        by="row",
        xlabel="operations in the problem",
        ylabel="share correct in some step of the generated solution",
        colors=COLORS,
        title=lambda rows: f"{rows['row'].iloc[0]}   (shaded: longer than in training)",
        ticks=True,
    )
    for axes, (_, rows) in zip(figure.axes, scored.groupby("row", sort=False), strict=True):
        axes.axvspan(rows["max_ops"].iloc[0] + 0.5, rows["test_ops"].iloc[0] + 0.5, color="#f1f5f9", zorder=0)
    return figure


def differences(runs: Runs) -> list[str]:
    """From the paper."""
    settings = runs.settings
    return [
        f"Problems are bare equations modulo {settings['task']['modulus']}: none of iGSM's sentences, hierarchy and "
        f"equations that do not matter. Rows here: {', '.join(sorted(set(runs.measured['row'])))}.",
        f"{settings['model']['n_layers']} layers of width {settings['model']['d_model']}, seeds {settings['seeds']}, "
        f"{settings['training']['steps']} steps: chosen for a small machine, not the paper's.",
        "As in the paper an answer is correct if any step of the solution that the model writes gives the requested value; "
        "there is room for one more step than needed. The table also has the accuracy at the answer's own position, after the "
        "model's solution and after the correct one.",
    ]


SWEEP = Sweep(
    cells=cells,
    measure=lambda runs: runs.examined[COLUMNS],
    untrained=untrained,
    more=lambda runs, why: compare(runs.measured, why),
    differences=differences,
    draw=draw,
    tables=lambda runs: {"curves": runs.curves, "answers": runs.measured},
)


def _scale(
    rows: list[tuple[int, int, str]],
    model: dict[str, Any],
    *,
    modulus: int,
    n_names: int,
    n_problems: int,
    seeds: list[int],
    rates: list[float],
    **training: Any,
) -> dict[str, Any]:
    return dict(
        task=dict(modulus=modulus, n_names=n_names),
        rows=[dict(max_ops=most, test_ops=exactly, stands_for=printed) for most, exactly, printed in rows],
        model=model,
        n_problems=n_problems,
        seeds=seeds,
        rates=rates,
        training=training,
    )


EXPERIMENT = Experiment(
    name="arithmetic",
    source="KVSA table 7, app. I",
    question="Does KV shift help to solve longer chains of arithmetic than a model was trained on?",
    run=SWEEP.run,
    scales={
        "tiny": _scale(
            [(1, 2, "Tr12-Te15")],
            dict(n_layers=1, d_model=16, d_head=8),
            modulus=3,
            n_names=4,
            n_problems=8,
            seeds=[0],
            rates=[1e-2],
            steps=6,
            batch_size=8,
            eval_every=3,
            eval_sequences=8,
        ),
        "small": _scale(
            [(2, 3, "Tr12-Te15")],
            dict(n_layers=3, d_model=64, d_head=16),
            modulus=5,
            n_names=6,
            n_problems=256,
            seeds=[11, 12, 13, 14, 15, 16],
            rates=[2e-3, 4e-3],
            steps=1200,
            batch_size=32,
            eval_every=100,
            eval_sequences=128,
        ),
        "paper": _scale(
            [(12, 15, "Tr12-Te15"), (21, 24, "Tr21-Te24")],
            dict(n_layers=12, d_model=768, d_head=64),
            modulus=23,
            n_names=52,
            n_problems=4096,
            seeds=[0, 1, 2, 3, 4, 5],
            rates=[3e-4, 1e-3],
            steps=100_000,
            batch_size=256,
            eval_every=2000,
            eval_sequences=512,
            precision="bfloat16",
        ),
    },
    cost={
        "tiny": "a few seconds",
        "small": "twenty minutes on one core",
        "paper": "weeks on one GPU (the paper's numbers of operations, on the simpler problems; not run here)",
    },
)
