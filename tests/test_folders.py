"""Which folders may be written: one rule for a model, an outcome and a run; other files are never deleted."""

import json
import os
import threading
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tiny_runs import run
from tiny_text_model import tiny_text_model

from kvlens import KVLensError
from kvlens.files import FolderKind, atomic, check_folder, list_files, listed_in, write_folder
from kvlens.model.storage import check_model_folder
from kvlens.papers import find_experiment
from kvlens.papers.harness.run import EXPERIMENT_FOLDER, Reproduction, write_experiment


def outcome(folder: Path, overwrite: bool) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    write_experiment(Reproduction({}, lambda: figure, []), find_experiment("hops"), "tiny", 1.0, folder, overwrite=overwrite)


REPLACED = {
    "a kvlens model": lambda folder, overwrite: tiny_text_model().save(folder, overwrite=overwrite),
    "an experiment": outcome,
}
WRITTEN = {**REPLACED, "a run with a checkpoint": lambda folder, overwrite: run(folder=folder, steps=2, restart=overwrite)}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_folder_of_other_things_is_left_alone(name, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("[1]")
    for overwrite in (False, True):
        with pytest.raises(KVLensError, match=f"mine is not empty and not {name}, so it is left alone; choose another folder"):
            WRITTEN[name](tmp_path / "mine", overwrite)
        with pytest.raises(KVLensError, match=r"config.json is a file, not a folder; choose another folder"):
            WRITTEN[name](tmp_path / "mine" / "config.json", overwrite)
    assert contents(tmp_path) == {"mine/config.json": b"[1]"} and os.listdir(tmp_path) == ["mine"]


@pytest.mark.parametrize("name", REPLACED)
def test_one_of_the_kind_is_replaced_when_asked(name, tmp_path):
    REPLACED[name](tmp_path / "x", False)
    before = contents(tmp_path)
    with pytest.raises(KVLensError, match=f"already holds {name}; pass .*overwrite.* to replace it"):
        REPLACED[name](tmp_path / "x", False)
    assert contents(tmp_path) == before
    REPLACED[name](tmp_path / "x", True)
    assert contents(tmp_path).keys() == before.keys()


@pytest.mark.parametrize("name", REPLACED)
def test_other_files_are_never_deleted(name, tmp_path):
    REPLACED[name](tmp_path / "x", False)
    (tmp_path / "x" / "notes").mkdir()
    (tmp_path / "x" / "notes" / "mine.md").write_text("thoughts")
    before = contents(tmp_path)
    with pytest.raises(KVLensError, match=rf"not part of {name} \(notes/mine.md\); move them away first"):
        REPLACED[name](tmp_path / "x", True)
    assert contents(tmp_path) == before


def test_a_run_is_resumed_next_to_other_files(tmp_path):
    run(folder=tmp_path / "r", steps=2)
    (tmp_path / "r" / "mine.md").write_text("thoughts")
    run(folder=tmp_path / "r", steps=2)
    run(folder=tmp_path / "r", steps=3, restart=True)
    assert (tmp_path / "r" / "mine.md").read_text() == "thoughts"


def test_a_trained_model_folder_may_have_its_card_and_listed_files_only(tmp_path):
    tiny_text_model().save(tmp_path / "m")
    for name in ("MODEL_CARD.md", "training.json"):
        (tmp_path / "m" / name).write_text("{}")
    with pytest.raises(KVLensError, match=r"not part of a kvlens model \(training.json\)"):
        check_model_folder(tmp_path / "m", overwrite=True)
    list_files(tmp_path / "m", ["training.json"])
    check_model_folder(tmp_path / "m", overwrite=True)


@pytest.mark.parametrize("manifest", ['{"format": "other"}', "[1]", "no json", '{"format": "k", "files": 3}', "[" * 100_000])
def test_an_invalid_manifest_lists_no_files(manifest, tmp_path):
    (tmp_path / "m.json").write_text(manifest)
    assert listed_in("m.json", "k", "files")(tmp_path) is None
    (tmp_path / "m.json").write_text(json.dumps({"format": "k", "files": {"a": "1"}, "more": ["b"]}))
    assert listed_in("m.json", "k", "files", "more", "none")(tmp_path) == {"m.json", "a", "b"}


def test_many_other_files_are_named_in_part(tmp_path):
    for name in "abcd":
        (tmp_path / name).touch()
    with pytest.raises(KVLensError, match=r"\(a, b, c, \.\.\.\); move"):
        check_folder(tmp_path, FolderKind("a box", lambda folder: set()), overwrite=True)


def test_of_many_writers_that_may_not_replace_each_other_one_succeeds(tmp_path):
    """All find the folder free, and then write one after the other: each looks again when its turn comes."""
    kind, n = FolderKind("a box", listed_in("m.json", "k", "files")), 6
    ready, refused = threading.Barrier(n), []

    def write(which: int) -> None:
        def fill(new: Path) -> None:
            (new / "m.json").write_text(json.dumps({"format": "k", "files": [str(which)]}))
            (new / str(which)).touch()

        ready.wait()
        try:
            write_folder(tmp_path / "x", fill, kind)
        except KVLensError as error:
            refused.append(str(error))

    writers = [threading.Thread(target=write, args=[i]) for i in range(n)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(refused) == n - 1 and all("already holds a box" in words for words in refused)
    assert len(os.listdir(tmp_path / "x")) == 2 and os.listdir(tmp_path) == ["x"]


def test_what_cannot_be_written_leaves_the_old_outcome_and_a_link_is_replaced_by_a_file(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    outcome(folder, False)
    before = contents(folder)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    for overwrite in (False, True):
        with monkeypatch.context() as patch, pytest.raises(KVLensError, match=r"already holds|No space left on device"):
            patch.setattr("pathlib.Path.write_text", full)
            outcome(folder, overwrite)
    assert contents(folder) == before and os.listdir(tmp_path) == ["x"]
    (folder / "summary.json").rename(tmp_path / "theirs")
    (folder / "summary.json").symlink_to(tmp_path / "theirs")
    outcome(folder, True)
    assert (tmp_path / "theirs").read_bytes() == before["summary.json"] and not (folder / "summary.json").is_symlink()


def test_an_empty_folder_and_a_link_to_one_of_the_kind_are_used(tmp_path):
    (tmp_path / "x").mkdir()
    outcome(tmp_path / "x", False)
    (tmp_path / "link").symlink_to("x")
    outcome(tmp_path / "link", True)
    assert (tmp_path / "link").is_symlink() and "summary.json" in os.listdir(tmp_path / "x")


def test_a_path_that_is_not_writable(tmp_path, monkeypatch):
    def refuse(*args, **how):
        raise PermissionError(13, "Permission denied", "secret-temporary-name")

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)  # file modes do not stop root, which runs many a container
    with pytest.raises(KVLensError, match="Permission denied; choose another folder"):
        check_folder(tmp_path / "a" / "r", EXPERIMENT_FOLDER)
    assert os.listdir(tmp_path) == []


def test_the_old_folder_is_restored_when_the_new_one_cannot_replace_it(tmp_path, monkeypatch):
    outcome(tmp_path / "x", False)
    before, rename, n_calls = contents(tmp_path), Path.rename, 0

    def fail_at_the_second(self, target):
        nonlocal n_calls
        n_calls += 1
        if n_calls == 2:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(atomic, "_swapped", lambda a, b: False)  # a system that swaps folders in one step has no second
    monkeypatch.setattr(Path, "rename", fail_at_the_second)
    with pytest.raises(KVLensError, match="Input/output error"):
        outcome(tmp_path / "x", True)
    assert n_calls == 3 and contents(tmp_path) == before


def test_equal_outcomes_are_equal_files(tmp_path):
    for name in "ab":
        outcome(tmp_path / name, False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") and "figure.svg" in contents(tmp_path / "a")
