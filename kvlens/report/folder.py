"""The folder of a report: whether one may be written there.

A folder that holds anything but a report, or a report with other files among its own, is never replaced.
"""

import json
import os
from pathlib import Path

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files import check_writable, files_in, reason
from kvlens.temporaries import clear_dead

FORMAT = "kvlens.report"
SUMMARY = "summary.json"


def check_folder(folder: str | Path, *, overwrite: bool = False) -> Path:
    """Return the absolute path of a folder that a report may be written to; only what dead writers left is cleared.

    Args:
        folder: its path; it need not exist.
        overwrite: whether a report that stands there may be replaced.

    Raises:
        KVLensError: the place is taken (by a report, without ``overwrite``; by anything else, always) or not writable.
    """
    path = Path(os.path.realpath(path_of("--out", folder)))
    clear_dead(path)
    if os.path.lexists(path) and not path.is_dir():
        raise KVLensError(f"{folder} exists and is a file, not a folder; choose another folder")
    try:
        if path.is_dir() and any(path.iterdir()):
            _check_replaceable(path, folder, overwrite)
    except OSError as error:
        raise KVLensError(f"cannot read {folder}: {reason(error)}; choose another folder") from error
    check_writable(path)
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
    others = sorted(files_in(path) - own)
    if others:
        raise KVLensError(
            f"{shown} holds files that are not part of its report ({', '.join(others[:3])}); move them away first"
        )
