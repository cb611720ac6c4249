"""One run at a time in a folder, and nothing there of dead ones.

The lock is the system's, on a file of the folder: it ends with the process, however that ends (see `kvlens.temporaries`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlens.errors import KVLensError
from kvlens.files import reason
from kvlens.temporaries import clear_dead_in, is_at, is_temporary, lock

LOCK = ".lock"


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
        held = lock(file.fileno())
        if held is False or (held and not is_at(file.fileno(), folder / LOCK)):  # the latter: deleted as its holder ended
            raise KVLensError(f"train: another run is at work in {folder}; wait for it, or choose another folder")
        clear_dead_in(folder)
        try:
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)


def is_of_a_run(path: Path) -> bool:
    """Whether a path is a lock or a leftover: it does not make a folder one that is in use."""
    return path.name == LOCK or is_temporary(path.name)
