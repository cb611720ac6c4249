"""One run at a time in a folder, and what dead ones left there.

The lock is the system's (``flock``) on a file of the folder: it ends with the process, however that ends, so that whoever holds
it knows that no other run is alive there, and that temporary files and folders are leftovers.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from kvlens.errors import KVLensError
from kvlens.files import reason

try:
    import fcntl
except ImportError:  # not on Windows, where two runs in a folder stay the user's to avoid
    fcntl = None  # type: ignore[assignment]

LOCK = ".lock"
LEFTOVERS = (".checkpoint.safetensors.*", ".metrics.parquet.*", ".model.*", ".saving.*")
"""Names of what is written beside its place first."""


@contextmanager
def only_run_in(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which is made where it is missing; clear what dead runs left.

    Raises:
        KVLensError: another run holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / LOCK, "a")  # noqa: SIM115 (closed below, with the lock)
    except OSError as error:
        raise KVLensError(f"train: cannot write to {folder}: {reason(error)}; choose another folder") from error
    with file:
        _hold(file, folder)
        for leftover in (path for pattern in LEFTOVERS for path in folder.glob(pattern)):
            shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink(missing_ok=True)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def is_of_a_run(path: Path) -> bool:
    """Whether a path is a lock or a leftover: it does not make a folder one that is in use."""
    return path.name == LOCK or any(path.match(pattern) for pattern in LEFTOVERS)


def _hold(file: IO[str], folder: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_current = os.path.samestat(os.fstat(file.fileno()), os.stat(folder / LOCK))
    except (BlockingIOError, FileNotFoundError):
        is_current = False  # held by another, or just let go and deleted by one that ended in this moment
    except OSError:
        return  # a file system without locks
    if not is_current:
        raise KVLensError(f"train: another run is at work in {folder}; wait for it, or choose another folder")
