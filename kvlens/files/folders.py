"""Whether a folder may be written to: one rule for models, reports, results of experiments and training runs.

An empty or missing folder may be written to. A folder that holds another result of the same kind may be replaced if the user
allows it (a training run is resumed instead). Nothing else is ever replaced: no folder with other contents, and none in which
users keep their own files next to ours.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files.atomic import check_writable, clear_leftovers, files_in, reason, replace_folder


class FolderKind(NamedTuple):
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
