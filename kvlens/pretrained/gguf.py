"""GGUF files (llama.cpp's format), by Transformers' own reader, which needs the package ``gguf``.

Transformers dequantizes the weights: the model computes what Transformers' model of the same file computes. Tokenizer and chat
template come from the file, too. Before Transformers gets a file, its header is read here: that reader goes through as many
entries as a damaged length says, builds as many layers, takes weights from wherever an offset says, and needs 10 microseconds
for each entry of an array, and a third of one for each byte of a string.
"""

import contextlib
import functools
import importlib
import math
import mmap
import re
import struct
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES, GGUF_TO_TRANSFORMERS_MAPPING
from transformers.utils import is_gguf_available, logging

from kvlens.errors import KVLensError, brief, first_line, warn
from kvlens.files import check_regular
from kvlens.pretrained.checkpoint_files import begins_with, check_counts, check_positions
from kvlens.pretrained.transformers_model import read_config, read_model
from kvlens.tokenizer import with_bos_in_front

V = TypeVar("V")

modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # the bar that without_progress_bars switches off
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""How the values of an entry are stored, by the number of their type."""
STRING, ARRAY = 8, 9
MOST_BYTES, BYTES_A_TOKEN = 2**23, 256
"""Of the entries: what a tokenizer needs for each of its tokens, and what stands there besides (whole JSON files, in some)."""
MOST_IN_AN_ARRAY, ITEMS_A_TOKEN = 10_000, 8
"""Likewise for the length of an array. The longest in known files are merges, two for each token."""
ALIGNMENT = 32
"""Where a file does not say otherwise."""


@dataclass(frozen=True)
class StoredWeights:
    """What the header says of a tensor: ``place`` counts bytes from the first tensor, ``kind`` is a type of ggml's."""

    shape: tuple[int, ...]
    kind: int
    place: int

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class Header(NamedTuple):
    """What a GGUF file says before its weights.

    Attributes:
        entries: scalars and strings by name; of arrays their length.
        tensors: by name, in order.
        end: how many bytes all this takes.
    """

    entries: dict[str, object]
    tensors: dict[str, StoredWeights]
    end: int


def is_gguf(path: Path) -> bool:
    """Whether a regular file is of this format, by its first bytes or its name."""
    return path.is_file() and (begins_with(path, MAGIC) or path.suffix == ".gguf")


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Transformers' model of a GGUF file, dequantized to ``dtype``, and the tokenizer.

    Raises:
        KVLensError: the package ``gguf`` is missing, the file is damaged, or Transformers does not know the architecture.
    """
    header = read_header(path)
    name = header.entries.get("general.architecture")
    check_positions(f"load: {path}", {"max_position_embeddings": header.entries.get(f"{name}.context_length")})
    check_counts("load", path, {"num_hidden_layers": header.entries.get(f"{name}.block_count")}, header.tensors)
    stored = sum(tensor.size for tensor in header.tensors.values())
    if not is_gguf_available():
        raise KVLensError(
            f"load: {path} is a GGUF file, which Transformers reads with the package gguf: pip install 'kvlens[gguf]'"
        )
    check_places(path, header)
    check_names(path, str(name), header)
    try:
        with tempfile.TemporaryDirectory() as folder, _read_once():
            # Transformers reads what else stands in a file's folder, so the file gets one of its own
            (Path(folder) / "model.gguf").symlink_to(path.resolve())
            own: dict[str, Any] = {"gguf_file": "model.gguf"}
            config = read_config(Path(folder), **own)
            model, _ = read_model("load: ", Path(folder), config, stored, source=str(path), dtype=dtype, **own)
            tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True, **own)
    except KVLensError:
        raise
    except Exception as error:  # it raises whatever its parts raise
        raise KVLensError(
            f"load: Transformers cannot read the GGUF file {path} of the architecture {name!r} ({first_line(error)}); it reads "
            f"{', '.join(name for name in GGUF_SUPPORTED_ARCHITECTURES if name != 'general')}"
        ) from error
    taken = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())
    if stored > taken:
        warn(
            f"load: {path} holds {stored:,} numbers, of which Transformers' model has {taken:,}: its reader leaves some out "
            "(rope_freqs.weight, for example), so that other programs may compute something else from this file"
        )
    model.hf_quantizer, model.config.name_or_path = None, path.stem
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # of the file: the weights are numbers now
    tokenizer.name_or_path = tokenizer.init_kwargs["name_or_path"] = path.stem
    tokenizer = with_bos_in_front(tokenizer, path.stem, type(model).__name__)
    tokenizer.init_kwargs["add_bos_token"] = True  # TransformerLens loads any other again by its name
    return model, tokenizer


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Inside, Transformers reads a file's entries once, not for configuration, weights and tokenizer each, and makes the table
    of tensors' names once, not for every module: a small model takes a third of the seconds."""
    package: Any = importlib.import_module("gguf")
    theirs: Any = modeling_gguf_pytorch_utils
    before = package.GGUFReader, package.get_tensor_name_map, theirs._gguf_parse_value
    values: dict[int, tuple[object, object]] = {}

    class PlainArrays(package.GGUFReader):
        """Holds a plain array of the file's bytes: numpy takes several times as long for a part of a memmap."""

        @property
        def data(self) -> object:
            return self._data

        @data.setter
        def data(self, mapped: object) -> None:
            self._data = np.asarray(mapped)

    def parsed(stored: object, kind: object) -> object:
        if id(stored) not in values:
            values[id(stored)] = stored, before[2](stored, kind)  # which is held, so that its id stays its own
        return values[id(stored)][1]

    package.GGUFReader, package.get_tensor_name_map = map(functools.cache, (PlainArrays, before[1]))
    theirs._gguf_parse_value = parsed
    try:
        yield
    finally:
        package.GGUFReader, package.get_tensor_name_map, theirs._gguf_parse_value = before


def read_header(path: Path) -> Header:
    """What a GGUF file says before its weights, each length held against the file's.

    Raises:
        KVLensError: no regular file, another format, or a damaged file.
    """
    check_regular("load", path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError, OverflowError, struct.error) as error:
        raise _damaged(path, first_line(error)) from error


def check_places(path: Path, header: Header) -> None:
    """Raise KVLensError unless the tensors fill the rest of the file, one behind the other in the order of the header.

    So llama.cpp writes them, and wants them. Transformers reads a tensor from wherever its offset says.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    step, place, stop = header.entries.get("general.alignment", ALIGNMENT), 0, 0
    if not isinstance(step, int) or step < 1 or step & (step - 1):
        raise _damaged(path, f"general.alignment is {brief(step)}, expected a power of two")
    kinds = {int(kind): kind for kind in GGMLQuantizationType if kind.name not in ("I8", "I16", "I32", "I64")}
    for name, tensor in header.tensors.items():
        if tensor.kind not in kinds:
            raise _damaged(path, f"{brief(name)} has type {tensor.kind}, which is no type of weights in the package gguf")
        block, n_bytes = GGML_QUANT_SIZES[kinds[tensor.kind]]
        if tensor.place != place or not tensor.shape or tensor.shape[0] % block or tensor.size == 0:
            expected = f"expected {place}, and rows of a multiple of {block}"
            raise _damaged(path, f"{brief(name)} of shape {[*tensor.shape]} is at {tensor.place}, {expected}")
        stop = place + tensor.size // block * n_bytes
        place = stop + -stop % step
    start, n_bytes = header.end + -header.end % step, path.stat().st_size
    if not start + stop <= n_bytes <= start + place:
        raise _damaged(path, f"its tensors end at byte {start + stop}, and the file has {n_bytes}")


def check_names(path: Path, architecture: str, header: Header) -> None:
    """Raise KVLensError for a name that is damaged: Transformers leaves it out, and takes what it takes where there is none.

    Of a tensor: one that llama.cpp's models of this architecture do not have. Of an entry: one that differs in one letter from
    one that Transformers would read and that is not there; it has others that nobody reads.
    """
    from gguf import MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

    read = {f"{architecture}.{entry}" for entry in GGUF_TO_TRANSFORMERS_MAPPING["config"].get(architecture, {})}
    for missing in read - {*header.entries}:
        for name in header.entries:
            if len(name) == len(missing) and sum(a != b for a, b in zip(name, missing, strict=True)) == 1:
                raise _damaged(path, f"it has an entry {brief(name)}, but no {missing!r}")
    kind = next((kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if kind is None or architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        return
    known = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[kind]}
    unknown = [name for name in header.tensors if re.sub(r"\.\d+\.", ".{bid}.", name.rpartition(".")[0]) not in known]
    if unknown:
        raise _damaged(path, f"models of the architecture {architecture} have no tensor {brief(unknown[0])}")


def _damaged(path: Path, how: str) -> KVLensError:
    return KVLensError(f"load: {path} is damaged or no GGUF file ({how}); use an intact copy")


class _Reader:
    """Reads a file from its beginning; raises ValueError or struct.error where it ends."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at, self.longest = data, 0, 0

    def header(self) -> Header:
        if self.bytes(4) != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        version = self.scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} of the format, expected {' or '.join(map(str, VERSIONS))}, little-endian")
        n_tensors, n_entries = self.length(), self.length()
        entries = self.named(n_entries, lambda: self.value(self.scalar("I")))
        n_bytes = self.at
        tensors = self.named(n_tensors, self.tensor)
        embedding = tensors.get("token_embd.weight")
        n_tokens = embedding.shape[-1] if embedding is not None and embedding.shape else 0
        if n_bytes > MOST_BYTES + BYTES_A_TOKEN * n_tokens or self.longest > MOST_IN_AN_ARRAY + ITEMS_A_TOKEN * n_tokens:
            raise ValueError(
                f"{n_bytes:,} bytes of metadata, with up to {self.longest:,} in an array, are too many for {n_tokens:,} tokens"
            )
        return Header(entries, tensors, self.at)

    def named(self, n: int, read: Callable[[], V]) -> dict[str, V]:
        found: dict[str, V] = {}
        for _ in range(n):
            name = self.string()
            if name in found:
                raise ValueError(f"two entries or tensors are called {brief(name)}")
            found[name] = read()
        return found

    def bytes(self, n: int) -> bytes:
        part = self.data[self.at : self.at + n]
        if self.at + n > len(self.data):
            raise ValueError("it is truncated")
        self.at += n
        return part

    def scalar(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self.bytes(struct.calcsize(f"<{kind}")))[0]

    def length(self) -> int:
        """A number of things of at least a byte each."""
        n: int = self.scalar("Q")
        if n > len(self.data) - self.at:
            raise ValueError(f"a length of {n} in a file of {len(self.data)} bytes")
        return n

    def string(self) -> str:
        return self.bytes(self.length()).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            kind, n = self.scalar("I"), self.length()
            self.longest = max(self.longest, n)
            self.at = self.behind(n) if kind == STRING else self.at + n * struct.calcsize(_format(kind))
            self.bytes(0)
            return n
        return self.scalar(_format(kind))

    def behind(self, n: int) -> int:
        """Where n strings end."""
        read, at = struct.Struct("<Q").unpack_from, self.at
        for _ in range(n):
            at += 8 + read(self.data, at)[0]
        return at

    def tensor(self) -> StoredWeights:
        shape = tuple(self.length() for _ in range(self.scalar("I")))
        return StoredWeights(shape, self.scalar("I"), self.scalar("Q"))


def _format(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"an entry of the unknown type {kind}")
    return SCALARS[kind]
