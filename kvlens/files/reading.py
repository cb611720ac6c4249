"""Reading untrusted files safely.

A pipe may block forever, a device may never end, a name in a manifest may lead out of its folder, and JSON may contain values
that Python cannot parse.
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from kvlens.errors import KVLensError, brief


def check_regular(what: str, path: Path) -> None:
    """Raise KVLensError if ``path`` exists and is not a regular file or a link to one."""
    try:
        mode = path.stat().st_mode
    except OSError:  # missing: reading it will raise an error
        return
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise KVLensError(f"{what}: {path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; nothing is read from it")


def check_regular_files(what: str, folder: Path) -> None:
    """Raise KVLensError unless everything in ``folder`` is a regular file or a folder, for readers that choose among files."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not entry.is_dir():
            check_regular(what, entry)


def file_in(what: str, folder: Path, name: Any) -> Path:
    """The path of a file that another file names.

    Raises:
        KVLensError: the name leads out of the folder, or is not a regular file.
    """
    if not isinstance(name, str) or not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise KVLensError(f"{what}: {folder} names the file {brief(name)}; expected one inside the folder")
    check_regular(what, folder / name)
    return folder / name


def read_json(what: str, path: Path) -> Any:
    """The contents of the JSON file at ``path``.

    Raises:
        KVLensError: the file is missing, not a regular file, or damaged.
    """
    check_regular(what, path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise KVLensError(f"{what}: {path} cannot be read ({error})") from error
    return parsed_json(what, path, text)


def check_version(what: str, path: Path, found: Any, known: int) -> None:
    """Raise KVLensError unless a file's format version is the ``known`` one, which this kvlens writes."""
    text = str(found)
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise KVLensError(f"{what}: {path} is damaged: its format version is {brief(found)}")
    if int(text) != known:
        raise KVLensError(
            f"{what}: {path} has format version {text}, this kvlens reads {known}: upgrade kvlens, or make the file again"
        )


def parsed_json(what: str, path: Path, text: str) -> Any:
    """``text``, read from the file at ``path``, parsed as JSON.

    Raises:
        KVLensError: it is not JSON, or has numbers or nesting that Python cannot parse.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"{what}: {path} is truncated or damaged: not JSON ({error})") from error
