"""The file of a KV bias: one safetensors file, tensors by their names and the rest as JSON in its metadata. Never pickle.

Tensors and metadata in, tensors and metadata out: what they mean is said by :class:`kvlens.KVBias`, which stands above.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.files import write_atomically
from kvlens.kv_bias.fingerprint import Fingerprint

FORMAT_VERSION = 2
"""2 brought features; a bias without them is still written as 1, which older readers know."""


def write_bias_file(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and metadata (in JSON's types) to ``path``: whole or not at all.

    Raises:
        KVLensError: the folder does not exist or cannot be written.
    """
    version = FORMAT_VERSION if "features" in meta else 1
    metadata = {"format": "kvlens.KVBias", "format_version": str(version), "kv_bias": json.dumps(meta)}
    write_atomically(path, save(dict(tensors), metadata))


def read_bias_file(path: str | Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, those called ``names`` among them, and the metadata; counts come as int or [batch] tensors.

    Raises:
        KVLensError: no such file, not a kvlens bias, incomplete, truncated, or written by a newer kvlens.
    """
    path = Path(path)
    if not path.is_file():
        raise KVLensError(f"KVBias.load: no file at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise KVLensError(f"KVBias.load: {path} is truncated or not a safetensors file ({error})") from error
    if metadata.get("format") != "kvlens.KVBias":
        raise KVLensError(f"KVBias.load: {path} is a safetensors file, but not a KV bias saved by kvlens")
    try:
        version = int(metadata["format_version"])
        if version > FORMAT_VERSION:
            raise KVLensError(
                f"KVBias.load: {path} has format version {version}, this kvlens reads up to {FORMAT_VERSION}: upgrade kvlens"
            )
        return _complete(path, tensors, json.loads(metadata["kv_bias"]), names)
    except KVLensError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise KVLensError(f"KVBias.load: {path} is incomplete or damaged ({type(error).__name__}: {error})") from error


def _complete(
    path: Path, tensors: dict[str, Tensor], meta: dict[str, Any], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    missing = [name for name in names if name not in tensors]
    if missing or set(meta["fingerprint"]) != {f.name for f in fields(Fingerprint)}:
        raise KVLensError(f"KVBias.load: {path} lacks {', '.join(missing) or 'a complete fingerprint'}")
    counts = {name: _int_or_tensor(meta[name]) for name in ("n_prompt_tokens", "position_offset")}
    return tensors, {**meta, **counts}


def _int_or_tensor(value: int | list[int]) -> int | Tensor:
    return torch.tensor(value) if isinstance(value, list) else value
