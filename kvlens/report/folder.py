"""The folder of a report: whether one may be written there, and putting it there whole or not at all.

A report is built in a temporary folder beside its place and renamed at the end. With ``overwrite`` the old report steps
aside under another name, and is deleted only when the new one stands in its place. A folder that holds anything but a report,
or a report with other files among its own, is never deleted.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvlens.errors import KVLensError

FORMAT = "kvlens.report"
SUMMARY = "summary.json"


def check_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that a report may be written to; nothing stays changed.

    Args:
        folder: its path; it need not exist.
        overwrite: whether a report that stands there may be replaced.

    Raises:
        KVLensError: the place is taken (by a report, without ``overwrite``; by anything else, always) or not writable.
    """
    path = Path(os.path.realpath(Path(folder).expanduser()))
    if os.path.lexists(path) and not path.is_dir():
        raise KVLensError(f"{folder} exists and is a file, not a folder; choose another folder")
    try:
        if path.is_dir() and any(path.iterdir()):
            _check_replaceable(path, folder, overwrite)
    except OSError as error:
        raise KVLensError(f"cannot read {folder}: {_reason(error)}; choose another folder") from error
    check_writable(path)
    return path


def check_writable(path: Path) -> None:
    """Raise KVLensError unless a folder can be made at ``path`` (and parents that are missing); nothing stays changed."""
    parent = Path(os.path.realpath(path)).parent
    while not os.path.lexists(parent):
        parent = parent.parent
    try:
        os.rmdir(tempfile.mkdtemp(dir=parent, prefix=".kvlens."))
    except OSError as error:
        raise KVLensError(f"cannot make a folder in {parent}: {_reason(error)}; choose another folder") from error


def write_folder(folder: str | Path, fill: Callable[[Path], None], *, overwrite: bool = False) -> Path:
    """Let ``fill`` write into a temporary neighbour of ``folder``, then rename it into place; return its absolute path.

    Raises:
        KVLensError: as :func:`check_folder`, or the disk is full. What ``fill`` raises is passed on, and nothing is left.
    """
    path = check_folder(folder, overwrite=overwrite)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}."))
        fill(temporary)
        for file in _files(temporary):
            _flush(temporary / file)
        temporary.chmod(0o777 & ~_umask())
        _swap_in(temporary, path)
    except OSError as error:
        raise KVLensError(f"cannot write a report to {folder}: {_reason(error)}") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def _check_replaceable(path: Path, shown: str | Path, overwrite: bool) -> None:
    try:
        summary = json.loads((path / SUMMARY).read_text(encoding="utf-8"))
        is_report = summary["format"] == FORMAT
        own = {SUMMARY, *summary["files"]} if is_report else set()
    except (OSError, ValueError, KeyError, TypeError):
        is_report = False
    if not is_report:
        raise KVLensError(f"{shown} is not empty and not a kvlens report, so it is left alone; choose another folder")
    if not overwrite:
        raise KVLensError(f"{shown} already holds a report; pass --overwrite to replace it, or choose another folder")
    others = sorted(_files(path) - own)
    if others:
        raise KVLensError(
            f"{shown} holds files that are not part of its report ({', '.join(others[:3])}); move them away first"
        )


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


def _files(folder: Path) -> set[str]:
    """Everything in ``folder`` that is not a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _reason(error: OSError) -> str:
    return error.strerror or str(error)  # without the name of the temporary file, which says nothing to the reader


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
