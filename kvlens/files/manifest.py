"""Checksums, and the JSON file in which a folder lists its own files, so that damage on disk is detected when a file is read.

In a model's folder, files needed for loading are listed separately from other files (:func:`list_files`), which may be missing.
A model card may be edited by users and is not listed.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import xxhash

from kvlens.errors import KVLensError
from kvlens.files.reading import file_in, read_json

CONFIG, LIST, CARD = "config.json", "beside", "MODEL_CARD.md"


def checksum(*parts: str | bytes | memoryview) -> str:
    """xxh3-128 of the parts with their lengths, so that bytes cannot move between parts. Not secure against forgery."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else memoryview(part).cast("B")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def checksum_of_json(value: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, independent of formatting and without its own entry ``checksum``."""
    return checksum(json.dumps({k: v for k, v in value.items() if k != "checksum"}, sort_keys=True))


def plain(value: Any) -> Any:
    """``value`` as JSON types: tuples as lists, numpy's and torch's numbers as Python's, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def listed_in(manifest: str, file_format: str, *lists: str) -> Callable[[Path], set[str] | None]:
    """`FolderKind.own_files` for a JSON file that states its ``format`` and lists the folder's other files under ``lists``."""

    def own_files(folder: Path) -> set[str] | None:
        try:
            content = read_json("folder", folder / manifest)
            if content["format"] != file_format:
                return None
            return {manifest}.union(*(content.get(name, ()) for name in lists))
        except (KVLensError, KeyError, TypeError, AttributeError):
            return None

    return own_files


def list_files(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of these files into the configuration of the model in ``folder``."""
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config[LIST] = {name: checksum((folder / name).read_bytes()) for name in sorted(names)}
    config["checksum"] = checksum_of_json(config)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def check_listed(folder: Path) -> None:
    """Read every file that the configuration in ``folder`` lists; a folder of another kind lists none.

    Raises:
        KVLensError: one of them, or the configuration, is not what was written.
    """
    listed = read_json("model", folder / CONFIG).get(LIST)
    for name in listed if isinstance(listed, dict) else ():
        read_listed(folder, name)


def read_listed(folder: Path, name: str) -> bytes:
    """The contents of a file in the folder of a model; files that are not listed, such as the user's own, are not checked.

    Raises:
        KVLensError: it does not match its checksum, or cannot be read.
    """
    config = read_json("model", folder / CONFIG)
    try:
        listed = config.get(LIST, {}).get(name)
        content = file_in("model", folder, name).read_bytes()
        whole = "checksum" not in config or config["checksum"] == checksum_of_json(config)
    except (OSError, AttributeError) as error:
        raise KVLensError(f"{folder / name} or the {CONFIG} next to it cannot be read ({error})") from error
    if not whole or listed not in (None, checksum(content)):
        raise KVLensError(f"{folder / name} is damaged: it does not match its checksum; use an intact copy of the model")
    return content
