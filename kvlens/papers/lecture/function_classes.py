"""``function-classes``: a transformer trained to learn functions from examples, against untrained methods (LECTURE).

For each class of functions, one model is trained on prompts (x_1, f(x_1), ..., x_n, f(x_n), x'), each with its own f
(:mod:`kvlens.tasks.regression`). On new prompts its squared error, as the number n of examples grows, is compared with those of
least squares, ridge regression and nearest neighbors (:mod:`~kvlens.papers.lecture.regression_baselines`), which see
the same examples. Prompts come from the training distribution, and from four others, to which a method generalizes but a
memorized distribution does not.

Errors are relative to the error of always predicting 0, so 1 means no better than that, on every distribution.

The second part is about order: whether T(pi X) = pi T(X) (:mod:`~kvlens.papers.lecture.equivariance`), and how models with
learned and with sinusoidal positions, and with plain numbers for them (:mod:`~kvlens.papers.lecture.equivariance`),
perform on prompts longer than in training.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor, nn

from kvlens.errors import KVLensError
from kvlens.model import HookedKVRegressor
from kvlens.papers.harness.learned import LATE, Goal, TrainingRun
from kvlens.papers.harness.plots import draw_panels
from kvlens.papers.harness.run import Reproduction, Settings, Tell, experiment
from kvlens.papers.harness.significance import Comparison, Evidence, Number
from kvlens.papers.lecture.equivariance import NUMBERS, NumberedRegression, equivariance_table, numbered, position_numbers
from kvlens.papers.lecture.regression_baselines import least_squares, nearest_neighbors, ridge
from kvlens.tasks import Batch, RegressionTask
from kvlens.tasks.regression import HELDOUT_NOISE, SHIFTS

PROMPTS_AT_ONCE = 256

PENALTIES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""The penalties of ridge regression that trained models are compared with."""

OTHERS = ("trigonometric", "exponential", "decision_tree", "two_layer_relu")


@experiment(
    "LECTURE; Garg et al. 2022",
    "Does a transformer trained on functions learn new ones from the examples in its prompt as well as least squares?",
    cost=(
        "seconds",
        "a quarter of an hour on one core",
    ),
    task=dict(dimensions=(4, 3), n_points=(5, 10)),
    model=dict(
        act_fn="gelu",
        normalization_type="LN",
        positional_embedding_type="standard",
        n_layers=(1, 3),
        d_model=(12, 64),
        d_head=(6, 16),
    ),
    training=dict(
        batch_size=(8, 32),
        learning_rate=(1e-3, 1e-3),
        eval_every=(2, 200),
        eval_sequences=(16, 512),
        weight_decay=0.0,
    ),
    classes=(
        dict(linear=dict(steps=6, n_seeds=2), sparse_linear=dict(steps=4, n_seeds=1)),
        dict(
            linear=dict(steps=8000, n_seeds=2),
            **{name: dict(steps=1200, n_seeds=1) for name in OTHERS if name != "decision_tree"},
            decision_tree=dict(steps=6000, n_seeds=1),  # after 1,200 its error still falls
        ),
    ),
    n_neighbors=3,
    n_prompts=(64, 2048),
    prompt_seed=1000,
    lengths=dict(longest=(7, 16), steps=(6, 4000)),
    n_fresh_models=3,
)
def function_classes(settings: Settings, tell: Tell) -> Reproduction:
    """Train the models of ``settings``, test them on every distribution, and test their use of the input's order."""
    courses, curves, linear = [], [], {}
    for functions, how in settings["classes"].items():
        task = RegressionTask(functions=functions, **settings["task"])
        models = {}
        for seed in range(how["n_seeds"]):
            models[seed], course = train_one(task, settings, how["steps"], seed)
            courses.append(course)
            tell(f"{functions}, seed {seed}: held-out squared error {course['loss'].iloc[-1]:.4f}, {how['steps']} steps")
        if functions == "linear":
            linear = models
        shifts = SHIFTS if functions == "linear" else ("none",)
        curves += [error_curves(replace(task, heldout_shift=shift), models, settings) for shift in shifts]
    courses_of_lengths, lengths = measure_lengths(linear[0], settings, tell)
    task = RegressionTask(functions="linear", **settings["task"])
    tables = {
        "error": pd.concat(curves, ignore_index=True),
        "training": pd.concat([*courses, *courses_of_lengths], ignore_index=True),
        "length": lengths,
        "ridge": distance_from_ridge(task, linear, settings),
        "equivariance": equivariance_table(settings["model"], task.n_positions, task.d_input, 8, settings["n_fresh_models"]),
    }
    return Reproduction(
        tables=tables,
        figure=lambda: draw(tables["error"]),
        comparisons=compare(tables, settings),
        differences=differences(settings),
    )


def train_one(
    task: RegressionTask, settings: Settings, steps: int, seed: int, **changes: object
) -> tuple[HookedKVRegressor, pd.DataFrame]:
    """Train a model on ``task``; return it and its held-out course: functions, positions, seed, step, loss."""
    training = {**settings["training"], "steps": steps, "seed": seed}
    model, result = TrainingRun(task, "transformer", {**settings["model"], **changes}, training).finished()
    assert isinstance(model, HookedKVRegressor)
    labels = dict(functions=task.functions, positions=model.cfg.positional_embedding_type, seed=seed)
    return model, pd.DataFrame(labels, index=result.heldout.index).join(result.heldout[["step", "loss"]])


# --- error against the number of examples ---


def error_curves(task: RegressionTask, models: Mapping[int, nn.Module], settings: Settings) -> pd.DataFrame:
    """Squared error of every predictor on held-out prompts of ``task``, for every number of examples that it scores.

    Args:
        task: determines functions, points and distribution.
        models: models by seed.
        settings: ``n_prompts``, ``prompt_seed``, ``n_neighbors``.

    Returns:
        functions, shift, predictor, seed (0 for untrained methods), n_examples, squared_error, standard_error (of that mean
        over prompts), zero_error (that of always predicting 0), relative_error (the quotient), and from_least_squares: the mean
        squared difference from the predictions of least squares, over ``zero_error``.
    """
    tables = []
    for scored in tasks_that_score_all(task):
        batch = scored.heldout(settings["n_prompts"], settings["prompt_seed"])
        baselines = untrained_predictions(scored, batch, settings)
        trained = [("transformer", seed, predict(model, batch.inputs)) for seed, model in models.items()]
        for predictor, seed, predicted in [*trained, *((name, 0, values) for name, values in baselines.items())]:
            errors = errors_by_examples(batch, predicted, baselines["least squares"])
            labels = dict(functions=task.functions, shift=task.heldout_shift, predictor=predictor, seed=seed)
            tables.append(pd.DataFrame(labels, index=errors.index).join(errors))
    return pd.concat(tables, ignore_index=True)


def tasks_that_score_all(task: RegressionTask) -> Iterator[RegressionTask]:
    """``task`` itself, or, if it scores only its last point, one task for each number of examples."""
    if task.heldout_shift != "orthant":
        yield task
        return
    for n_points in range(2, task.n_points + 1):
        yield replace(task, n_points=n_points)


def untrained_predictions(task: RegressionTask, batch: Batch, settings: Settings) -> dict[str, Float[Tensor, "prompt point"]]:
    """Predictions of least squares, ridge regression and nearest neighbors at each point, in float64."""
    x, y = (part.double() for part in task.points_and_values(batch.inputs))
    return {
        "least squares": least_squares(x, y),
        "ridge": ridge(x, y, penalty(task)),
        "nearest neighbors": nearest_neighbors(x, y, settings["n_neighbors"]),
    }


def distance_from_ridge(task: RegressionTask, models: Mapping[int, nn.Module], settings: Settings) -> pd.DataFrame:
    """How far trained models' predictions are from those of ridge regression, by its penalty, and from least squares'.

    Returns:
        seed, penalty (0 is least squares), distance: the mean squared difference, over prompts and over all numbers of examples
        but 0, and from_least_squares: the distance less that at penalty 0, with its standard_error over prompts.
    """
    batch = task.heldout(settings["n_prompts"], settings["prompt_seed"])
    x, y = (part.double() for part in task.points_and_values(batch.inputs))
    methods = {0.0: least_squares(x, y), **{p: ridge(x, y, p) for p in PENALTIES}}
    rows = []
    for seed, model in models.items():
        predicted = predict(model, batch.inputs)
        by_prompt = {p: (predicted - method)[:, 1:].square().mean(1) for p, method in methods.items()}
        for p, distance in by_prompt.items():
            more = distance - by_prompt[0.0]
            error = float(more.std()) / math.sqrt(len(more))
            row = dict(distance=float(distance.mean()), from_least_squares=float(more.mean()), standard_error=error)
            rows.append(dict(seed=seed, penalty=p, **row))
    return pd.DataFrame(rows)


def penalty(task: RegressionTask) -> float:
    """The ridge penalty that is best for linear functions under the noise of the shift "noisy"."""
    return task.dimensions * HELDOUT_NOISE**2


@torch.no_grad()
def predict(model: nn.Module, inputs: Float[Tensor, "prompt pos d_input"]) -> Float[Tensor, "prompt point"]:
    """The model's predictions at the points (every other position), in float64 on the CPU."""
    model.eval()
    device = next(model.parameters()).device
    parts = [model(part.to(device)).cpu() for part in inputs.split(PROMPTS_AT_ONCE)]
    return torch.cat(parts)[:, 0::2].double()


def errors_by_examples(
    batch: Batch, predicted: Float[Tensor, "prompt point"], by_least_squares: Float[Tensor, "prompt point"]
) -> pd.DataFrame:
    """One row for each number of examples at which ``batch`` is scored; columns as in `error_curves`."""
    targets, scored = batch.targets[:, 0::2].double(), batch.scored[0, 0::2].numpy()
    squared, zero = (predicted - targets).square(), targets.square().mean(0)
    columns = dict(
        n_examples=torch.arange(targets.shape[1]),
        squared_error=squared.mean(0),
        standard_error=squared.std(0) / math.sqrt(len(targets)),
        zero_error=zero,
        relative_error=squared.mean(0) / zero,
        from_least_squares=(predicted - by_least_squares).square().mean(0) / zero,
    )
    return pd.DataFrame({name: values.numpy() for name, values in columns.items()})[scored].reset_index(drop=True)


# --- prompts longer than in training ---

SHORT, LONGER, RENUMBERED = "as in training", "longer", "as in training, numbered as the end of a longer one"


def measure_lengths(learned: HookedKVRegressor, settings: Settings, tell: Tell) -> tuple[list[pd.DataFrame], pd.DataFrame]:
    """Test models with different positions, trained alike, on prompts longer than in training.

    Args:
        learned: the model of linear functions, with learned positions.

    Returns:
        The courses of the other models' training, and a table: positions, prompts (`LONGER`; `SHORT`, of the length of
        training; `RENUMBERED`, those with the numbers of the last positions of a longer one), n_examples, relative_error (NaN
        where the model refuses the prompt), standard_error and zero_error as in `error_curves`, in_training (whether prompts
        of so many examples occurred in training).
    """
    how, steps = settings["task"], settings["lengths"]["steps"]
    tasks: dict[str, RegressionTask] = {kind: NumberedRegression(**how, numbers=kind) for kind in NUMBERS}
    tasks = {"standard": (plain := RegressionTask(**how)), "sinusoidal": plain, **tasks}
    batches = {
        n: replace(plain, n_points=n).heldout(settings["n_prompts"], settings["prompt_seed"])
        for n in (plain.n_points, settings["lengths"]["longest"])
    }
    courses, tables = [], []
    for positions, task in tasks.items():
        model = learned
        if positions != "standard":
            own = "none" if positions in NUMBERS else positions
            model, course = train_one(task, settings, steps, 0, positional_embedding_type=own)
            courses.append(course.assign(positions=positions))
            tell(f"linear, positions {positions}: held-out squared error {course['loss'].iloc[-1]:.4f}, {steps} steps")
        for prompts, batch, inputs in _prompts(positions, *batches.values()):
            predicted = predict_or_refuse(model, inputs)
            errors = errors_by_examples(batch, predicted, predicted).drop(columns=["squared_error", "from_least_squares"])
            labels = dict(positions=positions, prompts=prompts, in_training=errors["n_examples"] < plain.n_points)
            tables.append(errors.assign(**labels))
    return courses, pd.concat(tables, ignore_index=True)


def _prompts(positions: str, short: Batch, longer: Batch) -> Iterator[tuple[str, Batch, Tensor]]:
    """Short and longer prompts with the positions' numbers, if they are numbers; and short ones with other numbers."""
    batches = {SHORT: short, LONGER: longer}
    if positions not in NUMBERS:
        yield from ((name, batch, batch.inputs) for name, batch in batches.items())
        return
    for name, batch in batches.items():
        yield name, batch, numbered(batch.inputs, position_numbers(positions, batch.inputs.shape[1]))
    last = position_numbers(positions, longer.inputs.shape[1])[-short.inputs.shape[1] :]
    yield RENUMBERED, short, numbered(short.inputs, last)


def predict_or_refuse(model: HookedKVRegressor, inputs: Float[Tensor, "prompt pos d_input"]) -> Float[Tensor, "prompt point"]:
    """`predict`; if the model refuses prompts of that length, predictions for the part it can read, and NaN for the rest."""
    try:
        return predict(model, inputs)
    except KVLensError:
        read = predict(model, inputs[:, : model.cfg.n_ctx])
        unread = read.new_full((len(inputs), (inputs.shape[1] + 1) // 2 - read.shape[1]), math.nan)
        return torch.cat([read, unread], dim=1)


# --- claims ---

MATCH = 0.05
"""Two methods match if their relative errors differ by at most this much; 1 is the error of always predicting 0."""
DEGRADES = 2.0
"""An error is worse out of distribution if it is more than this many times that in distribution, plus MATCH."""
N_ERRORS = 3.0
"""The margin of a measurement, in standard errors over prompts; one in 370 normal means is outside it."""
LEARNED = 0.5
"""A model whose relative error in distribution is above this has learned too little to test how it generalizes."""
BASELINES = ("least squares", "ridge", "nearest neighbors")
SHIFT_CLAIMS = {
    "scaled_inputs": ("points 3 times as far out as in training: the error grows, least squares' does not", "degrades"),
    "skewed_inputs": ("points with a skewed covariance: the error grows, least squares' does not", "degrades"),
    "orthant": ("examples in one orthant, the question anywhere: close to in distribution", "keeps"),
}


def compare(tables: Mapping[str, pd.DataFrame], settings: Settings) -> list[Comparison]:
    """Compare every claim with its number."""
    error, dimensions = tables["error"], settings["task"]["dimensions"]
    why = still_learning(tables["training"])
    return [
        *(unless_it_holds(one, why["linear"]) for one in compare_linear(error[error["functions"] == "linear"], dimensions)),
        unless_it_holds(compare_ridge(tables["ridge"]), why["linear"]),
        *compare_shifts(error[error["functions"] == "linear"]),
        compare_noise(error[error["functions"] == "linear"]),
        *compare_classes(error[(error["functions"] != "linear") & (error["shift"] == "none")], why),
        *compare_orders(tables["equivariance"]),
        *compare_lengths(tables["length"]),
    ]


def still_learning(training: pd.DataFrame) -> dict[str, str | None]:
    """Class of functions -> why a model trained on it may still be learning; None if its curve is flat.

    Claims are about how near its error is to that of least squares, 0: so what is left of the error must be flat as well.
    """
    found, goal = {}, Goal(chance=1.0)
    for functions, runs in training[training["positions"] == "standard"].groupby("functions", sort=False):
        half, end = (1 - gain for gain in goal.gains(runs))
        falls = f"the second half of its steps took {1 - end / half:.0%} of its error" if end < (1 - LATE) * half else None
        found[str(functions)] = goal.why_not_flat(runs, f"the transformer trained on {functions}") or falls
    return found


def unless_it_holds(comparison: Comparison, why: str | None) -> Comparison:
    """A claim that trained models do well can hold before training is finished, but cannot be rejected before."""
    return comparison if comparison.holds else comparison.unless(why)


class Measured(NamedTuple):
    """A relative error, and its margin of three standard errors over the prompts."""

    value: float
    margin: float

    def below(self, bound: float) -> bool | None:
        """Whether it is significantly below ``bound`` (True), above it (False), or neither (None)."""
        return Evidence("margin", self, bound, below=True).holds

    def compared(
        self, what: str, claim: str, ours: Number, bound: float, *, below: bool = True, paper: Number = None
    ) -> Comparison:
        """The claim that it lies below ``bound`` (or above); ``ours`` is shown."""
        return Comparison(what, claim, ours, Evidence("margin", (float(self.value), float(self.margin)), bound, below), paper)


def worst(measured: Iterable[Measured], bound: float) -> Measured:
    """The one that decides whether all of them are below ``bound``: above it, if one is, else the one nearest to it."""
    return max(measured, key=lambda one: (one.below(bound) is False, one.value + one.margin))


def worst_of_seeds(error: pd.DataFrame, shift: str, predictor: str) -> dict[int, Measured]:
    """Return by number of examples the largest relative error of the seeds, with its margin.

    Trained models count with the worst of their seeds, and the verdicts are about these models: the margin does not include
    the variation between trainings.
    """
    rows = error[(error["shift"] == shift) & (error["predictor"] == predictor)]
    worst = rows.loc[rows.groupby("n_examples")["relative_error"].idxmax()]
    margins = N_ERRORS * worst["standard_error"] / worst["zero_error"]
    return dict(zip(worst["n_examples"], map(Measured, worst["relative_error"], margins), strict=True))


def last(curve: dict[int, Measured]) -> Measured:
    """The error with the largest number of examples."""
    return curve[max(curve)]


def gap_between(ours: dict[int, Measured], theirs: dict[int, Measured]) -> dict[int, Measured]:
    """The gap between two curves; the margins add up, as if the two did not share their prompts."""
    return {n: Measured(abs(ours[n].value - theirs[n].value), ours[n].margin + theirs[n].margin) for n in ours}


def mean_of(curve: dict[int, Measured]) -> Measured:
    """The mean over all numbers of examples; the margin assumes fully correlated errors."""
    return Measured(*(sum(column) / len(curve) for column in zip(*curve.values(), strict=True)))


def compare_linear(error: pd.DataFrame, dimensions: int) -> Iterator[Comparison]:
    """Linear functions, in distribution."""
    ours = worst_of_seeds(error, "none", "transformer")
    gaps = {baseline: gap_between(ours, worst_of_seeds(error, "none", baseline)) for baseline in BASELINES}
    distance = {baseline: mean_of(gap) for baseline, gap in gaps.items()}
    nearest = min(BASELINES, key=lambda baseline: distance[baseline].value)
    first, second = distance["least squares"], min(distance[baseline] for baseline in BASELINES if baseline != "least squares")
    what = "baseline whose error curve is closest to the transformer's, linear functions, mean gap over all n"
    claim = "the error of a transformer trained on linear functions falls with n like that of least squares"
    ahead = Measured(first.value - second.value, first.margin + second.margin)
    yield ahead.compared(what, claim, nearest, 0.0, paper="least squares")
    what = "largest gap between the transformer's relative error and least squares', linear functions, over all n"
    claim = f"a transformer trained on linear functions does as well as least squares on new ones (no gap above {MATCH})"
    own = gaps["least squares"].values()
    yield worst(own, MATCH).compared(what, claim, max(own).value, MATCH)
    n = min(2 * dimensions, max(ours))
    what = f"relative error of the transformer after {n} examples of a linear function in {dimensions} dimensions"
    claim = f"with more examples than dimensions the error is close to 0 (below {MATCH}), where least squares is exact"
    yield ours[n].compared(what, claim, ours[n].value, MATCH)


def compare_ridge(table: pd.DataFrame) -> Comparison:
    """Whether the transformer's predictions are nearer to those of least squares than to ridge regression's."""
    own, others = table[table["penalty"] == 0], table[table["penalty"] > 0]
    nearest = others.loc[others.groupby("seed")["distance"].idxmin()]
    ends = [-row.from_least_squares + side * N_ERRORS * row.standard_error for row in nearest.itertuples() for side in (-1, 1)]
    all_seeds = Measured((max(ends) + min(ends)) / 2, (max(ends) - min(ends)) / 2)
    found = ", ".join(f"{row.distance:.2g} at {row.penalty:g}" for row in nearest.itertuples())
    what = (
        "mean squared difference of the transformer's predictions from those of least squares, linear functions, largest of "
        f"the seeds (from ridge regression with the best of {others['penalty'].nunique()} penalties: {found})"
    )
    claim = "the transformer predicts as least squares does, rather than as ridge regression with any penalty"
    return all_seeds.compared(what, claim, float(own["distance"].max()), 0.0)


def compare_shifts(error: pd.DataFrame) -> Iterator[Comparison]:
    """Linear functions on other distributions, at the largest number of examples."""
    here = last(worst_of_seeds(error, "none", "transformer"))
    for shift, (claim, kind) in SHIFT_CLAIMS.items():
        there = last(worst_of_seeds(error, shift, "transformer"))
        what = f"relative error of the transformer with all examples, {shift} (in distribution {here.value:.2g})"
        found = degradation(here, there).compared(what, claim, there.value, MATCH, below=kind == "keeps")
        yield found.unless(too_little(here))


def degradation(here: Measured, there: Measured) -> Measured:
    """Compute by how much the error out of distribution exceeds `DEGRADES` times that in distribution."""
    return Measured(there.value - DEGRADES * here.value, there.margin + DEGRADES * here.margin)


def too_little(here: Measured) -> str | None:
    """Why a model with that error in distribution cannot show how it generalizes; None if it can."""
    if here.value <= LEARNED:
        return None
    return f"the transformer's relative error in distribution is {here.value:.2g}; at most {LEARNED:g} is required"


def compare_noise(error: pd.DataFrame) -> Comparison:
    """Linear functions with noise on the answers of the examples: whether some number of examples is harmful."""
    here = last(worst_of_seeds(error, "none", "transformer"))
    curve = worst_of_seeds(error, "noisy", "transformer")
    peak = max(curve, key=lambda n: curve[n].value)
    less = Measured(1 + MATCH - curve[peak].value, curve[peak].margin)
    falls = Measured(last(curve).value - curve[peak].value, last(curve).margin + curve[peak].margin)
    what = f"largest relative error of the transformer over all n, noisy (at n = {peak})"
    claim = (
        "noise on the answers: near n = d the error exceeds that without any example, as least squares' does (double descent)"
    )
    return worst([less, falls], 0.0).compared(what, claim, curve[peak].value, 0.0).unless(too_little(here))


def compare_classes(error: pd.DataFrame, why: Mapping[str, str | None]) -> Iterator[Comparison]:
    """The other classes, in distribution, at the largest number of examples; ``why``: of `still_learning`."""
    for functions, rows in error.groupby("functions", sort=False):
        ours = last(worst_of_seeds(rows, "none", "transformer"))
        best = {baseline: last(worst_of_seeds(rows, "none", baseline)) for baseline in BASELINES}
        baseline = min(best, key=lambda name: best[name].value)
        behind = Measured(ours.value - best[baseline].value, ours.margin + best[baseline].margin)
        known = f"best baseline: {baseline}, {best[baseline].value:.2g}"
        what = f"relative error of the transformer with all examples, {functions} ({known})"
        claim = "a transformer trained on a class learns its functions at least as well as methods that do not know the class"
        yield unless_it_holds(behind.compared(what, claim, ours.value, MATCH), why.get(str(functions)))


def compare_orders(table: pd.DataFrame) -> Iterator[Comparison]:
    """Compare which models are equivariant under permutations of their positions."""
    exact = table[table["dtype"] == "float64"]

    def of(attention_dir: str, positions: str) -> pd.DataFrame:
        return exact[(exact["attention_dir"] == attention_dir) & (exact["positions"] == positions)]

    plain = of("bidirectional", "none")
    what = "|T(pi X) - pi T(X)| / |T(X)| without positions and mask, float64, largest of all draws"
    rounding = float((plain["deviation"] / plain["rounding"]).max())
    claim = "the plain transformer is permutation equivariant"
    yield Comparison.at_most(what, claim, rounding, 1, shown=float(plain["deviation"].max()), paper=0.0)
    for attention_dir, positions, words in (
        ("bidirectional", "standard", "learned positions"),
        ("bidirectional", "sinusoidal", "sinusoidal positions"),
        ("causal", "none", "a causal mask and no positions"),
    ):
        rows = of(attention_dir, positions)
        what, least = f"the same with {words}, smallest of all draws", float(rows["deviation"].min())
        times, claim = float((rows["deviation"] / rows["rounding"]).min()), f"{words} make it depend on the order"
        yield Comparison.at_least(what, claim, times, 1000, shown=least)


def compare_lengths(table: pd.DataFrame) -> Iterator[Comparison]:
    """Prompts longer than in training."""
    learned = table[(table["positions"] == "standard") & (table["prompts"] == LONGER)]
    refused = learned.loc[~learned["in_training"], "relative_error"].isna()
    what = "share of prompts longer than in training that learned positions refuse"
    claim = "learned positions end where the table ends"
    yield Comparison.at_least(what, claim, float(refused.mean()), 1, paper=1.0)
    most = table.loc[table["in_training"], "n_examples"].max()

    def error(positions: str, prompts: str, n: int) -> Measured:
        where = (table["positions"] == positions) & (table["prompts"] == prompts) & (table["n_examples"] == n)
        row = table[where].iloc[0]
        return Measured(row["relative_error"], N_ERRORS * row["standard_error"] / row["zero_error"])

    longest = table["n_examples"].max()
    for positions, prompts, n, words, claim in (
        ("sinusoidal", LONGER, longest, "longest prompt", "sinusoidal positions have no limit, but the error grows beyond it"),
        ("index", LONGER, longest, "longest prompt", "an index 1, 2, 3 as position limits generalization to longer prompts"),
        ("index", RENUMBERED, most, "prompts of training, numbered as the end of longer ones", "because of indices never seen"),
        ("share", LONGER, most, "as many examples within longer prompts", "a share of the length means another thing in each"),
        ("share", LONGER, longest, "longest prompt", "a share of the length does not carry over to longer prompts"),
    ):
        here, there = error(positions, SHORT, most), error(positions, prompts, n)
        what = f"relative error, positions {positions}, {words} (in training {here.value:.2g})"
        grown = degradation(here, there).compared(what, claim, there.value, MATCH, below=False)
        yield grown.unless(too_little(here))


def differences(settings: Settings) -> list[str]:
    """The known differences from Garg et al. 2022."""
    task, model = settings["task"], settings["model"]
    return [
        f"The paper's model has 12 layers of width 256 and 8 heads, and is trained on 20 dimensions for 500,000 steps of 64 "
        f"prompts, with a curriculum; here {model['n_layers']} layers of width {model['d_model']}, {task['dimensions']} "
        f"dimensions, {settings['classes']['linear']['steps']} steps of {settings['training']['batch_size']}, no curriculum.",
        "Functions are scaled to variance 1 here, so that always predicting 0 has error 1 instead of the number of dimensions.",
        "The paper's baselines for sparse functions, trees and networks (Lasso, greedy tree learning and boosting, gradient "
        "descent on a network) are not among ours; least squares, ridge and nearest neighbors are.",
        "Trigonometric and exponential functions are not from the paper, but from DUAL sec. 5.",
        "A covariance proportional to 1 / i^2 is far more skewed in the paper's 20 dimensions than in few.",
        "At n = d, the mean error of least squares with noise, or on nonlinear functions, has no finite expectation: the "
        "number in the table depends on the prompts drawn, and the figure cuts it off.",
        "The verdicts on trained models are about the models trained here, with a margin for the noise of test prompts but not "
        "for the variation between trainings.",
        "T(pi X) = pi T(X) is a property of the architecture, measured on random weights, not on a trained model.",
    ]


# --- figure ---

COLORS = {"transformer": "#D55E00", "least squares": "#0072B2", "ridge": "#56B4E9", "nearest neighbors": "#9a8c5a"}
LOWEST = 3e-4
"""The lower end of the logarithmic axis of relative errors; least squares on linear functions continues down to rounding."""


def draw(error: pd.DataFrame) -> Figure:
    """Plot relative error against the number of examples: every class in distribution, then linear functions on others."""
    shown = error.assign(
        functions=error["functions"] + error["shift"].map(lambda shift: "" if shift == "none" else f", {shift}"),
        relative_error=error["relative_error"].clip(lower=LOWEST / 10),
    )
    title = "Error on new functions over that of always saying 0"
    figure = draw_panels(
        shown, "n_examples", "relative_error", by="predictor", panel="functions", title=title, colors=COLORS, log="y"
    )
    figure.axes[0].set_ylim(LOWEST, 3)
    return figure
