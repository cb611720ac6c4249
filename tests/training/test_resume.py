"""A run on disk: it resumes where it was, with the same result, and files of others are not touched."""

import contextlib
import os
import signal
import time
from dataclasses import replace
from time import perf_counter

import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, load_file, save_file
from tiny_runs import run, tiny_model, weights

from kvlens import KVLensError
from kvlens.cli import main
from kvlens.files import atomic
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.tasks import InductionTask, make_task
from kvlens.training import checkpoint, find_recipe, train_recipe
from kvlens.training.checkpoint import only_run_in


class Killed(Exception):
    """A stand-in for anything that ends a process."""


def killed_at(monkeypatch, call: int) -> None:
    """The ``call``-th training batch from now on does not come."""
    calls = []

    def sample(self, batch_size, generator, split="train", original=InductionTask.sample):
        calls.append(split)
        if calls.count("train") == call:
            raise Killed
        return original(self, batch_size, generator, split)

    monkeypatch.setattr(InductionTask, "sample", sample)


@pytest.fixture(scope="module")
def uninterrupted():
    model = tiny_model()
    return model, run(model, watch="shift_coef")


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kills=st.lists(st.integers(1, 11), min_size=1, max_size=4))
def test_kills_at_any_step_change_nothing(kills, uninterrupted, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "r"
    for call in kills:
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, call)
            with contextlib.suppress(Killed):
                run(watch="shift_coef", folder=folder)
    model = tiny_model()
    result = run(model, watch="shift_coef", folder=folder)
    expected_model, expected = uninterrupted
    pd.testing.assert_frame_equal(result.metrics, expected.metrics)
    pd.testing.assert_frame_equal(result.watched, expected.watched)
    assert torch.equal(weights(model), weights(expected_model))
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "metrics.parquet"), expected.metrics)


def test_kill_9_of_the_command_changes_no_metric(tmp_path):
    command = ["train", "induction", "--device", "cpu", "--task", "vocab_size=13", "length=9"]
    command += ["--model", "n_layers=1", "d_model=12", "d_head=6", "attn_only=true", "kv_shift=true"]
    command += ["--set", "steps=40", "batch_size=4", "eval_every=4", "eval_sequences=5"]
    child = os.fork()
    if child == 0:
        try:
            main([*command, "--out", str(tmp_path / "a")])
        finally:
            os._exit(1)  # too late to be killed
    checkpoint = tmp_path / "a" / "checkpoint.safetensors"
    while not checkpoint.exists():
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    for name in ("a", "b"):
        assert main([*command, "--out", str(tmp_path / name)]) == 0
    a, b = (pd.read_parquet(tmp_path / name / "metrics.parquet") for name in ("a", "b"))
    pd.testing.assert_frame_equal(a, b)
    a, b = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("a", "b"))
    assert all(torch.equal(a[name], b[name]) for name in b)


def test_a_best_loss_of_0_is_kept(tmp_path, monkeypatch):
    """Evaluations after 4, 8 and 12 steps have losses of 0, 1 and 1; the run ends after the second, and goes on."""
    losses = iter([0.0, 1.0, 1.0])
    monkeypatch.setattr("kvlens.training.run.score_in_parts", lambda *_: torch.tensor([next(losses), 1.0, 1.0]))
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(patch, 11)
        run(folder=tmp_path / "r")
    result = run(folder=tmp_path / "r")
    assert (result.best_loss, result.best_step) == (0.0, 4)


def test_a_finished_run_is_returned_and_not_trained_again(tmp_path, uninterrupted, monkeypatch):
    run(folder=tmp_path / "r")
    before = (tmp_path / "r" / "checkpoint.safetensors").stat().st_mtime_ns
    killed_at(monkeypatch, 1)
    model = tiny_model()
    result = run(model, folder=tmp_path / "r")
    assert result.stopped_by == "steps"
    assert torch.equal(weights(model), weights(uninterrupted[0]))
    assert (tmp_path / "r" / "checkpoint.safetensors").stat().st_mtime_ns == before


class OtherData(InductionTask):
    """With equal settings."""

    def data_hash(self) -> str:
        return "other"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda folder: run(folder=folder, learning_rate=1e-4), "setting learning_rate was 0.005 there and is 0.0001 now"),
        (lambda folder: run(tiny_model(d_model=18), folder=folder), "model d_m"),
        (lambda folder: run(tiny_model(), InductionTask(vocab_size=12, length=9), folder=folder), "task vocab_size was 13"),
        (lambda folder: run(tiny_model(), OtherData(vocab_size=13, length=9), folder=folder), "task data was None there"),
    ],
)
def test_another_run_is_refused_and_left_alone(other, message, tmp_path):
    run(folder=tmp_path / "r")
    before = (tmp_path / "r" / "checkpoint.safetensors").read_bytes()
    with pytest.raises(KVLensError, match=message):
        other(tmp_path / "r")
    assert (tmp_path / "r" / "checkpoint.safetensors").read_bytes() == before
    assert run(folder=tmp_path / "r", learning_rate=1e-4, restart=True).steps == 12


@pytest.mark.parametrize("size", [0, 5, 200, -10])
def test_a_damaged_checkpoint_is_named(size, tmp_path):
    run(folder=tmp_path / "r")
    path = tmp_path / "r" / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(KVLensError, match="checkpoint.*(damaged|truncated).*ask for a restart"):
        run(folder=tmp_path / "r")
    assert path.exists()


@pytest.mark.parametrize(
    "change",
    [
        dict(identity="[" * 100_000),
        dict(progress='{"step": ' + "9" * 5000 + "}"),
        dict(watched_steps="null"),
        dict(identity="[]"),
        dict(identity='{"task": 3}'),
        dict(format_version="9" * 5000),
    ],
    ids=["deep", "long", "no_steps", "no_identity", "no_task", "version"],
)
def test_a_forged_header_with_a_right_checksum_is_damage(change, tmp_path):
    run(folder=tmp_path / "r")
    path = tmp_path / "r" / "checkpoint.safetensors"
    tensors, header = read_checked_tensors(path, "test", checkpoint.FORMAT, checkpoint.FORMAT_VERSION)
    path.write_bytes(checked_tensor_bytes(tensors, {**header, **change}))
    with pytest.raises(KVLensError, match="damaged.*ask for a restart"):
        run(folder=tmp_path / "r")


def test_a_pipe_for_a_checkpoint_is_not_waited_for(tmp_path):
    (tmp_path / "r").mkdir()
    os.mkfifo(tmp_path / "r" / "checkpoint.safetensors")
    with pytest.raises(KVLensError):
        run(folder=tmp_path / "r")


def test_foreign_folders_are_left_alone_and_one_of_leftovers_is_free(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(KVLensError, match="not empty and not a run with a checkpoint"):
        run(folder=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    with pytest.raises(KVLensError, match="is a file"):
        run(folder=tmp_path / "notes.txt")
    (tmp_path / "other").mkdir()
    save_file({"x": torch.zeros(2)}, tmp_path / "other" / "checkpoint.safetensors")
    with pytest.raises(KVLensError, match="was not saved by kvlens as kvlens.training"):
        run(folder=tmp_path / "other")
    (tmp_path / "dead").mkdir()
    (tmp_path / "dead" / ".checkpoint.safetensors.kvlens-new").write_bytes(b"half")
    run(folder=tmp_path / "dead")


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path, uninterrupted, monkeypatch):
    writes = []

    def full(*args, original=os.fsync):
        writes.append(1)
        if len(writes) > 3:  # the first checkpoint, its seconds and its table
            raise OSError(28, "No space left on device")
        return original(*args)

    monkeypatch.setattr(atomic.os, "fsync", full)
    with pytest.raises(KVLensError, match="No space left on device"):
        run(folder=tmp_path / "r")
    files = ["checkpoint.safetensors", "metrics.parquet", "seconds.json"]
    assert sorted(path.name for path in (tmp_path / "r").glob("[!.]*")) == files
    monkeypatch.undo()
    model = tiny_model()
    run(model, folder=tmp_path / "r")
    assert torch.equal(weights(model), weights(uninterrupted[0]))


def test_a_second_run_in_a_folder_is_refused_and_a_dead_ones_leftovers_are_cleared(tmp_path):
    folder = tmp_path / "run"
    run(folder=folder)
    for name in (".checkpoint.safetensors.kvlens-new", ".metrics.parquet.kvlens-new", ".model.kvlens-lock"):
        (folder / name).write_bytes(b"half")
    (folder / ".model.kvlens-new" / "model").mkdir(parents=True)
    with only_run_in(folder):
        assert sorted(p.name for p in folder.iterdir()) == [
            ".lock",
            "checkpoint.safetensors",
            "metrics.parquet",
            "seconds.json",
        ]
        with pytest.raises(KVLensError, match=r"another process is training in .*run; wait for it"):
            run(folder=folder)
    run(folder=folder)  # the lock went with its holder


def test_a_run_from_before_a_setting_existed_resumes_if_the_setting_changes_nothing(tmp_path, monkeypatch):
    run(folder=tmp_path / "run", steps=3)
    known = checkpoint.identity

    def without(run, part, name):
        found = known(run)
        return {**found, part: {key: value for key, value in found[part].items() if key != name}}

    for part, name in (("task", "law"), ("setting", "watch"), ("model", "linear_attention_form")):
        folder = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "identity", lambda run, part=part, name=name: without(run, part, name))
            run(folder=folder, steps=3)
        run(folder=folder, steps=3)
        with pytest.raises(KVLensError, match="holds another run"):
            run(folder=folder, steps=4)
    other = make_task("induction", vocab_size=13, length=9, law="both")
    with pytest.raises(KVLensError, match="task law was None there and is 'both' now"):
        run(task=other, folder=tmp_path / "law", steps=3)


OFTEN = dict(steps=4, batch_size=3, eval_every=2, eval_sequences=3, checkpoint_every=1)
LINEAR = dict(hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
HYBRID = LINEAR | {
    f"linear_{name}": n for name, n in dict(num_key_heads=2, num_value_heads=2, key_head_dim=8, value_head_dim=8).items()
}
RECIPES = {
    "induction": replace(
        find_recipe("induction"),
        task_settings=dict(vocab_size=13, length=9),
        model=dict(n_layers=1, d_model=12, d_head=6, attn_only=True, kv_shift={}),
        training={**OFTEN, "watch": "shift_coef"},
    ),
    "facts-hybrid": replace(
        find_recipe("facts-hybrid"), model=find_recipe("facts-hybrid").model | HYBRID, training={**OFTEN, "batch_size": 2}
    ),
}


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", RECIPES)
def test_two_runs_of_equal_settings_leave_equal_bytes(name, tmp_path, monkeypatch):
    monkeypatch.setattr("kvlens.training.ship.MEASURED_SEQUENCES", 4)
    monkeypatch.setattr("kvlens.tasks.facts.MEASURED_STORIES", 2)
    spent, held = [], []
    for pace, folder in ((1, tmp_path / "a"), (1000, tmp_path / "b")):
        monkeypatch.setattr("kvlens.training.run.perf_counter", lambda pace=pace: pace * perf_counter())
        torch.manual_seed(pace)  # which no run draws from
        spent.append(train_recipe(RECIPES[name], folder, device="cpu", progress=False)["seconds"])
        held.append(contents(folder))
    assert spent[1] > 30 * spent[0] > 0
    times = [files.pop("seconds.json", None) for files in held]
    assert held[0] == held[1] and "model/training.json" in held[0]
    assert times == [None, None] or times[0] != times[1]


def test_the_time_of_a_run_survives_a_resumption(tmp_path, monkeypatch):
    monkeypatch.setattr("kvlens.training.ship.MEASURED_SEQUENCES", 4)
    first = train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)["seconds"]
    (tmp_path / "r" / "seconds.json").write_text("5000.5\n")
    again = train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)["seconds"]
    assert 0 < first < 5000.5 < again
    (tmp_path / "r" / "seconds.json").write_text("-1")
    with pytest.raises(KVLensError, match=r"seconds.json must be at least 0, got -1"):
        train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)
    (tmp_path / "r" / "seconds.json").unlink()
    assert train_recipe(RECIPES["induction"], tmp_path / "r", device="cpu", progress=False)["seconds"] < 5000


def test_equal_tensors_and_metadata_are_equal_bytes():
    metadata = {f"{letter}\n{n}é": "x" * n for n, letter in enumerate("hgfedcba")}
    tensors = {"b": torch.arange(3, dtype=torch.int8), "a": torch.ones(2, 5)}
    turned = [dict(reversed(entries.items())) for entries in (tensors, metadata)]
    one, other = checked_tensor_bytes(tensors, metadata), checked_tensor_bytes(*turned)
    assert one == other
    assert torch.equal(load(one)["a"], tensors["a"]) and torch.equal(load(one)["b"], tensors["b"])
