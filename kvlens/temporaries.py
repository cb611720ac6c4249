"""What is written beside its place first, and who still writes there.

``NAME`` is written as a hidden neighbour, ``.NAME.kvlens-XXXXXXXX``, and renamed into place when it is whole. Its writer holds
the system's lock on it (``flock``), which ends with the process, however that ends. So the next writer of ``NAME`` knows which
neighbours are the leftovers of dead ones, and clears them. Where the system has no such locks (Windows, some network file
systems) nothing is known to be dead, and nothing is cleared.
"""

import ctypes
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

MARK, ASIDE = ".kvlens-", ".kvlens-old-"
_NAME = re.compile(r"\..*\.kvlens-(old-)?[a-z0-9_]{8}", re.DOTALL)
_HERE, _SWAP = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def temporary_file(path: Path) -> Iterator[Path]:
    """A locked empty file beside ``path``. At the end it is deleted, unless it was renamed.

    What dead writers of ``path`` left is cleared first.

    Raises:
        OSError: not writable.
    """

    def make() -> str:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}{MARK}")
        os.close(descriptor)
        return name

    clear_dead(path)
    with _locked(make) as temporary:
        try:
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def temporary_folder(path: Path, mark: str = MARK) -> Iterator[Path]:
    """A locked empty folder beside ``path``; as :func:`temporary_file`. Marked `ASIDE`, it stays while nothing is at ``path``.

    Raises:
        OSError: not writable.
    """
    clear_dead(path)
    with _locked(lambda: tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}{mark}")) as temporary:
        try:
            yield temporary
        finally:
            if mark == MARK or os.path.lexists(path):
                shutil.rmtree(temporary, ignore_errors=True)


def rename_into_place(new: Path, path: Path) -> None:
    """Put the folder ``new`` where ``path`` is, which may be a folder itself: its contents are then lost, or stand at ``new``.

    Where system and file system can swap two folders, somebody stands at ``path`` at every moment. Elsewhere the old folder
    steps aside first, and `clear_dead` brings it back if the writer dies between the two steps.

    Raises:
        OSError: not possible; the old folder is where it was.
    """
    if not os.path.lexists(path):
        new.rename(path)
    elif not _swapped(new, path):
        with temporary_folder(path, ASIDE) as aside:
            old = path.rename(aside / path.name)
            try:
                new.rename(path)
            except BaseException:
                old.rename(path)
                raise


def clear_dead(path: Path) -> None:
    """Clear what dead writers of ``path`` left; a folder that one of them had moved aside comes back if nothing replaced it."""
    with suppress(OSError):
        _clear(Path(entry.path) for entry in _entries(path.parent) if _is_beside(entry.name, path.name))


def clear_dead_in(folder: Path) -> None:
    """Clear what dead writers of anything in ``folder`` left."""
    with suppress(OSError):
        _clear(Path(entry.path) for entry in _entries(folder) if is_temporary(entry.name))


def is_temporary(name: str) -> bool:
    """Whether a file or folder of this name is one that is written here before its renaming."""
    return _NAME.fullmatch(name) is not None


def lock(descriptor: int) -> bool | None:
    """Take the lock of an open file or folder: whether it is ours now, None where there are no locks. It goes when closed."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


def is_at(descriptor: int, path: str | Path) -> bool:
    """Whether the open file is still the one that stands at ``path``."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _is_beside(entry: str, name: str) -> bool:
    return entry.startswith(f".{name}{MARK}") and is_temporary(entry)


@contextmanager
def _locked(make: Callable[[], str]) -> Iterator[Path]:
    """What ``make`` makes, under a lock; made again where somebody took it for a dead one's before it was locked."""
    name, descriptor = make(), None
    while fcntl is not None and (descriptor := _lock_at(name)) is None:
        name = make()
    try:
        yield Path(name)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _lock_at(name: str) -> int | None:
    try:
        descriptor = os.open(name, os.O_RDONLY)
    except FileNotFoundError:
        return None
    if lock(descriptor) is not False and is_at(descriptor, name):
        return descriptor
    os.close(descriptor)
    return None


def _clear(leftovers: Iterable[Path]) -> None:
    for path in leftovers if fcntl is not None else ():
        with suppress(OSError):  # gone already, or another's who may not be touched
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                if lock(descriptor) and is_at(descriptor, path):
                    _bring_back(path)
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            finally:
                os.close(descriptor)


def _bring_back(leftover: Path) -> None:
    name, mark, _ = leftover.name.rpartition(ASIDE)
    if mark:
        old = leftover / name[1:]
        if old.exists() and not os.path.lexists(leftover.parent / old.name):
            old.rename(leftover.parent / old.name)


def _swapped(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False where that cannot be done."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return swap is not None and swap(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _SWAP) == 0
