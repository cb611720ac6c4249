"""Small trained models that ship inside the package: each a folder with weights, tokenizer, configuration and a model card."""

import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.constants import HF_HUB_CACHE

from kvlens.checks import checked
from kvlens.errors import KVLensError, check_known, first_line, nearest, nearest_name
from kvlens.files import read_json

_ROOT = Path(str(files("kvlens.zoo")))
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.jinja")
"""Configuration and tokenizer."""


def names() -> list[str]:
    """The names of the shipped models."""
    return sorted(path.parent.name for path in _ROOT.glob("*/config.json"))


@checked
def folder_of(name: str) -> Path:
    """The folder of a shipped model, for ``HookedKVTransformer.load``.

    Raises:
        KVLensError: no such model; the message proposes the nearest name, and how to load models that are not shipped.
    """
    check_known("zoo: no shipped model (kvlens.load takes others, too)", name, names())
    return _ROOT / name


@checked
def is_hugging_face(folder: Path) -> bool:
    """Whether the folder's config.json was written by Transformers: it names the type of model and not kvlens' format."""
    try:
        config = read_json("zoo", folder / "config.json")
    except KVLensError:
        return False  # what reads the folder says what is wrong with it
    return isinstance(config, dict) and "model_type" in config and "format" not in config


@checked
def source_of(name: str, asked: str = "--model", download: bool = False) -> Path | str:
    """Find the model that a user names, without importing torch.

    Args:
        name: what the user named.
        asked: what asked for it, for the message.
        download: fetch the files of a name that is none of ours and no path from the hub into that cache, where it lacks them.

    Returns:
        The folder of a shipped model, or ``name`` itself as a folder or a file; else ``name``, if it may be one on the hub
        and the local Hugging Face cache has files; :func:`kvlens.load` then looks for them.

    Raises:
        KVLensError: it is none of these, and the nearest shipped name is proposed; or the hub cannot be reached, or has no such
            model.
    """
    shipped = names()
    if name in shipped:
        return folder_of(name)
    path = os.path.expanduser(name)
    if os.path.exists(path):  # False if it cannot be a path
        return Path(path)
    cache, may_be_on_the_hub = Path(HF_HUB_CACHE), re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", name) is not None
    if may_be_on_the_hub and nearest_name(name, shipped, 0.8) is None:
        if download:
            fetch(name, asked)
        if any(cache.glob("models--*")):
            return name
    listed = f"shipped are: {', '.join(shipped)}" if shipped else "this installation ships none"
    raise KVLensError(
        f"{asked}: {name!r} is neither a shipped model nor a folder or file that holds one; {listed}{nearest(name, shipped)} "
        f"(a name on the hub is taken where its files are in the local cache, {cache}: "
        "--download, or download=True, fetches them)"
    )


def fetch(name: str, asked: str, **where: Any) -> Path:
    """Put the files of a model on the hub into Hugging Face's cache: weights as safetensors, or in torch's format without.

    Args:
        name: as for :func:`source_of`, with ``asked``.
        where: ``revision``, ``cache_dir``, ``token`` for the hub.
    """
    files = {"ignore_patterns": "*/*", **where}
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*SMALL_FILES, "*.safetensors"], **files))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns="*.bin", **files)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such model, a model that asks for a login
        raise KVLensError(f"{asked}: {name!r} cannot be downloaded from Hugging Face ({first_line(error)})") from error
    return folder
