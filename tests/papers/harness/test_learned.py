"""Whether a baseline has finished learning: gains computed by hand, and no verdict if it has not."""

import numpy as np
import pandas as pd
import pytest

from kvlens.papers.dual import dual_variants
from kvlens.papers.harness.learned import (
    LATE,
    N_TUNING,
    Cell,
    Goal,
    RunQueue,
    best_rates,
    keeping_runs,
    kept_table,
    train_cells,
    tuning_seeds,
)
from kvlens.papers.harness.significance import Comparison
from kvlens.tasks import make_task
from kvlens.training import NotFiniteError, TrainResult


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
    told = Comparison("what", "claim", 1.0, True)
    assert told.unless(None) is told and told.verdict == "holds"
    withheld = told.unless("too early")
    assert (withheld.holds, withheld.untrained, withheld.verdict) == (None, "too early", "not trained far enough")
    assert Comparison("what", "claim", 1.0, None).verdict == "inconclusive"
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
