"""Tensors in a safetensors file that contains a checksum of its metadata and tensors. Never pickle."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from kvlens.errors import KVLensError
from kvlens.files.untrusted import check_regular, check_version, checksum

CHECKSUM = "checksum"


def checked_tensor_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file with ``tensors`` and ``metadata``, and the checksum of both; equal for equal contents."""
    stored = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in tensors.items()}
    return _in_order(save(stored, {**metadata, CHECKSUM: _checksum(stored, metadata)}))


def _in_order(data: bytes) -> bytes:
    """A safetensors file with its metadata in alphabetical order: safetensors' own order differs from call to call."""
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns tensors to 8 bytes
    return b"".join([len(text).to_bytes(8, "little"), text, memoryview(data)[8 + size :]])


def read_checked_tensors(path: Path, what: str, file_format: str, version: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read what :func:`checked_tensor_bytes` wrote.

    Args:
        path: path of the file.
        what: the operation, for messages.
        file_format: required ``format`` in the metadata.
        version: required ``format_version``.

    Raises:
        KVLensError: the file is truncated, of another format or version, or does not match its checksum.
    """
    check_regular(what, path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except Exception as error:  # a damaged header can raise almost anything
        raise KVLensError(f"{what}: {path} is truncated or not a safetensors file ({error})") from error
    if metadata.get("format") != file_format:
        raise KVLensError(f"{what}: {path} is a safetensors file, but was not saved by kvlens as {file_format}")
    check_version(what, path, metadata.get("format_version", ""), version)
    if metadata.pop(CHECKSUM, None) != _checksum(tensors, metadata):
        raise KVLensError(f"{what}: {path} is damaged: its contents do not match its checksum; use an intact copy")
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    parts: list[str | memoryview] = [text for key in sorted(metadata) for text in (key, metadata[key])]
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        parts += [f"{name} {tensor.dtype} {list(tensor.shape)}", tensor.reshape(-1).view(torch.uint8).numpy().data]
    return checksum(*parts)
