"""The file format of a KV bias: one safetensors file, with everything but tensors as JSON in its metadata. Never pickle.

This module only reads and writes tensors and metadata; :class:`kvlens.KVBias` interprets them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files import check_regular, parsed_json, write_atomically
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.kv_bias.fingerprint import Fingerprint
from kvlens.kv_bias.ragged import unpacked

FORMAT_VERSION = 6
FORMAT = "kvlens.KVBias"


def write_bias_file(path: str | Path, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
    """Write tensors and metadata (as JSON types) to ``path`` atomically.

    Raises:
        KVLensError: the folder does not exist or cannot be written.
    """
    metadata = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "kv_bias": json.dumps(meta)}
    write_atomically(path, checked_tensor_bytes(tensors, metadata))


def read_bias_file(path: str | Path, names: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, which must include ``names``, and the metadata; counts are returned as int or [batch] tensors.

    Raises:
        KVLensError: no such file, not a kvlens bias, incomplete, damaged, or of another format version.
    """
    path = path_of("KVBias.load", path)
    if not path.is_dir():
        check_regular("KVBias.load", path)
    if not path.is_file():
        raise KVLensError(f"KVBias.load: no file at {path}")
    tensors, metadata = read_checked_tensors(path, "KVBias.load", FORMAT, FORMAT_VERSION)
    try:
        return _complete(path, unpacked(tensors), parsed_json("KVBias.load", path, metadata["kv_bias"]), names)
    except KVLensError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise KVLensError(f"KVBias.load: {path} is incomplete or damaged ({type(error).__name__}: {error})") from error


def _complete(
    path: Path, tensors: dict[str, Tensor], meta: dict[str, Any], names: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    missing = [name for name in names if name not in tensors]
    if missing or set(meta["fingerprint"]) != {f.name for f in fields(Fingerprint)}:
        raise KVLensError(f"KVBias.load: {path} lacks {', '.join(missing) or 'a complete fingerprint'}")
    if not isinstance(meta.get("features", ""), str) or not isinstance(meta.get("fit") or {}, dict):
        raise KVLensError(f"KVBias.load: {path} is damaged: its features or its record of a fit are of another kind")
    counts = {name: _int_or_tensor(meta[name]) for name in ("n_prompt_tokens", "position_offset")}
    return tensors, {**meta, **counts}


def _int_or_tensor(value: int | list[int]) -> int | Tensor:
    return torch.tensor(value) if isinstance(value, list) else value
