"""One command at a time for an output folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvlens.errors import KVLensError
from kvlens.files.atomic import LOCK, beside, lock, reason
from kvlens.files.folders import FolderKind, check_folder


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
