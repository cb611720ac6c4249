"""Writing files and folders atomically, by way of a hidden temporary name next to the target.

    .NAME.kvlens-new     the file or folder being written
    .NAME.kvlens-old     the previous folder, on systems that cannot swap two folders in one step
    .NAME.kvlens-lock    locked while NAME is written; a lock of the operating system, released however the process ends

A process that holds the lock knows that any of the other names were left by a process that died, and cleans up: an old folder
is restored if nothing has replaced it, and everything else is deleted.
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
    """Write ``content`` to ``path`` so that readers always see either the old or the complete new file, even after a crash.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    write_file(path, lambda file: file.write(data))


def write_file(path: str | Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a temporary file next to ``path``, then rename it to ``path``.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    path = path_of("cannot write", path)
    try:
        with _neighbor(path) as new:
            with open(new, "x+b") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
    except OSError as error:
        raise KVLensError(f"cannot write {path}: {reason(error)}") from error


def replace_folder(folder: str | Path, fill: Callable[[Path], object], check: Callable[[Path], object]) -> Path:
    """Let ``fill`` write a temporary folder next to ``folder``, then rename it to ``folder``; return its absolute path.

    An existing ``folder`` is replaced, unless ``check``, called with its path under the lock, raises; it is deleted after the
    replacement.

    Raises:
        KVLensError: not writable, or the disk is full. Errors of ``fill`` are passed on, and nothing is left behind.
    """
    path = Path(os.path.realpath(path_of("folder", folder)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _neighbor(path) as new:
            check(path)
            new.mkdir()
            fill(new)
            for file in files_in(new):
                with open(new / file, "rb") as written:
                    os.fsync(written.fileno())
            if not os.path.lexists(path):
                new.rename(path)
            elif not _swapped(new, path):
                path.rename(beside(path, OLD))  # restored if the next step fails
                new.rename(path)
    except OSError as error:
        raise KVLensError(f"cannot write {folder}: {reason(error)}") from error
    return path


def check_writable(path: Path) -> None:
    """Raise KVLensError unless a folder (and missing parents) can be created at ``path``; leaves nothing changed."""
    wanted = path = Path(os.path.realpath(path))
    while not os.path.lexists(path.parent):
        path = path.parent
    try:
        with _neighbor(path) as trial:
            (trial / wanted.relative_to(path)).mkdir(parents=True)  # missing parents may have invalid names
    except OSError as error:
        raise KVLensError(f"cannot make a folder in {path.parent}: {reason(error)}; choose another folder") from error


@contextmanager
def lock(path: Path, patience: float | int = PATIENCE) -> Iterator[None]:
    """Hold the lock file ``path``, which is deleted at the end.

    Raises:
        TimeoutError: another process or thread has held it for ``patience`` seconds.
        OSError: it cannot be written.
    """
    from filelock import FileLock  # imported here to keep the command line's help fast

    os.stat(f"{path.parent}/.")  # raises if the folder is missing, which FileLock would create
    tempfile.TemporaryFile(dir=path.parent).close()  # raises if no file can be created, for which FileLock would wait
    with FileLock(path, timeout=patience):
        try:
            yield
        finally:
            with suppress(OSError):  # Windows cannot delete open files; there the lock deletes it itself
                path.unlink(missing_ok=True)


def beside(path: Path, ending: str) -> Path:
    """The temporary name with that ending; KVLensError if there can be none, as for the root."""
    if path.name in ("", ".."):
        raise KVLensError(f"cannot write {path}: expected a path that ends in a name, such as {path / 'NAME'}")
    return path.with_name(f".{path.name}{ending}")


def clear_leftovers(path: Path) -> None:
    """Remove what interrupted writes of ``path`` left behind, unless it is being written now or is not writable."""
    if any(os.path.lexists(beside(path, ending)) for ending in ENDINGS):
        with suppress(OSError), lock(beside(path, LOCK), patience=0):
            _clear(path)


def clear_leftovers_in(folder: Path) -> None:
    """Remove what interrupted writes of anything in ``folder`` left behind."""
    for name in {name[1:].rpartition(".")[0] for name in os.listdir(folder) if is_temporary(name)}:
        clear_leftovers(folder / name)


def is_temporary(name: str) -> bool:
    """Whether this is one of the temporary names above."""
    return name.startswith(".") and name.endswith(ENDINGS)


def files_in(folder: Path) -> set[str]:
    """Everything in ``folder`` that is not a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


def reason(error: OSError) -> str:
    """The system's error message, without the name of a temporary file, which means nothing to the user."""
    return error.strerror or str(error)


@contextmanager
def _neighbor(path: Path) -> Iterator[Path]:
    """The temporary name for ``path``, while holding its lock. Nothing exists there before or after."""
    with lock(beside(path, LOCK)):
        _clear(path)
        try:
            yield beside(path, NEW)
        finally:
            _clear(path)


def _clear(path: Path) -> None:
    new, old = beside(path, NEW), beside(path, OLD)
    _delete(new)
    if os.path.lexists(old):
        old.rename(new if os.path.lexists(path) else path)  # so that a partly deleted folder is never restored
        _delete(new)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swapped(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False if the system cannot do so."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return swap is not None and swap(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _SWAP) == 0
