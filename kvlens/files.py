"""Files: written whole or not at all, into a temporary neighbour first, then renamed into place; read only if they are files.

What is read may come from anybody: a pipe under a file's name would be waited for without end, a device never ends.
"""

import json
import math
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from kvlens.arguments import brief, path_of
from kvlens.errors import KVLensError
from kvlens.temporaries import rename_into_place, temporary_file, temporary_folder


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
    """Let ``fill`` write into a temporary neighbour of ``path``, then rename it into place.

    Raises:
        KVLensError: the folder does not exist, cannot be written, or the disk is full.
    """
    path = path_of("cannot write", path)
    try:
        with temporary_file(path) as temporary:
            with open(temporary, "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())
            os.replace(temporary, path)
    except OSError as error:
        raise KVLensError(f"cannot write {path}: {reason(error)}") from error


def write_folder(folder: str | Path, fill: Callable[[Path], object]) -> Path:
    """Let ``fill`` write into a temporary neighbour of ``folder``, then rename it into place; return its absolute path.

    What stands at ``folder`` is replaced: ask first whether it may be. It is deleted when the new folder stands in its place.

    Raises:
        KVLensError: not writable, or the disk is full. What ``fill`` raises is passed on, and nothing is left.
    """
    path = Path(os.path.realpath(path_of("folder", folder)))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(path) as temporary:
            fill(temporary)
            for file in files_in(temporary):
                _flush(temporary / file)
            temporary.chmod(0o777 & ~_umask())
            rename_into_place(temporary, path)
    except OSError as error:
        raise KVLensError(f"cannot write {folder}: {reason(error)}") from error
    return path


def check_regular(what: str, path: Path) -> None:
    """Raise KVLensError where something else than a regular file, or a link to one, stands at ``path``; it may be missing."""
    try:
        mode = path.stat().st_mode
    except OSError:  # missing: whoever reads it says so
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise KVLensError(f"{what}: {path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; nothing is read from it")


def check_regular_files(what: str, folder: Path) -> None:
    """Raise KVLensError unless whatever is in ``folder``, but for folders, is a file: for readers that choose among them."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not entry.is_dir():
            check_regular(what, entry)


def file_in(what: str, folder: Path, name: Any) -> Path:
    """The path of a file that another file names.

    Raises:
        KVLensError: the name leads out of the folder, or something else than a regular file stands there.
    """
    if not isinstance(name, str) or not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise KVLensError(f"{what}: {folder} names the file {brief(name)}; expected one inside the folder")
    check_regular(what, folder / name)
    return folder / name


def read_json(what: str, path: Path) -> Any:
    """What the JSON file at ``path`` holds.

    Raises:
        KVLensError: it is missing, no regular file, or damaged.
    """
    check_regular(what, path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise KVLensError(f"{what}: {path} cannot be read ({error})") from error
    return parsed_json(what, path, text)


def parsed_json(what: str, path: Path, text: str) -> Any:
    """What ``text``, found in the file at ``path``, says as JSON.

    Raises:
        KVLensError: it is not JSON, or has numbers or a nesting beyond what Python reads.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"{what}: {path} is truncated or damaged: not JSON ({error})") from error


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
    wanted = path = Path(os.path.realpath(path))
    while not os.path.lexists(path.parent):
        path = path.parent
    try:
        with temporary_folder(path) as trial:
            (trial / wanted.relative_to(path)).mkdir(parents=True, exist_ok=True)  # what is missing may have an impossible name
    except OSError as error:
        raise KVLensError(f"cannot make a folder in {path.parent}: {reason(error)}; choose another folder") from error


def files_in(folder: Path) -> set[str]:
    """Everything in ``folder`` that is not a folder, relative to it."""
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir()}


def reason(error: OSError) -> str:
    """The system's words, without the name of a temporary file, which says nothing to the reader."""
    return error.strerror or str(error)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
