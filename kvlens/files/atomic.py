"""Writing files and folders, completely or not at all, and only where they may be written.

Everything is written under a hidden temporary name next to the target, which is then renamed:

    .NAME.kvlens-new     the file or folder being written
    .NAME.kvlens-old     the previous folder, on systems that cannot swap two folders in one step
    .NAME.kvlens-lock    locked while NAME is written; a lock of the operating system, released however the process ends

A process that holds the lock knows that any of the other names were left by a process that died, and cleans up: an old folder
is restored if nothing has replaced it, and everything else is deleted.

One rule for the folders of models, reports, results of experiments and training runs (`FolderKind`): an empty or missing one
may be written to; one that holds another result of the same kind may be replaced if the user allows it (a training run is
resumed instead). Nothing else is ever replaced: no folder with other contents, and none in which users keep their own files
next to ours.
"""

import ctypes
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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


# --- whether a folder may be written to ---


@dataclass(frozen=True)
class FolderKind:
    """What a folder holds.

    Attributes:
        name: name with its article, for messages.
        own_files: function that returns the files of a folder that belong to it, relative to the folder; None if the folder
            is of another kind.
        operation: the beginning of every message.
        allow: how a user allows replacing it; None if it is resumed instead, in which case nothing is deleted.
        ignored: paths that do not count as contents.
    """

    name: str
    own_files: Callable[[Path], set[str] | None]
    operation: str = ""
    allow: str | None = "pass --overwrite"
    ignored: Callable[[Path], bool] = lambda path: False


def check_folder(folder: str | Path, kind: FolderKind, *, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that ``kind`` may be written to; only removes leftovers of interrupted writes.

    Args:
        folder: path of the folder; it need not exist.
        kind: what is to be written there.
        overwrite: whether an existing folder of that kind may be replaced.

    Raises:
        KVLensError: there is a file of that name; the folder holds something else, or additional files, or is of that kind and
            ``overwrite`` is False; or it is not writable.
    """
    say = f"{kind.operation}: {folder}" if kind.operation else f"{folder}"
    path = Path(os.path.realpath(path_of(kind.operation or "--out", folder)))
    clear_leftovers(path)
    _check_contents(path, kind, say, overwrite)
    check_writable(path)
    return path


def write_folder(
    folder: str | Path, fill: Callable[[Path], object], kind: FolderKind | None = None, *, overwrite: bool = False
) -> Path:
    """Let ``fill`` write a folder, completely or not at all, and return its absolute path.

    Args:
        folder: path of the folder; parent folders are created. An existing one is replaced.
        fill: is called with the path of an empty folder.
        kind: what is written; None where the caller has checked that it may be.
        overwrite: whether an existing folder of that kind may be replaced.

    Raises:
        KVLensError: as :func:`check_folder`, also if another process has written there since; not writable, or the disk is
            full. Errors of ``fill`` are passed on, and nothing is left behind.
    """
    if kind is None:
        return replace_folder(folder, fill, lambda path: None)
    say = f"{kind.operation}: {folder}" if kind.operation else f"{folder}"
    path = check_folder(folder, kind, overwrite=overwrite)
    return replace_folder(path, fill, lambda path: _check_contents(path, kind, say, overwrite))


def _check_contents(path: Path, kind: FolderKind, say: str, overwrite: bool) -> None:
    if os.path.lexists(path) and not path.is_dir():
        raise KVLensError(f"{say} is a file, not a folder; choose another folder")
    try:
        if path.is_dir() and not all(map(kind.ignored, path.iterdir())):
            _check_own(path, kind, say, overwrite)
    except OSError as error:
        raise KVLensError(f"{say} cannot be read: {reason(error)}; choose another folder") from error


def _check_own(path: Path, kind: FolderKind, say: str, overwrite: bool) -> None:
    own = kind.own_files(path)
    if own is None:
        raise KVLensError(f"{say} is not empty and not {kind.name}, so it is left alone; choose another folder")
    if kind.allow is None:
        return
    if not overwrite:
        raise KVLensError(f"{say} already holds {kind.name}; {kind.allow} to replace it, or choose another folder")
    others = sorted(files_in(path) - own)
    if others:
        named = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        raise KVLensError(f"{say} holds files that are not part of {kind.name} ({named}); move them away first")


@contextmanager
def work_on(folder: str | Path, kind: FolderKind, *, overwrite: bool = False) -> Iterator[None]:
    """Inside the block, no other command works on the output ``folder``. Missing parents are made, and removed if left empty.

    Raises:
        KVLensError: as :func:`check_folder`, or another process works on it.
    """
    path = check_folder(folder, kind, overwrite=overwrite)
    with ExitStack() as stack:
        try:
            stack.callback(_remove_empty, [parent for parent in path.parents if not parent.exists()])
            path.parent.mkdir(parents=True, exist_ok=True)
            work = path.with_name(f"{path.name}.work")  # writing the folder holds the lock of its own name
            stack.enter_context(lock(beside(work, LOCK), patience=0))
        except TimeoutError as error:
            raise KVLensError(f"another process is at work on {path}; wait for it, or choose another output") from error
        except OSError as error:
            raise KVLensError(f"cannot write {path}: {reason(error)}; choose another output") from error
        check_folder(folder, kind, overwrite=overwrite)  # again: the process that held the lock may just have written it
        yield


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        with suppress(OSError):
            folder.rmdir()
