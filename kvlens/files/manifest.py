"""Checksums, and the JSON file in which a folder lists its own files: damage on disk is noticed when a file is read.

Of a model's folder the files that loading needs are listed apart from those that it does not (:func:`list_files`), which may
be missing. A model card is for people: it may be edited, and is not listed.
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
    """xxh3-128 of the parts, each with its length, so that a byte cannot move from one to the next. Forgery passes."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else memoryview(part).cast("B")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def checksum_of_json(value: Mapping[str, Any]) -> str:
    """The checksum of a JSON object, however it is laid out, without its own entry ``checksum``."""
    return checksum(json.dumps({k: v for k, v in value.items() if k != "checksum"}, sort_keys=True))


def plain(value: Any) -> Any:
    """``value`` in JSON's own types: tuples as lists, numpy's and torch's numbers as Python's, NaN and infinity as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def listed_in(manifest: str, file_format: str, *lists: str) -> Callable[[Path], set[str] | None]:
    """For `FolderKind.own_files`: a JSON file that names its ``format``, and under ``lists`` the other files of the folder."""

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


def read_listed(folder: Path, name: str) -> bytes:
    """The contents of a file in the folder of a model; one that is not listed, such as a file of one's own, is read as it is.

    Raises:
        KVLensError: it is not what was written, or cannot be read.
    """
    config = read_json("model", folder / CONFIG)
    try:
        listed = config.get(LIST, {}).get(name)
        content = file_in("model", folder, name).read_bytes()
        whole = "checksum" not in config or config["checksum"] == checksum_of_json(config)
    except (OSError, AttributeError) as error:
        raise KVLensError(f"{folder / name} or the {CONFIG} next to it cannot be read ({error})") from error
    if not whole or listed not in (None, checksum(content)):
        raise KVLensError(f"{folder / name} is damaged: it is not what was saved; take a copy of the model that is whole")
    return content
