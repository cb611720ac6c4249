"""Atomic writes: many writers at once, leftovers of dead ones, and deliberate obstacles."""

import os
import threading
from pathlib import Path

import pytest

from kvlens import KVLensError
from kvlens.files import check_writable, clear_leftovers, lock, write_atomically, write_folder


def test_concurrent_writers_of_one_file_and_folder_leave_one_complete_result(tmp_path):
    failed, done, size = [], threading.Event(), 100_000

    def write(which: int) -> None:
        try:
            for _ in range(4):
                write_atomically(tmp_path / "file", bytes([which]) * size)
                write_folder(tmp_path / "folder", lambda new: [(new / name).write_text(str(which)) for name in "abc"])
        except BaseException as error:
            failed.append(error)

    def read() -> None:
        while not done.is_set():
            content = (tmp_path / "file").read_bytes()
            if len(content) != size or len(set(content)) != 1:
                failed.append(content)

    write(9)
    reader, writers = threading.Thread(target=read), [threading.Thread(target=write, args=[i]) for i in range(4)]
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    reader.join()
    assert failed == [] and sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert len({path.read_text() for path in (tmp_path / "folder").iterdir()}) == 1


def test_what_a_dead_writer_left_is_cleared_and_what_a_living_one_writes_is_not(tmp_path):
    (tmp_path / ".x.kvlens-new").mkdir()
    with lock(tmp_path / ".x.kvlens-lock"):
        clear_leftovers(tmp_path / "x")
        assert (tmp_path / ".x.kvlens-new").exists()
        with pytest.raises(TimeoutError), lock(tmp_path / ".x.kvlens-lock", patience=0):
            pass
    clear_leftovers(tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_folder_moved_aside_is_restored_only_to_a_free_path(tmp_path):
    (tmp_path / ".x.kvlens-old").mkdir()
    (tmp_path / ".x.kvlens-old" / "a").touch()
    clear_leftovers(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and os.listdir(tmp_path / "x") == ["a"]
    (tmp_path / ".x.kvlens-old").mkdir()
    clear_leftovers(tmp_path / "x")
    assert os.listdir(tmp_path) == ["x"] and os.listdir(tmp_path / "x") == ["a"]


def test_a_link_that_somebody_planted_is_not_written_through(tmp_path):
    (tmp_path / "theirs").write_text("theirs")
    (tmp_path / ".mine.kvlens-new").symlink_to(tmp_path / "theirs")
    write_atomically(tmp_path / "mine", "mine")
    assert (tmp_path / "theirs").read_text() == "theirs" and (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize(("path", "words"), [("no/file", "No such file or directory"), ("file/x", "Not a directory")])
def test_paths_that_do_not_exist_are_not_created(path, words, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(KVLensError, match=f"cannot write .*: {words}"):
        write_atomically(tmp_path / path, b"")
    check_writable(tmp_path / "new" / "and" / "newer")
    assert os.listdir(tmp_path) == ["file"]


def test_permissions_are_those_of_any_new_file(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"")
        write_folder(tmp_path / "folder", Path.exists)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("file", "folder")] == [0o640, 0o750]
