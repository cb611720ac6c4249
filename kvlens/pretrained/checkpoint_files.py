"""Tensors of a checkpoint on disk, by name, without building the model that they belong to.

Understands what ``save_pretrained`` writes: ``model.safetensors``, or shards with ``model.safetensors.index.json``, and the
older ``pytorch_model*.bin``, of which only tensors are read, never pickled code. Only the tensors that are asked for are
read, so that a few coefficients of a large model cost no more than its file headers. :func:`check_checkpoint` decides whether
Transformers may be given a folder at all.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvlens.arguments import path_of
from kvlens.errors import KVLensError, brief
from kvlens.files import check_regular, check_regular_files, file_in, read_json, reading_file

INDEX_SUFFIX = ".index.json"
COUNT_FIELDS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth")
"""Fields of a configuration that count modules, each of which is built before Transformers looks at the weights."""
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Fields of a configuration that say how long a text may be."""
KNOWN_RANGES = {
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base"), (1.0, 1e15)),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), (0.0, 0.1)),
}
"""Fields of a configuration that no weight's shape contradicts, and between which numbers every known model has them."""
BUFFER = re.compile(
    r"\.(inv_freq|attn\.(attention\.)?(bias|masked_bias)|attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
    r"|causal_mask|position_ids|num_batches_tracked)$"
)
"""Tensors that some files hold although they follow from the configuration: masks, positions, rotary frequencies."""


def begins_with(path: Path, magic: bytes) -> bool:
    """Whether a file's first bytes are those of a format.

    Raises:
        KVLensError: a file that cannot be read.
    """
    with reading_file("load", path), path.open("rb") as file:
        return file.read(len(magic)) == magic


def check_checkpoint(door: str, folder: Path) -> int:
    """Raise KVLensError unless Transformers may be given a folder in Hugging Face's format.

    Transformers opens whatever file an index names, wherever it is; it builds all layers that a configuration counts before it
    looks at the weights; and it reads an adapter's base, and integers as if they were weights.

    Args:
        door: what an error starts with.
        folder: the folder. Names in its files are checked, not where links lead: Hugging Face's cache is made of links.

    Returns:
        How many numbers the weights are, for :func:`kvlens.pretrained.transformers_model.check_size`.
    """
    expected = "a folder written by save_pretrained, with config.json and model.safetensors"
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise KVLensError(f"{door}: {folder} {what}; expected {expected}")
    for part in (folder, folder / "additional_chat_templates"):
        check_regular_files(door, part)
    names = sorted(entry.name for entry in folder.iterdir())
    found = f"found {names[:12]}{' ...' if len(names) > 12 else ''}" if names else "the folder is empty"
    if "adapter_config.json" in names:
        raise KVLensError(
            f"{door}: {folder} holds an adapter, not a full model ({found}). Merge it into its base "
            "(merge_and_unload), save that, and pass that folder."
        )
    if "config.json" not in names:
        raise KVLensError(f"{door}: no config.json in {folder}: expected {expected}; {found}")
    config = read_json(door, folder / "config.json")
    if not isinstance(config, dict):
        raise KVLensError(f"{door}: {folder / 'config.json'} is damaged: expected a JSON object, got {brief(config)}")
    for index in folder.glob(f"*{INDEX_SUFFIX}"):
        indexed_files(index)
    if "transformers_weights" in config:
        named = file_in(door, folder, config["transformers_weights"])
        files: Iterable[Path] = indexed_files(named) if named.name.endswith(INDEX_SUFFIX) else [named]
    else:
        files = _weight_files(folder, lambda name: True)
    stored = [tensor for path in files for tensor in _headers(path)]
    check_architectures(door, config)
    check_positions(door, config)
    check_counts(door, folder, config, [name for name, *_ in stored])
    integers = sorted(name for name, is_integer, _ in stored if is_integer and not BUFFER.search(name))
    if integers and not config.get("quantization_config"):
        raise KVLensError(
            f"{door}: the weights in {folder} hold integers ({integers[:3]}), and its configuration has no quantization_config "
            "that says what they stand for; use a copy of the model that is not quantized"
        )
    return sum(size for *_, size in stored)


def check_positions(door: str, config: Mapping[str, object]) -> None:
    """Raise KVLensError where a configuration, as a dict, has no room for a single token."""
    for part, field in _fields(config, POSITIONS):
        n = part[field]
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            raise KVLensError(f"{door}: {field} of the configuration is {brief(n)}; expected at least one position")


def check_known_ranges(door: str, config: Mapping[str, object]) -> None:
    """Raise KVLensError where a configuration, as a dict, has a number that no model has, such as infinity."""
    for part, field in _fields(config, KNOWN_RANGES):
        value, (low, high) = part[field], KNOWN_RANGES[field]
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high):
            raise KVLensError(
                f"{door}{field} of the configuration is {brief(value)}; expected a number from {low:g} to {high:g}, as every "
                "known model has; use an intact copy"
            )


def check_architectures(door: str, config: Mapping[str, object]) -> None:
    """Raise KVLensError unless ``architectures`` of a configuration, where there is one, is a list of names."""
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise KVLensError(f"{door}: architectures of the configuration is {brief(names)}; expected a list of names")


def check_counts(door: str, source: Path, config: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise KVLensError where a configuration counts more layers than there are numbered modules in the weights.

    Args:
        door: what an error starts with.
        source: where the weights are, for the message.
        config: the configuration as a dict. The language model has at most as many layers as the longest row of numbered
            modules; another part of the model, whose weights may be left out, at most as many as there are tensors.
        names: of all tensors.
    """
    rows: defaultdict[str, set[str]] = defaultdict(set)
    for name in names:
        if numbered := re.match(r"(.*?)\.(\d+)\.", name):
            rows[numbered[1]].add(numbered[2])
    longest = max(map(len, rows.values()), default=0)
    for part, field in _fields(config, COUNT_FIELDS):
        most = longest if part is config or part is config.get("text_config") else len(names)
        if isinstance(part[field], int) and part[field] > most:
            raise KVLensError(
                f"{door}: {field} of the configuration is {brief(part[field])}, and the weights in {source} have {longest} "
                "layers; put the configuration right, or use the weights that belong to it"
            )


def _fields(config: object, names: Iterable[str]) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Find where a configuration, or a part of it (``text_config``), has one of these fields."""
    parts = [config]
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            yield from ((part, name) for name in names if name in part)
            parts += part.values()


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
        check_regular_files("checkpoint", source)
        if (source / whole).is_file():
            return [source / whole]
        if (source / f"{whole}{INDEX_SUFFIX}").is_file():
            return indexed_files(source / f"{whole}{INDEX_SUFFIX}", wanted)
        if found := sorted(source.glob(shards)):
            return found
    names = sorted(entry.name for entry in source.iterdir())
    raise KVLensError(
        f"no weights in {source}: expected pytorch_model.bin, shards with an index, or model.safetensors; found {names[:12]}"
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


def _headers(path: Path) -> Iterator[tuple[str, bool, int]]:
    """Of each tensor in a file: its name, whether it holds integers, and how many numbers."""
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (it has no __iter__)
                    tensor = file.get_slice(name)
                    yield name, tensor.get_dtype().startswith(("I", "U", "BOOL")), math.prod(tensor.get_shape())
        except (SafetensorError, OSError) as error:
            raise KVLensError(f"{path} is truncated or no safetensors file ({error})") from error
    else:
        for name, tensor in _read_torch(path, lambda name: True).items():
            yield name, not tensor.is_floating_point(), tensor.numel()


def _read_safetensors(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}  # noqa: SIM118 (it has no __iter__)
    except (SafetensorError, OSError) as error:
        raise KVLensError(f"{path} is truncated or no safetensors file ({error})") from error


def _read_torch(path: Path, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        return {name: tensor for name, tensor in stored.items() if isinstance(tensor, Tensor) and wanted(name)}
    except Exception as error:  # a damaged file can raise almost anything
        raise KVLensError(f"{path} is damaged or no state dict of tensors ({type(error).__name__}: {error})") from error
