"""Writing files and folders whole or not at all: as a hidden neighbor first, which is then renamed into place.

    .NAME.kvlens-new     what is being written
    .NAME.kvlens-old     the folder that NAME was, where the system cannot swap two folders in one step
    .NAME.kvlens-lock    locked while NAME is written; the lock is the system's and ends with the process, however that ends

Who holds the lock knows that the neighbors it finds were left by a process that died, and clears them: an old folder comes
back if nothing stands in its place, everything else is deleted.
"""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kvlens.arguments import path_of
from kvlens.errors import KVLensError

NEW, OLD, LOCK = ".kvlens-new", ".kvlens-old", ".kvlens-lock"
ENDINGS = (NEW, OLD, LOCK)
PATIENCE = 60.0
"""Seconds to wait for another process that writes the same file or folder."""
_HERE, _SWAP = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` so that a reader, or an interrupt at any moment, sees the old file or the whole new one.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content

    def fill(file: IO[bytes]) -> None:
        file.write(data)

    write_file(path, fill)


def write_file(path: str | Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write into a neighbor of ``path``, then rename it into place.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    path = path_of("cannot write", path)
    try:
        with _neighbor(path) as new:
            with open(new, "xb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
    except OSError as error:
        raise KVLensError(f"cannot write {path}: {reason(error)}") from error


def write_folder(folder: str | Path, fill: Callable[[Path], object]) -> Path:
    """Let ``fill`` write into a neighbor of ``folder``, then rename it into place; return its absolute path.

    What stands at ``folder`` is replaced: ask first whether it may be. It is deleted when the new folder stands in its place.

    Raises:
        KVLensError: not writable, or the disk is full. What ``fill`` raises is passed on, and nothing is left.
    """
    path = Path(os.path.realpath(path_of("folder", folder)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _neighbor(path) as new:
            new.mkdir()
            fill(new)
            for file in files_in(new):
                with open(new / file, "rb") as written:
                    os.fsync(written.fileno())
            if not os.path.lexists(path):
                new.rename(path)
            elif not _swapped(new, path):
                path.rename(_beside(path, OLD))  # which comes back if the next step fails
                new.rename(path)
    except OSError as error:
        raise KVLensError(f"cannot write {folder}: {reason(error)}") from error
    return path


def check_writable(path: Path) -> None:
    """Raise KVLensError unless a folder can be made at ``path`` (and parents that are missing); nothing stays changed."""
    wanted = path = Path(os.path.realpath(path))
    while not os.path.lexists(path.parent):
        path = path.parent
    try:
        with _neighbor(path) as trial:
            (trial / wanted.relative_to(path)).mkdir(parents=True)  # what is missing may have an impossible name
    except OSError as error:
        raise KVLensError(f"cannot make a folder in {path.parent}: {reason(error)}; choose another folder") from error


@contextmanager
def lock(path: Path, patience: float | int = PATIENCE) -> Iterator[None]:
    """Hold the lock file ``path``, which is deleted at the end.

    Raises:
        TimeoutError: another process, or another thread, has held it for so many seconds.
        OSError: it cannot be written.
    """
    from filelock import FileLock  # here, because a command that only shows its help locks nothing

    os.stat(f"{path.parent}/.")  # where there is no such folder, FileLock would make it
    tempfile.TemporaryFile(dir=path.parent).close()  # where no file can be made, FileLock would wait
    with FileLock(path, timeout=patience):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows deletes no open file; there the lock does it itself
                path.unlink(missing_ok=True)


def clear_leftovers(path: Path) -> None:
    """Clear what dead writers of ``path`` left, unless somebody is writing it or it may not be touched."""
    if any(os.path.lexists(_beside(path, ending)) for ending in ENDINGS):
        with suppress(OSError), lock(_beside(path, LOCK), patience=0):
            _clear(path)


def clear_leftovers_in(folder: Path) -> None:
    """Clear what dead writers of anything in ``folder`` left."""
    for name in {name[1:].rpartition(".")[0] for name in os.listdir(folder) if is_temporary(name)}:
        clear_leftovers(folder / name)


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name is one of the neighbors above."""
    return name.startswith(".") and name.endswith(ENDINGS)


def files_in(folder: Path) -> set[str]:
    """Everything in ``folder`` that is not a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


def reason(error: OSError) -> str:
    """The system's words, without the name of a temporary file, which says nothing to the reader."""
    return error.strerror or str(error)


@contextmanager
def _neighbor(path: Path) -> Iterator[Path]:
    """The name of a neighbor of ``path``, under its lock. Nothing stands there at first, and nothing at the end."""
    with lock(_beside(path, LOCK)):
        _clear(path)
        try:
            yield _beside(path, NEW)
        finally:
            _clear(path)


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}{ending}")


def _clear(path: Path) -> None:
    new, old = _beside(path, NEW), _beside(path, OLD)
    _delete(new)
    if os.path.lexists(old):
        old.rename(new if os.path.lexists(path) else path)  # never half of it under a name that comes back
        _delete(new)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swapped(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False where that cannot be done."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return swap is not None and swap(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _SWAP) == 0
