"""Reading untrusted files safely, and noticing damage: regular files of the expected folder, valid JSON, checksums.

A pipe may block forever, a device may never end, a name in a manifest may lead out of its folder, and JSON may contain values
that Python cannot parse. A folder lists its own files with their checksums in a JSON file. In a model's folder, files needed
for loading are listed separately from other files (:func:`list_files`), which may be missing. A model card may be edited by
users and is not listed.
"""

import contextlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import xxhash

from kvlens.errors import KVLensError, brief
from kvlens.files.atomic import reason

CONFIG, WEIGHTS, LIST, CARD = "config.json", "model.safetensors", "beside", "MODEL_CARD.md"


@contextlib.contextmanager
def reading_file(what: str, path: str | Path) -> Iterator[None]:
    """Where the system cannot read a file inside this, a KVLensError says which one."""
    try:
        yield
    except OSError as error:
        raise KVLensError(f"{what}: cannot read {path}: {reason(error)}") from error


def check_regular(what: str, path: Path) -> None:
    """Raise KVLensError if ``path`` exists and is not a regular file or a link to one, or is no name that can be looked up."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):  # reading it will raise an error
        return
    except OSError as error:  # a name that is too long, links in a circle, a folder that may not be entered
        raise KVLensError(f"{what}: cannot read {brief(str(path))}: {error.strerror}; give a file that can be read") from error
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
        raise KVLensError(f"{what}: {path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a file; nothing is read from it")


def check_regular_files(what: str, folder: Path) -> None:
    """Raise KVLensError unless everything in ``folder`` is a regular file or a folder, for readers that choose among files."""
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not entry.is_dir():
            check_regular(what, entry)


def file_in(what: str, folder: Path, name: object) -> Path:
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


def each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object, for ``object_pairs_hook``; ValueError where a name occurs twice: Python would take the last."""
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{brief(name)} occurs twice in one object")
        found[name] = value
    return found


def check_version(what: str, path: Path, found: object, known: int) -> None:
    """Raise KVLensError unless a file's format version is the ``known`` one, which this kvlens writes."""
    text = str(found)
    if not (text.isdecimal() and text.isascii() and len(text) < 10):
        raise KVLensError(f"{what}: {path} is damaged: its format version is {brief(found)}")
    if int(text) != known:
        advice = "upgrade kvlens" if int(text) > known else "make it again, or read it with the kvlens that wrote it"
        raise KVLensError(f"{what}: {path} has format version {text}, this kvlens reads {known}: {advice}")


def parsed_json(what: str, path: Path, text: str) -> Any:
    """``text``, read from the file at ``path``, parsed as JSON.

    Raises:
        KVLensError: it is not JSON, or has numbers or nesting that Python cannot parse.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KVLensError(f"{what}: {path} is truncated or damaged: not JSON ({error})") from error


# --- checksums ---


def checksum(*parts: str | bytes | memoryview) -> str:
    """xxh3-128 of the parts with their lengths, so that bytes cannot move between parts. Not secure against forgery."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else memoryview(part).cast("B")
        hasher.update(len(data).to_bytes(8, "little"))
        hasher.update(data)
    return hasher.hexdigest()


def checksum_of_json(value: Mapping[str, object]) -> str:
    """The checksum of a JSON object, independent of formatting and without its own entry ``checksum``."""
    return checksum(json.dumps({k: v for k, v in value.items() if k != "checksum"}, sort_keys=True))


def plain(value: object) -> Any:
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
