"""Tensors of a checkpoint on disk, by name, without building the model that they belong to.

Understands what ``save_pretrained`` writes: ``model.safetensors``, or shards with ``model.safetensors.index.json``, and the
older ``pytorch_model*.bin``, of which only tensors are read, never pickled code. Only the tensors that are asked for are
read, so that a few coefficients of a large model cost no more than its file headers.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.errors import KVLensError
from kvlens.files import check_regular, check_regular_files, file_in, read_json

INDEX_SUFFIX = ".index.json"


def read_json_config(folder: Path) -> dict[str, Any]:
    """Read ``config.json`` as a dict; ``{}`` if it is missing or not a JSON object (transformers then reports the problem)."""
    try:
        config = read_json("from_pretrained", folder / "config.json")
    except KVLensError:
        return {}
    return config if isinstance(config, dict) else {}


def read_tensors(source: str | Path, wanted: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Read the tensors whose name is ``wanted`` from a checkpoint.

    Args:
        source: a folder in Hugging Face's format, or one weights file (``.safetensors``, ``.bin``, ``.pt``, ``.pth``).
        wanted: whether to read a name; all of them by default.

    Returns:
        The tensors by name, on the CPU, in the dtype in which they are stored.

    Raises:
        KVLensError: there is no such folder or file, it holds no weights, a shard is missing, or a file is damaged.
    """
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(path_of("checkpoint", source), wanted):
        tensors |= _read_safetensors(path, wanted) if path.suffix == ".safetensors" else _read_torch(path, wanted)
    return tensors


def _weight_files(source: Path, wanted: Callable[[str], bool]) -> Iterable[Path]:
    """The files that may hold wanted tensors; an index, where there is one, tells which."""
    if not source.is_dir():
        check_regular("checkpoint", source)
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise KVLensError(f"{source} does not exist; expected a checkpoint: a folder, or a .safetensors or .bin file")
    for whole, shards in (("model.safetensors", "model*.safetensors"), ("pytorch_model.bin", "pytorch_model*.bin")):
        if (source / f"{whole}{INDEX_SUFFIX}").is_file():
            return indexed_files(source / f"{whole}{INDEX_SUFFIX}", wanted)
        if found := sorted(source.glob(shards)):
            check_regular_files("checkpoint", source)
            return [source / whole] if (source / whole) in found else found
    names = sorted(entry.name for entry in source.iterdir())
    raise KVLensError(
        f"no weights in {source}: expected model.safetensors, its shards, or pytorch_model.bin; found {names[:12]}"
    )


def indexed_files(index: Path, wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """The files of an index (``model.safetensors.index.json``) that hold the wanted tensors.

    Raises:
        KVLensError: the index is damaged, or names a file that is missing, outside the folder, or no regular file.
    """
    stored = read_json("checkpoint", index)
    try:
        names = sorted({file for name, file in stored["weight_map"].items() if wanted(name)})
    except (KeyError, TypeError, AttributeError) as error:
        raise KVLensError(f"{index} is damaged: expected JSON with a weight_map ({type(error).__name__}: {error})") from error
    paths = [file_in("checkpoint", index.parent, name) for name in names]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise KVLensError(f"{index} names {missing[:3]}, which {index.parent} does not hold: the checkpoint is incomplete")
    return paths


def _read_safetensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 (it has no __iter__)
    except (SafetensorError, OSError) as error:
        raise KVLensError(f"{path} is truncated or no safetensors file ({error})") from error


def _read_torch(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True)
        return {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor) and wanted(name)}
    except Exception as error:  # a damaged file can raise almost anything
        raise KVLensError(f"{path} is damaged or no state dict of tensors ({type(error).__name__}: {error})") from error
