"""Runs are kept by what they are: resumed, shared, trained by several processes, and told with the time left."""

import dataclasses
import os

import pandas as pd
import pytest
import torch

from kvlens.papers.harness.learned import Cell, RunQueue, TrainingRun, keeping_runs, train_all, train_cells
from kvlens.tasks import InductionTask, make_task
from kvlens.training import NotFiniteError, checkpoint

TASK = make_task("induction", vocab_size=11, length=13)
MODEL = dict(n_layers=1, d_model=12, d_head=6, attn_only=True)
TRAINING = dict(steps=6, eval_every=2, batch_size=4, eval_sequences=8, learning_rate=1e-2, seed=3)
TRIAL = TrainingRun(TASK, "m", MODEL, TRAINING)


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
            dict(training={**TRAINING, "seed": 4}),
            dict(training={**TRAINING, "learning_rate": 2e-2}),
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
    cells, settings = [Cell(TASK, models)], dict(training=TRAINING, seeds=[0, 1])
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
    runs = [TRIAL, *(dataclasses.replace(TRIAL, training={**TRAINING, "seed": s, "learning_rate": r}) for s, r in [(7, 1e30)])]
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
    cell = Cell(TASK, {"a": MODEL, "b": MODEL}, training={**TRAINING, "steps": 100}, seeds=[0, 1])
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
        TrainingRun(task, "m", dict(n_layers=2, d_model=12, d_head=6, kv_shift=True, **kind), TRAINING).finished()[1]
        for kind in ({}, dict(attention="linear", feature_map="elu_plus_one"))
    )
    assert checkpoint.ARITHMETIC == 1
    # six steps of float32: relative errors of 1e-6 grow at most tenfold a step under Adam's sign-like first updates
    assert [softmax.heldout["loss"].iloc[-1], linear.heldout["loss"].iloc[-1]] == pytest.approx(EXPECTED, rel=1e-3)
