"""The file of a KV bias: one safetensors file, tensors by their names and the rest as JSON in its metadata. Never pickle."""

import json
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
from kvlens.kv_bias.kv_bias import TENSORS, KVBias, plain

FORMAT_VERSION = 1


def save_bias(bias: KVBias, path: str | Path) -> None:
    """Write ``bias`` to ``path``: whole or not at all.

    Raises:
        KVLensError: the folder does not exist or cannot be written.
    """
    meta = {
        "n_prompt_tokens": plain(bias.n_prompt_tokens),
        "position_offset": plain(bias.position_offset),
        "fingerprint": bias.fingerprint.to_json(),
    }
    tensors = {name: getattr(bias, name).detach().cpu().contiguous() for name in TENSORS}
    metadata = {"format": "kvlens.KVBias", "format_version": str(FORMAT_VERSION), "kv_bias": json.dumps(meta)}
    write_atomically(path, save(tensors, metadata))


def load_bias(path: str | Path) -> KVBias:
    """Read a bias.

    Raises:
        KVLensError: no such file, not a kvlens bias, truncated, or written by a newer kvlens.
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
        return _build(tensors, json.loads(metadata["kv_bias"]))
    except KVLensError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise KVLensError(f"KVBias.load: {path} is incomplete or damaged ({type(error).__name__}: {error})") from error


def _build(tensors: dict[str, Tensor], meta: dict[str, Any]) -> KVBias:
    missing = [name for name in TENSORS if name not in tensors]
    if missing or set(meta["fingerprint"]) != {f.name for f in fields(Fingerprint)}:
        raise KVLensError(f"KVBias.load: the file lacks {', '.join(missing) or 'a complete fingerprint'}")
    return KVBias(
        b_KV=tensors["b_KV"],
        b_D=tensors["b_D"],
        last_k=tensors["last_k"],
        last_v=tensors["last_v"],
        last_q=tensors["last_q"],
        n_prompt_tokens=_int_or_tensor(meta["n_prompt_tokens"]),
        position_offset=_int_or_tensor(meta["position_offset"]),
        fingerprint=Fingerprint(**meta["fingerprint"]),
    )


def _int_or_tensor(value: int | list[int]) -> int | Tensor:
    return torch.tensor(value) if isinstance(value, list) else value
