"""``arithmetic``: chains of sums, trained up to some number of operations and asked for more (KVSA table 7, app. I).

A problem is a set of equations in random order and a question; the solution works them out one by one. Each step of it must
*find* the equation of the next variable and the values that stand after the names of its operands: induction, again and again.
A row "TrX-TeY" of the paper's table trains with at most X operations and tests with exactly Y.

Judged is the answer, in three ways. *some step*, the paper's: the model is given the question and writes the solution itself,
greedily, with room for one step more than are needed; some step must work out the asked variable rightly, whatever else it
writes. *free*: the same, but the token at the answer's own place must be right. *forced*: it reads the right solution up to the
answer; only the last number is its own.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from matplotlib.figure import Figure

from kvlens.experiments.shared.curves import PLAIN, SHIFTED, draw_curves, of_heldout, train_and_compare
from kvlens.experiments.shared.learned import Goal
from kvlens.experiments.shared.outcome import Comparison, Experiment, Outcome
from kvlens.experiments.shared.seeds import differences_by_seed, mean_and_spread
from kvlens.experiments.shared.significance import SIGNIFICANCE
from kvlens.model import HookedKVTransformer
from kvlens.tasks import ArithmeticTask
from kvlens.tasks.arithmetic import STEP_LENGTH

PLAIN_NAME, SHIFT_NAME = "plain", "KV shift"
MODELS: dict[str, dict[str, Any]] = {PLAIN_NAME: dict(kv_shift=False), SHIFT_NAME: dict(kv_shift=True)}
COLORS = {PLAIN_NAME: PLAIN, SHIFT_NAME: SHIFTED}
PRINTED = {
    "Tr12-Te15": {PLAIN_NAME: 0.8154, SHIFT_NAME: 0.8909},
    "Tr21-Te24": {PLAIN_NAME: 0.8711, SHIFT_NAME: 0.9062},
}
"""Table 7: accuracy, judged by "some step"."""
SOME_STEP = "some step"


def run(settings: Mapping[str, Any], tell: Callable[[str], None]) -> Outcome:
    """Train both models for every row of the table and let them answer problems of every length up to the test's."""
    courses, answers = [], []
    for row in settings["rows"]:
        name = f"Tr{row['max_ops']}-Te{row['test_ops']}"
        tell(f"{name}, for the paper's {row['stands_for']}")
        task = ArithmeticTask(max_ops=row["max_ops"], test_ops=row["test_ops"], **settings["task"])
        course, answered = _train_and_ask(task, settings, tell)
        mark = dict(row=name, stands_for=row["stands_for"])
        courses.append(course.assign(**mark))
        chance = 1 / settings["task"]["modulus"]
        answers.append(answered.assign(**mark, max_ops=row["max_ops"], test_ops=row["test_ops"], chance=chance))
    answered, curves = (pd.concat(tables, ignore_index=True) for tables in (answers, courses))
    return Outcome(
        tables={"curves": curves, "answers": answered},
        figure=draw(answered),
        comparisons=compare(answered, untrained(answered, curves)),
        differences=[
            f"Problems are bare equations modulo {settings['task']['modulus']}: none of iGSM's sentences, hierarchy and "
            f"equations that do not matter. Rows here: {', '.join(sorted(set(answered['row'])))}.",
            f"{settings['model']['n_layers']} layers of width {settings['model']['d_model']}, seeds {settings['seeds']}, "
            f"{settings['training']['steps']} steps: chosen for a small machine, not the paper's.",
            "As in the paper an answer is right where some step of the solution, which the model writes itself, works out what "
            "is asked; there is room for one step more than needed. The table also has the accuracy at the answer's own place, "
            "after the model's solution and after the right one.",
        ],
    )


def _train_and_ask(
    task: ArithmeticTask, settings: Mapping[str, Any], tell: Callable[[str], None]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The learning curves, and one row for each model, seed, number of operations and way of judging."""
    rows: list[dict[str, Any]] = []

    def examine(label: str, seed: int, model: Any) -> None:
        for n_ops in range(1, task.test_ops + 1):
            shares = answer_accuracy(model, task, n_ops, settings["n_problems"], seed)
            rows.extend(dict(model=label, seed=seed, n_ops=n_ops, way=way, accuracy=share) for way, share in shares.items())

    # Held out while training are problems of the trained lengths: the best weights are chosen without a look at the test's.
    trained_on = replace(task, test_ops=0)
    room = dict(n_ctx=task.n_positions + STEP_LENGTH)
    models = {label: {**settings["model"], **room, **own} for label, own in MODELS.items()}
    curves = train_and_compare(
        trained_on, models, settings["training"], settings["seeds"], tell, examine, rates=settings["rates"]
    )
    return curves, pd.DataFrame(rows)


@torch.no_grad()
def answer_accuracy(
    model: HookedKVTransformer, task: ArithmeticTask, n_ops: int, n_problems: int, seed: int = 0
) -> dict[str, float]:
    """The share of answers that are right, on held-out problems of exactly ``n_ops`` operations.

    Returns:
        "some step": some step that the model wrote gives the asked variable its value; "free": the token at the answer's own
        place does; "forced": so does the one after the right solution up to there.
    """
    exact = replace(task, test_ops=n_ops)
    inputs, targets, _ = exact.heldout(n_problems, seed)
    question, solution = exact.question_length(n_ops), exact.solution_length(n_ops)
    answer = question + solution - 1  # its place in the text; it is predicted one position earlier
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


def untrained(answers: pd.DataFrame, curves: pd.DataFrame) -> dict[str, str | None]:
    """Row of the table -> why nothing can be said of it; None where something can.

    The plain model must solve the longest problems of the training, and the curves of both must be flat.
    """
    found = {}
    for name, rows in answers[answers["way"] == SOME_STEP].groupby("row", sort=False):
        goal = Goal(rows["chance"].iloc[0], best=1.0, y="accuracy")
        solved = rows[(rows["n_ops"] == rows["max_ops"]) & (rows["model"] == PLAIN_NAME)].assign(step=0)
        course = of_heldout(curves[curves["row"] == name])
        learned = goal.why_not_learned(solved, f"{PLAIN_NAME}, on the longest problems of its training,")
        found[str(name)] = learned or goal.why_untrained(course, PLAIN_NAME)
    return found


def compare(answers: pd.DataFrame, why: Mapping[str, str | None]) -> list[Comparison]:
    """For each row of the table its two numbers, and the lead of the shifted model on the longest problems of the training.

    Both are judged as the paper does, by some step, and seed by seed.

    Args:
        answers: one row for each row of the table, model, seed, number of operations and way of judging.
        why: of `untrained`.
    """
    judged = answers[answers["way"] == SOME_STEP]
    return [
        comparison.unless(why.get(str(name)))
        for name, rows in judged.groupby("row", sort=False)
        for comparison in _compare_row(rows)
    ]


def _compare_row(rows: pd.DataFrame) -> Iterator[Comparison]:
    first = rows.iloc[0]
    printed = PRINTED[first["stands_for"]]
    asked, trained = (rows[rows["n_ops"] == first[n]] for n in ("test_ops", "max_ops"))
    mean = asked.groupby("model")["accuracy"].mean()
    what = f"final answers right, {first['row']} (in the place of the paper's {first['stands_for']})"
    yield Comparison.stated(
        f"{what}: plain",
        printed[PLAIN_NAME],
        float(mean[PLAIN_NAME]),
        "the baseline; problems and models differ, so the figures are not to be compared in size",
    )
    yield Comparison(
        f"{what}: KV shift (lead, seed by seed: {mean_and_spread(_lead(asked))})",
        printed[SHIFT_NAME],
        float(mean[SHIFT_NAME]),
        "KV shift answers more problems than plain attention",
        SIGNIFICANCE.above(_lead(asked)),
    )
    yield Comparison(
        f"final answers right with KV shift minus without, {first['max_ops']} operations, the longest of the training",
        None,
        mean_and_spread(_lead(trained)),
        "KV shift is better at arithmetic (the paper prints longer problems only)",
        SIGNIFICANCE.above(_lead(trained)),
    )


def _lead(rows: pd.DataFrame) -> list[float]:
    return differences_by_seed(rows, SHIFT_NAME, PLAIN_NAME, "accuracy")


def draw(answers: pd.DataFrame) -> Figure:
    """One panel a row of the table: accuracy against the number of operations, what was never trained on shaded."""
    judged = answers[answers["way"] == SOME_STEP]
    names = list(judged["row"].unique())
    figure = Figure(figsize=(1.5 + 4.8 * len(names), 4.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), sharey=True, squeeze=False)[0], names, strict=True):
        rows = judged[judged["row"] == name]
        draw_curves(axes, rows, x="n_ops", colors=COLORS, marker="o", markersize=5)
        axes.axhline(rows["chance"].iloc[0], color="#64748b", linestyle=(0, (5, 3)), linewidth=0.8, label="chance")
        axes.axvspan(rows["max_ops"].iloc[0] + 0.5, rows["test_ops"].iloc[0] + 0.5, color="#f1f5f9", zorder=0)
        axes.set_title(f"{name}   (shaded: longer than in training)", loc="left", fontsize=11)
        axes.set_xticks(sorted(set(rows["n_ops"].tolist())))
        axes.set(xlabel="operations in the problem", ylim=(0, 1.03))
    figure.axes[0].set_ylabel("answers right in some step, written freely")
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=9,
        title="mean over seeds; band: least to largest",
        title_fontsize=8,
    )
    return figure


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
    run=run,
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
            [(3, 4, "Tr12-Te15")],
            dict(n_layers=3, d_model=64, d_head=16),
            modulus=5,
            n_names=8,
            n_problems=256,
            seeds=[0, 1, 2, 3, 4, 5],
            rates=[2e-3, 4e-3],
            steps=1400,
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
