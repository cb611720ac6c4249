"""Which folders may be written: one rule for a model, a report, an outcome and a run; other files are never deleted."""

import json
import os
import threading
from functools import cache
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tiny_runs import run
from tiny_text_model import PROMPT, TEXT, tiny_text_model

from kvlens import KVLensError, explain
from kvlens.files import FolderKind, check_folder, list_files, listed_in, write_folder
from kvlens.model.storage import check_model_folder
from kvlens.papers import find_experiment
from kvlens.papers.harness.run import Reproduction, write_experiment
from kvlens.report import build_report, write_report
from kvlens.report.page import write_explanation


@cache
def report():
    return build_report(tiny_text_model(), PROMPT, TEXT, model_name="t", new_tokens=1)


def outcome(folder: Path, overwrite: bool) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2])
    write_experiment(Reproduction({}, lambda: figure, []), find_experiment("hops"), "tiny", 1.0, folder, overwrite=overwrite)


@cache
def explained():
    return explain(tiny_text_model(), PROMPT, TEXT)


def explanation(folder: Path, overwrite: bool, found=None) -> None:
    write_explanation(found or explained(), folder, model=tiny_text_model(), model_name="t", overwrite=overwrite)


REPLACED = {
    "a kvlens model": lambda folder, overwrite: tiny_text_model().save(folder, overwrite=overwrite),
    "a kvlens report": lambda folder, overwrite: write_report(report(), folder, overwrite=overwrite),
    "an experiment": outcome,
    "an explanation": explanation,
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


def test_an_explanation_leaves_nothing_half_written(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    whole = explained()
    explanation(folder, False, whole)
    assert {"claims.parquet", "statements.parquet", "explanation.html"} < set(os.listdir(folder))
    before = contents(folder)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(KVLensError, match="No space left on device"):
        patch.setattr("kvlens.report.page.table_bytes", full)
        explanation(folder, True)
    assert contents(folder) == before and os.listdir(tmp_path) == ["x"]
    (folder / "units.parquet").unlink()
    (folder / "units.parquet").symlink_to(tmp_path / "theirs")
    (tmp_path / "theirs").write_text("theirs")
    explanation(folder, True)
    assert (tmp_path / "theirs").read_text() == "theirs" and not (folder / "units.parquet").is_symlink()


def test_equal_outcomes_are_equal_files(tmp_path):
    for name in "ab":
        outcome(tmp_path / name, False)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") and "figure.svg" in contents(tmp_path / "a")
