"""Writing files and folders whole or not at all: into a temporary neighbour first, then renamed into place."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvlens.errors import KVLensError


def write_atomically(path: str | Path, content: bytes | str) -> None:
    """Write ``content`` to ``path`` so that a reader, or an interrupt at any moment, sees the old file or the whole new one.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    path = Path(path)
    data = content.encode("utf-8") if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        raise KVLensError(f"cannot write {path}: {reason(error)}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def write_folder(folder: str | Path, fill: Callable[[Path], object]) -> Path:
    """Let ``fill`` write into a temporary neighbour of ``folder``, then rename it into place; return its absolute path.

    What stands at ``folder`` is replaced: ask first whether it may be. It steps aside under another name, and is deleted
    only when the new folder stands in its place.

    Raises:
        KVLensError: not writable, or the disk is full. What ``fill`` raises is passed on, and nothing is left.
    """
    path = Path(os.path.realpath(Path(folder).expanduser()))
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        fill(temporary)
        for file in files_in(temporary):
            _flush(temporary / file)
        temporary.chmod(0o777 & ~_umask())
        _swap_in(temporary, path)
    except OSError as error:
        raise KVLensError(f"cannot write {folder}: {reason(error)}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: tuples as lists, numpy's and torch's numbers as Python's, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check_writable(path: Path) -> None:
    """Raise KVLensError unless a folder can be made at ``path`` (and parents that are missing); nothing stays changed."""
    parent = Path(os.path.realpath(path)).parent
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent, prefix=".kvlens."))
    except OSError as error:
        raise KVLensError(f"cannot make a folder in {parent}: {reason(error)}; choose another folder") from error


def files_in(folder: Path) -> set[str]:
    """Everything in ``folder`` that is not a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


def reason(error: OSError) -> str:
    """The system's words, without the name of a temporary file, which says nothing to the reader."""
    return error.strerror or str(error)


def _swap_in(new: Path, path: Path) -> None:
    if not path.exists():
        new.rename(path)
        return
    old = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.old."))
    try:
        aside = old / path.name
        path.rename(aside)
        try:
            new.rename(path)
        except BaseException:
            aside.rename(path)
            raise
    finally:
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
