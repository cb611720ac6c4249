"""``arithmetic``: chains of sums, trained up to some number of operations and tested on more (KVSA table 7, app. I).

A problem is a set of equations in random order and a question; the solution solves them one by one. Each step must *find* the
equation of the next variable and the values after the names of its operands, which takes repeated induction. A row "TrX-TeY" of
the paper's table trains with at most X operations and tests with exactly Y.

The answer is scored as in the paper: the model is given the question and writes the solution greedily, with room for one more
step than needed; any of the steps must give the requested variable its correct value.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.model import HookedKVTransformer
from kvlens.papers.harness.learned import Cell, Goal, differences_by_seed, lead, mean_and_spread, of_heldout, train_cells
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison
from kvlens.papers.kvsa.models import MODEL_COLORS, MODELS, PLAIN, SHIFTED
from kvlens.tasks import ArithmeticTask
from kvlens.tasks.arithmetic import STEP_LENGTH

PRINTED = {
    "Tr12-Te15": {PLAIN: 0.8154, SHIFTED: 0.8909},
    "Tr21-Te24": {PLAIN: 0.8711, SHIFTED: 0.9062},
}
"""Table 7: accuracy."""
COLUMNS = ["model", "seed", "n_ops", "accuracy", "row", "stands_for", "max_ops", "test_ops", "chance"]


@experiment(
    "KVSA table 7, app. I",
    "Does KV shift help to solve longer chains of arithmetic than a model was trained on?",
    cost=("a few seconds", "twenty minutes on one core"),
    task=dict(modulus=(3, 5), n_names=(4, 6)),
    rows=(
        [dict(max_ops=1, test_ops=2, stands_for="Tr12-Te15")],
        [dict(max_ops=2, test_ops=3, stands_for="Tr12-Te15")],
    ),
    model=dict(n_layers=(1, 3), d_model=(16, 64), d_head=(8, 16)),
    n_problems=(8, 256),
    seeds=([0], [11, 12, 13, 14, 15, 16]),
    rates=([1e-2], [2e-3, 4e-3]),
    training=dict(
        steps=(6, 1200),
        batch_size=(8, 32),
        eval_every=(3, 100),
        eval_sequences=(8, 128),
    ),
)
def arithmetic(settings: Settings, tell: Tell) -> Reproduction:
    """Train both models for every row of the paper's table, and let them solve longer problems."""
    curves, examined = train_cells(cells(settings), settings, tell)
    answers = examined[COLUMNS]
    return Reproduction(
        tables={"curves": curves, "answers": answers},
        figure=lambda: draw(answers),
        comparisons=compare(answers, untrained(curves, answers)),
        differences=[
            f"Problems are bare equations modulo {settings['task']['modulus']}: none of iGSM's sentences, hierarchy and "
            f"equations that do not matter. Rows here: {', '.join(sorted(set(answers['row'])))}.",
            f"{settings['model']['n_layers']} layers of width {settings['model']['d_model']}, seeds {settings['seeds']}, "
            f"{settings['training']['steps']} steps: chosen for a small machine, not the paper's.",
            "As in the paper an answer is correct if any step of the solution that the model writes gives the requested value; "
            "there is room for one more step than needed.",
        ],
    )


def cells(settings: Settings) -> Iterator[Cell]:
    """Yield both models for every row of the paper's table."""
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


def examine(
    task: ArithmeticTask, n_problems: int, label: str, seed: int, model: HookedKVTransformer
) -> list[dict[str, object]]:
    """One row for each number of operations."""
    fixed = dict(max_ops=task.max_ops, test_ops=task.test_ops, chance=task.chance)
    return [
        dict(model=label, seed=seed, n_ops=n_ops, accuracy=answer_accuracy(model, task, n_ops, n_problems, seed), **fixed)
        for n_ops in range(1, task.test_ops + 1)
    ]


@torch.no_grad()
def answer_accuracy(model: HookedKVTransformer, task: ArithmeticTask, n_ops: int, n_problems: int, seed: int = 0) -> float:
    """The share of held-out problems of exactly ``n_ops`` operations of which a written step has the requested value."""
    exact = replace(task, test_ops=n_ops)
    inputs, targets, _ = exact.heldout(n_problems, seed)
    question, solution = exact.question_length(n_ops), exact.solution_length(n_ops)
    answer = question + solution - 1  # its position in the text; it is predicted one position earlier
    device = next(model.parameters()).device
    inputs, right = inputs[:, :answer].to(device), targets[:, answer - 1].to(device)
    text = model.generate(
        inputs[:, :question],
        max_new_tokens=solution + STEP_LENGTH,
        stop_at_eos=False,
        do_sample=False,
        prepend_bos=False,
        return_type="tokens",
        verbose=False,
    )
    asked = inputs[:, question - 2]  # "? v :"
    return float(exact.some_step_answers(text[:, question:], asked, right).double().mean())


def untrained(curves: pd.DataFrame, answers: pd.DataFrame) -> dict[str, str | None]:
    """Say by row what is too little trained: plain must solve the longest training problems, both curves must be flat."""
    found = {}
    for name, rows in answers.groupby("row", sort=False):
        goal = Goal(rows["chance"].iloc[0], best=1.0, y="accuracy")
        solved = rows[(rows["n_ops"] == rows["max_ops"]) & (rows["model"] == PLAIN)].assign(step=0)
        course = of_heldout(curves[curves["row"] == name])
        learned = goal.why_not_learned(solved, f"{PLAIN}, on the longest training problems,")
        found[str(name)] = learned or goal.why_untrained(course, PLAIN)
    return found


def compare(answers: pd.DataFrame, why: Mapping[str, str | None]) -> list[Comparison]:
    """Compare each row's two numbers, and the lead of the shifted model on the longest training problems.

    They are tested seed by seed; ``why`` is that of `untrained`.
    """
    by_row = answers.groupby("row", sort=False)
    return [one.unless(why.get(str(name))) for name, rows in by_row for one in _compare_row(rows)]


def _compare_row(rows: pd.DataFrame) -> Iterator[Comparison]:
    first = rows.iloc[0]
    printed = PRINTED[first["stands_for"]]
    asked, trained = (rows[rows["n_ops"] == first[n]] for n in ("test_ops", "max_ops"))
    mean = asked.groupby("model")["accuracy"].mean()
    what = f"final answers right, {first['row']} (in place of the paper's {first['stands_for']})"
    claim = "the baseline; problems and models differ, so the numbers are not comparable"
    yield Comparison.stated(f"{what}: plain", claim, float(mean[PLAIN]), paper=printed[PLAIN])
    ahead = differences_by_seed(asked, SHIFTED, PLAIN, "accuracy")
    what = f"{what}: KV shift (lead, seed by seed: {mean_and_spread(ahead)})"
    claim = "KV shift answers more problems than plain attention"
    yield Comparison.tested_on(what, claim, ahead, ours=float(mean[SHIFTED]), paper=printed[SHIFTED])
    what = f"final answers right with KV shift minus without, {first['max_ops']} operations, the longest of the training"
    claim = "KV shift is better at arithmetic (the paper prints longer problems only)"
    yield lead(trained, SHIFTED, PLAIN, "accuracy", what, claim)


def draw(answers: pd.DataFrame) -> Figure:
    """Accuracy against the number of operations; numbers that were not trained on are shaded."""
    title = "Share correct in some step of the generated solution; shaded: longer than in training"
    figure = draw_panels(answers, "n_ops", panel="row", title=title, colors=MODEL_COLORS, ticks=True)
    for axes, (_, rows) in zip(figure.axes, answers.groupby("row", sort=False), strict=True):
        axes.axvspan(rows["max_ops"].iloc[0] + 0.5, rows["test_ops"].iloc[0] + 0.5, color="#f1f5f9", zorder=0)
    return figure
