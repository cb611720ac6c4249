"""Whether a baseline has finished learning: gains computed by hand, and no verdict if it has not. Learning curves, and what is
read off them. Runs are kept by what they are: resumed, shared, trained by several processes, and told with the time left.
"""

import dataclasses
import math
import os

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from tiny_runs import course
from tiny_runs import runs as table_of

from kvlens.papers.dual import dual_variants
from kvlens.papers.harness import learned, plots
from kvlens.papers.harness.learned import (
    LATE,
    N_TUNING,
    Cell,
    Goal,
    RunQueue,
    TrainingRun,
    best_rates,
    keeping_runs,
    kept_table,
    train_all,
    train_cells,
    tuning_seeds,
)
from kvlens.papers.harness.significance import Comparison
from kvlens.tasks import InductionTask, make_task
from kvlens.training import NotFiniteError, TrainResult, checkpoint, score_heldout


def runs(model, *by_seed, y="loss"):
    """Held-out rows of a model; each seed's values at the steps 25, 50, 75, 100."""
    return pd.concat(
        [
            pd.DataFrame({"model": model, "seed": seed, "step": [25, 50, 75, 100], y: values})
            for seed, values in enumerate(by_seed)
        ],
        ignore_index=True,
    )


def test_gains_by_a_pencil():
    half, end = Goal(chance=2.0, best=1.0).gains(runs("a", [2.0, 1.8, 1.5, 1.2], [2.0, 1.6, 1.5, 1.4]))
    assert (half, end) == (pytest.approx(0.3), pytest.approx(0.7))
    half, end = Goal(chance=0.25, best=1.0, y="accuracy").gains(runs("a", [0.1, 0.25, 0.7, 1.0], y="accuracy"))
    assert (half, end) == (pytest.approx(0.0), pytest.approx(1.0))


def test_a_run_that_ended_early_keeps_its_last_value():
    course = runs("a", [1.0, 0.2, 0.2, 0.2], [0.9, 0.2, 0.2, 0.2])
    early = course[(course["seed"] == 0) | (course["step"] <= 50)]
    assert Goal(1.0).gains(early) == Goal(1.0).gains(course)


FLAT, FALLING, NOTHING = [0.5, 0.31, 0.3, 0.3], [0.9, 0.6, 0.45, 0.3], [1.3, 1.1, 1.05, 1.04]


@pytest.mark.parametrize(
    ("baseline", "other", "word"),
    [
        (FLAT, FLAT, None),
        (NOTHING, FLAT, "base has learned -4% of what there is"),
        (FALLING, FLAT, "base still improves: 43% of the gain"),
        (FLAT, FALLING, "other still improves: 43% of the gain"),
        (FLAT, [0.8, 0.6, 0.4, 0.2], None),  # ahead, and farther ahead if it went on
        (FLAT, NOTHING, "other still improves: all of the gain"),  # of its own gain, not of the baseline's
        (FLAT, [1.1, 1.05, 1.04, 1.04], None),  # flat and bad: worse, for all that is known
        (FLAT, [0.9, 0.7, 0.68, 0.62], "other still improves: 21% of the gain"),  # which is 11 % of the baseline's
        ([0.5, np.inf, np.inf, np.inf], FLAT, "base diverged"),
        (FLAT, [0.5, np.inf, np.inf, np.inf], None),
    ],
)
def test_the_baseline_must_have_learned_and_what_is_behind_be_flat(baseline, other, word):
    why = Goal(1.0).why_untrained(pd.concat([runs("base", baseline), runs("other", other)]), "base")
    assert why is None if word is None else why.startswith(word)


def test_how_late_is_late():
    goal, gain = Goal(1.0), 0.8
    for share, flat in ((LATE - 0.01, True), (LATE + 0.01, False)):
        rows = runs("a", [0.9, 1 - gain * (1 - share), 0.3, 1 - gain])
        assert (goal.why_not_flat(rows, "a") is None) is flat


def test_a_run_that_ended_early_because_it_had_learned_all_is_flat():
    rows = runs("a", [0.3, 0.4, 0.7, 0.99], y="accuracy")
    assert Goal(0.25, best=1.0, y="accuracy").why_untrained(rows, "a") is None
    almost = runs("a", [0.3, 0.4, 0.7, 0.95], y="accuracy")
    assert "still improves" in str(Goal(0.25, best=1.0, y="accuracy").why_untrained(almost, "a"))


def test_a_verdict_is_withheld_with_its_reason_and_a_statement_stays_one():
    told = Comparison.at_most("what", "claim", 1.0, 2.0)
    assert told.unless(None) is told and told.verdict == "holds"
    withheld = told.unless("too early")
    assert (withheld.holds, withheld.untrained, withheld.verdict) == (None, "too early", "not trained far enough")
    assert Comparison.tested_on("what", "claim", [1.0]).verdict == "inconclusive"
    stated = Comparison.stated("what", "claim", 1.0)
    assert stated.unless("too early") is stated and stated.verdict == "not tested"


def test_a_table_is_made_once_and_kept(tmp_path):
    made = []

    def make():
        made.append(1)
        return pd.DataFrame(dict(x=[len(made)]))

    assert kept_table(dict(a=1), make)["x"].tolist() == [1]  # outside of a block nothing is kept
    for _ in range(2):
        with keeping_runs(tmp_path):
            assert [kept_table(dict(a=a), make)["x"].tolist() for a in (1, 2)] == [[2], [3]]
    assert len(made) == 3


# --- the null ---


def dual_runs(plain, keys, n_seeds=8):
    """Courses of the linear task: errors over the variance, with a little noise for each seed."""
    generator = np.random.default_rng(1)
    return pd.concat(
        [
            runs(label, *(np.array(ends) * np.exp(generator.normal(0, 0.02, 4)) for _ in range(n_seeds))).assign(task="linear")
            for label, ends in ((dual_variants.PLAIN, plain), (dual_variants.AGAIN, plain), ("augmented keys, 2 layers", keys))
        ],
        ignore_index=True,
    )


@pytest.mark.parametrize(
    ("plain", "keys", "verdict"),
    [
        (FLAT, FLAT, "inconclusive"),  # equal arms
        (FLAT, [0.4, 0.155, 0.15, 0.15], "holds"),
        (FLAT, [0.9, 0.605, 0.6, 0.6], "does not hold"),
        (FLAT, [0.9, 0.8, 0.7, 0.6], "not trained far enough"),  # behind, and still improving
        (FLAT, [0.9, 0.3, 0.2, 0.1], "holds"),
        (NOTHING, [1.9, 1.75, 1.7, 1.7], "not trained far enough"),  # a large and certain difference of nothing
        (NOTHING, [0.5, 0.31, 0.3, 0.3], "not trained far enough"),
        (FALLING, [0.9, 0.4, 0.3, 0.2], "holds"),  # both fall, and their ratio stays
        (FALLING, [0.9, 0.3, 0.3, 0.2], "not trained far enough"),  # two thirds at the end, one half before
    ],
)
def test_arms_that_learned_nothing_are_not_compared_and_equal_ones_are_inconclusive(plain, keys, verdict):
    curves = dual_runs(plain, keys)
    (found,) = dual_variants.compare(dual_variants.differences(curves), dual_variants.untrained(curves))
    assert found.verdict == verdict


# --- rates ---

TASK = make_task("induction", vocab_size=11, length=13)
MODEL = dict(n_layers=1, d_model=12, d_head=6, attn_only=True)
TRAINING = dict(steps=4, eval_every=2, batch_size=4, eval_sequences=8)


def test_a_rate_is_chosen_on_seeds_that_are_not_compared():
    """1e-9 moves nothing and 1e18 breaks everything; what is chosen is what the compared runs then have."""
    told, training = [], {**TRAINING, "steps": 20}
    settings = dict(training=training, seeds=[0, 3], rates=[1e-9, 1e-2, 1e18])
    table = train_cells([Cell(TASK, {"m": MODEL})], settings, told.append)[0]
    assert any(text.startswith("m: learning rate 0.01 of ") for text in told)
    assert told[-1].endswith("; 8 of 8 runs")
    settings = dict(training={**training, "learning_rate": 1e-2}, seeds=[0, 3])
    alone = train_cells([Cell(TASK, {"m": MODEL})], settings, told.append)[0]
    pd.testing.assert_frame_equal(table.drop(columns="learning_rate"), alone)
    assert set(table["learning_rate"]) == {1e-2} and set(table["seed"]) == {0, 3} and N_TUNING == 2


def test_a_rate_is_as_good_as_the_best_evaluation_of_its_runs(monkeypatch):
    """Trained on `tuning_seeds`; a run that diverges counts as worst."""
    losses, seen = {0.1: [3.0, 1.0], 0.2: [1.5, 1.4], 0.3: None}, []

    def trained(trials):
        for trial in trials:
            seen.append((trial.training["learning_rate"], trial.seed))
            of_rate = losses[trial.training["learning_rate"]]
            metrics = pd.DataFrame(dict(split="heldout", step=[2, 4], loss=of_rate)) if of_rate else None
            record = NotFiniteError("x") if of_rate is None else TrainResult(metrics, metrics, 4, "steps", 0.0, 2, 1.0)
            yield trial, None, record

    monkeypatch.setattr("kvlens.papers.harness.learned.train_all", trained)
    told: list[str] = []
    cell = Cell(TASK, {"m": MODEL}, training=TRAINING, rates=[0.1, 0.2, 0.3], seeds=[0, 900_000])
    assert best_rates(cell, RunQueue([cell], told.append)) == {"m": 0.1}
    assert seen == [(rate, seed) for rate in losses for seed in (900_001, 900_002)]
    assert "; 6 of 8 runs, about " in told[-1]


def test_experiments_choose_rates_on_the_same_seeds():
    assert tuning_seeds(range(6)) == tuning_seeds([20, 30]) == [900_000, 900_001]


def test_the_only_rate_is_not_tried(monkeypatch):
    monkeypatch.setattr("kvlens.papers.harness.learned.train_all", pytest.fail)
    cell = Cell(TASK, {"m": MODEL}, training=TRAINING, rates=[0.5], seeds=[0])
    assert best_rates(cell, RunQueue([cell], [].append)) == {"m": 0.5}


TWO_MODELS = {
    "b": dict(n_layers=1, d_model=12, d_head=6, attn_only=True, kv_shift=True),
    "a": dict(n_layers=2, d_model=8, d_head=4, attn_only=True),
}
FIVE_STEPS = dict(steps=5, eval_every=3, batch_size=2, eval_sequences=7)
COLUMNS = ["model", "seed", "n_parameters", "step", "split", "loss", "accuracy"]


# --- training and comparing ---


@pytest.fixture(scope="module")
def trained():
    said, last_scores = [], {}

    def examine(label, seed, model):
        last_scores[label, seed] = (score_heldout(model, TASK, 7, seed=seed), model)
        return []

    table, _ = train_cells([Cell(TASK, TWO_MODELS, examine=examine)], dict(training=FIVE_STEPS, seeds=[0, 3]), said.append)
    return table, said, last_scores


def test_the_table_has_every_measurement_of_every_run(trained):
    table, said, _ = trained
    assert list(table.columns) == COLUMNS
    assert table.index.equals(pd.RangeIndex(len(table)))
    assert not table.isna().any(axis=None)
    assert list(table["model"].unique()) == ["b", "a"]
    for _, run in table.groupby(["model", "seed"]):
        assert run.loc[run["split"] == "train", "step"].tolist() == [1, 2, 3, 4, 5]
        assert run.loc[run["split"] == "heldout", "step"].tolist() == [3, 5]
    assert [text.split(":")[0] for text in said] == ["b, seed 0", "b, seed 3", "a, seed 0", "a, seed 3"]


def test_the_trained_model_is_the_one_examined(trained):
    """Training leaves a model with the weights of its best evaluation, and the table holds that evaluation."""
    table, _, last_scores = trained
    assert set(last_scores) == {(label, seed) for label in TWO_MODELS for seed in (0, 3)}
    for (label, seed), ((loss, _), model) in last_scores.items():
        rows = learned.of_heldout(table[(table["model"] == label) & (table["seed"] == seed)])
        assert loss == pytest.approx(rows["loss"].min(), rel=1e-5)  # float32 sums in batches of other sizes
        assert (rows["n_parameters"] == sum(p.numel() for p in model.parameters())).all()


def test_a_seed_decides_a_run_and_another_one_changes_it(trained):
    table, _, _ = trained
    again = train_cells([Cell(TASK, {"b": TWO_MODELS["b"]})], dict(training=FIVE_STEPS, seeds=[3]), lambda text: None)[0]
    first = table[(table["model"] == "b") & (table["seed"] == 3)].reset_index(drop=True)
    pd.testing.assert_frame_equal(again, first)
    other = table[(table["model"] == "b") & (table["seed"] == 0)]
    assert (other["loss"].to_numpy() != first["loss"].to_numpy()).all()  # the first loss, too: weights and batch differ


# --- reading curves ---


def test_steps_to_is_the_first_evaluation_that_is_good_enough_and_infinite_without_one():
    table = pd.concat(
        [course("b", 0, [0.1, 0.99, 0.5]), course("b", 1, [0.1, 0.98, 0.989]), course("a", 0, [1.0])], ignore_index=True
    )
    noise = table.assign(split="train", accuracy=1.0, step=1)  # rows of the training split must not count
    steps = learned.steps_to(pd.concat([noise, table], ignore_index=True), 0.99)
    expected = table_of(("b", 0, 20.0), ("b", 1, math.inf), ("a", 0, 10.0), columns=["model", "seed", "steps"])
    pd.testing.assert_frame_equal(steps, expected)


def test_the_last_heldout_row_of_each_run_in_the_tables_order():
    table = pd.concat([course("b", 0, [0.1, 0.2]), course("a", 0, [0.9, 0.3, 0.4])], ignore_index=True)
    table.loc[len(table)] = {**table.iloc[-1], "split": "train", "step": 99, "accuracy": 0.77}
    last = learned.last_heldout(table)
    assert last[["model", "step", "accuracy"]].to_numpy().tolist() == [["b", 20, 0.2], ["a", 30, 0.4]]


def test_a_run_that_stopped_early_keeps_its_last_value_in_the_mean():
    table = pd.concat([course("b", 0, [0.2, 1.0]), course("b", 1, [0.4, 0.6, 0.9, 0.7])], ignore_index=True)
    expected = table_of(
        (10, 0.3, 0.2, 0.4), (20, 0.8, 0.6, 1.0), (30, 0.95, 0.9, 1.0), (40, 0.85, 0.7, 1.0),
        columns=["step", "mean", "least", "largest"],
    )  # fmt: skip
    pd.testing.assert_frame_equal(learned.mean_course(table), expected)


def test_curves_are_drawn_in_the_tables_order_and_the_given_colors():
    table = pd.concat([course("b", 0, [0.2, 1.0]), course("a", 0, [0.5, 0.25])], ignore_index=True)
    figure = Figure()
    plots.draw_curves(figure.subplots(), table, colors={"a": "#010203"})
    drawn = figure.axes[0].get_lines()
    seeds, lines = ([line for line in drawn if (line.get_label() == "_seed") is thin] for thin in (True, False))
    assert [line.get_ydata().tolist() for line in seeds] == [[0.2, 1.0], [0.5, 0.25]]
    assert [line.get_label() for line in lines] == ["b", "a"]
    assert lines[1].get_ydata().tolist() == [0.5, 0.25]
    assert matplotlib.colors.to_hex(lines[1].get_color()) == "#010203"
    assert matplotlib.colors.to_hex(lines[0].get_color()) == plots.PALETTE[0].lower()


def test_panels_share_one_legend_and_mark_their_lines():
    table = pd.concat(
        [course(m, 0, [0.2, 1.0]).assign(kind=kind, chance=c) for kind, c in (("x_1", 0.1), ("y", 0.3)) for m in "ab"]
    )
    figure = plots.draw_panels(table, "step", panel="kind", title="t", lines={"goal": 0.9}, log="x", ticks=True)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["kind: x 1", "kind: y"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b", "goal", "chance"]
    drawn = [{line.get_label(): line.get_ydata()[0] for line in axes.get_lines()} for axes in figure.axes]
    assert [(found["goal"], found["chance"]) for found in drawn] == [(0.9, 0.1), (0.9, 0.3)]
    assert [text.get_text() for text in figure.axes[1].get_xticklabels()] == ["10", "20"]


def test_dots_are_rows_and_intervals_are_bands():
    table = course("b", 0, [0.2, 1.0]).assign(low=0.1, high=1.1)
    (dots,) = plots.draw_panels(table, "step", dots=True).axes[0].get_lines()
    assert (dots.get_linestyle(), dots.get_ydata().tolist()) == ("None", [0.2, 1.0])
    assert len(plots.draw_panels(table, "step").axes[0].collections) == 1


SIX_STEPS = dict(steps=6, eval_every=2, batch_size=4, eval_sequences=8, learning_rate=1e-2, seed=3)
TRIAL = TrainingRun(TASK, "m", MODEL, SIX_STEPS)


class Killed(Exception):
    """A stand-in for anything that ends a process."""


def count_batches(monkeypatch):
    """One entry for each training batch that is drawn."""
    drawn, whole = [], InductionTask.sample

    def sample(self, batch_size, generator, split="train"):
        drawn.extend([split] if split == "train" else [])
        return whole(self, batch_size, generator, split)

    monkeypatch.setattr(InductionTask, "sample", sample)
    return drawn


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_kept_run_is_read_and_one_that_differs_in_anything_is_trained(tmp_path, monkeypatch):
    drawn = count_batches(monkeypatch)
    alone, record = TRIAL.train()
    with keeping_runs(tmp_path):
        first, _ = TRIAL.train()
        assert len(drawn) == 12
        again, kept = dataclasses.replace(TRIAL, label="another name").train()
        assert len(drawn) == 12
        assert torch.equal(weights(again), weights(first)) and torch.equal(weights(again), weights(alone))
        pd.testing.assert_frame_equal(kept.metrics, record.metrics)
        for change in (
            dict(task=make_task("induction", vocab_size=12, length=13)),
            dict(model={**MODEL, "kv_shift": True}),
            dict(training={**SIX_STEPS, "seed": 4}),
            dict(training={**SIX_STEPS, "learning_rate": 2e-2}),
        ):
            before = len(drawn)
            dataclasses.replace(TRIAL, **change).train()
            assert len(drawn) == before + 6
        monkeypatch.setattr(checkpoint, "ARITHMETIC", checkpoint.ARITHMETIC + 1)
        before = len(drawn)
        TRIAL.train()
        assert len(drawn) == before + 6
    assert len(os.listdir(tmp_path)) == 6
    assert dataclasses.replace(TRIAL).train()[1].steps == 6 and len(os.listdir(tmp_path)) == 6  # nothing is kept outside


def test_an_experiment_that_was_killed_resumes_to_the_same_table(tmp_path, monkeypatch):
    """Killed in its first run and, on the second try, in its third."""
    models = {"a": MODEL, "b": {**MODEL, "kv_shift": True}}
    cells, settings = [Cell(TASK, models)], dict(training=SIX_STEPS, seeds=[0, 1])
    whole = train_cells(cells, settings, lambda text: None)[0]
    original, drawn = InductionTask.sample, []

    def sample(self, batch_size, generator, split="train"):
        drawn.append(split)
        if split == "train" and drawn.count("train") in (4, 4 + 4 + 6 + 4):
            raise Killed
        return original(self, batch_size, generator, split)

    monkeypatch.setattr(InductionTask, "sample", sample)
    with keeping_runs(tmp_path):
        for _ in range(2):
            with pytest.raises(Killed):
                train_cells(cells, settings, lambda text: None)
        told = []
        again = train_cells(cells, settings, told.append)[0]
    pd.testing.assert_frame_equal(again, whole)
    assert drawn.count("train") == 4 * 6 + 2 * 2  # steps 3 and 4 are drawn again, since the last checkpoint is of step 2
    assert [text.split("; ")[1].partition(",")[0] for text in told] == [f"{n} of 4 runs" for n in (1, 2, 3, 4)]


@pytest.mark.slow
def test_several_processes_train_the_same(tmp_path, monkeypatch):
    """One of the runs diverges, which must stop neither the others nor the pool."""
    runs = [TRIAL, *(dataclasses.replace(TRIAL, training={**SIX_STEPS, "seed": s, "learning_rate": r}) for s, r in [(7, 1e30)])]
    alone = list(train_all(runs))
    with keeping_runs(tmp_path, jobs=2):
        drawn = count_batches(monkeypatch)
        found = list(train_all(runs))
    assert len(drawn) <= 6  # the run that diverges, from its last checkpoint; the other is read
    for (_, ours, record), (_, theirs, expected) in zip(found, alone, strict=True):
        assert isinstance(record, NotFiniteError) is isinstance(expected, NotFiniteError)
        torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-6)  # another number of threads
    assert [isinstance(record, NotFiniteError) for _, _, record in found] == [False, True]


def test_the_time_left_is_that_of_the_steps_left():
    told = []
    cell = Cell(TASK, {"a": MODEL, "b": MODEL}, training={**SIX_STEPS, "steps": 100}, seeds=[0, 1])
    progress = RunQueue([cell], told.append)
    assert (progress.n_runs, progress.n_steps) == (4, 400)
    progress.runs, progress.steps, progress.seconds = 1, 100, 60.0
    progress.tell("one")
    progress.runs, progress.steps, progress.seconds = 2, 200, 240.0
    progress.tell("two")
    assert told == ["one; 1 of 4 runs, about 3 minutes left", "two; 2 of 4 runs, about 4 minutes left"]


EXPECTED = [1.73617, 1.70831]
"""Held-out losses after six steps."""


def test_training_still_computes_what_kept_runs_were_trained_with():
    """If this fails beyond rounding, kept runs no longer are what their names say: raise `checkpoint.ARITHMETIC`."""
    task = make_task("bigrams", n_letters=7, n_triggers=2, length=16)
    softmax, linear = (
        TrainingRun(task, "m", dict(n_layers=2, d_model=12, d_head=6, kv_shift=True, **kind), SIX_STEPS).finished()[1]
        for kind in ({}, dict(attention="linear", feature_map="elu_plus_one"))
    )
    assert checkpoint.ARITHMETIC == 1
    # six steps of float32: relative errors of 1e-6 grow at most tenfold a step under Adam's sign-like first updates
    assert [softmax.heldout["loss"].iloc[-1], linear.heldout["loss"].iloc[-1]] == pytest.approx(EXPECTED, rel=1e-3)
