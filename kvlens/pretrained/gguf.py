"""GGUF files (llama.cpp's format), by Transformers' own reader, which needs the package ``gguf``.

Transformers dequantizes the weights: the model computes what Transformers' model of the same file computes. Tokenizer and chat
template come from the file, too. Before Transformers gets a file, its header is read here: that reader goes through as many
entries as a damaged length says, and builds as many layers.
"""

import mmap
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES
from transformers.utils import is_gguf_available, logging

from kvlens.errors import KVLensError, first_line, warn
from kvlens.files import check_regular
from kvlens.pretrained.checkpoint_files import check_counts, check_positions
from kvlens.pretrained.transformers_model import read_config, read_model
from kvlens.tokenizer import with_bos_in_front

modeling_gguf_pytorch_utils.tqdm = logging.tqdm  # the bar that without_progress_bars switches off
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""How the values of an entry are stored, by the number of their type."""
STRING, ARRAY = 8, 9


class Header(NamedTuple):
    """What a GGUF file says before its weights.

    Attributes:
        entries: scalars and strings by name; of arrays their length.
        sizes: the number of weights in each tensor.
    """

    entries: dict[str, Any]
    sizes: dict[str, int]


def is_gguf(path: Path) -> bool:
    """Whether a regular file is of this format, by its first bytes or its name."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == MAGIC or path.suffix == ".gguf"


def read_gguf(path: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Transformers' model of a GGUF file, dequantized to ``dtype``, and the tokenizer.

    Raises:
        KVLensError: the package ``gguf`` is missing, the file is damaged, or Transformers does not know the architecture.
    """
    header = read_header(path)
    name = header.entries.get("general.architecture")
    check_positions(f"load: {path}", {"max_position_embeddings": header.entries.get(f"{name}.context_length")})
    check_counts("load", path, {"num_hidden_layers": header.entries.get(f"{name}.block_count")}, header.sizes)
    stored = sum(header.sizes.values())
    if not is_gguf_available():
        raise KVLensError(
            f"load: {path} is a GGUF file, which Transformers reads with the package gguf: pip install 'kvlens[gguf]'"
        )
    try:
        with tempfile.TemporaryDirectory() as folder:
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


def read_header(path: Path) -> Header:
    """What a GGUF file says before its weights, each length held against the file's.

    Raises:
        KVLensError: no regular file, another format, or a damaged file.
    """
    check_regular("load", path)
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).header()
    except (OSError, ValueError, struct.error) as error:
        raise KVLensError(f"load: {path} is damaged or no GGUF file ({first_line(error)}); use an intact copy") from error


class _Reader:
    """Reads a file from its beginning; raises ValueError or struct.error where it ends."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def header(self) -> Header:
        if self.bytes(4) != MAGIC:
            raise ValueError(f"it does not begin with {MAGIC.decode()}")
        version = self.scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"version {version} of the format, expected {' or '.join(map(str, VERSIONS))}, little-endian")
        n_tensors, n_entries = self.length(), self.length()
        entries = {self.string(): self.value(self.scalar("I")) for _ in range(n_entries)}
        return Header(entries, dict(self.tensor() for _ in range(n_tensors)))

    def bytes(self, n: int) -> bytes:
        part = self.data[self.at : self.at + n]
        if len(part) < n:
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
            if kind == STRING:
                for _ in range(n):
                    self.bytes(self.length())
            else:
                self.bytes(n * struct.calcsize(_format(kind)))
            return n
        return self.scalar(_format(kind))

    def tensor(self) -> tuple[str, int]:
        name, n_dims, size = self.string(), self.scalar("I"), 1
        for _ in range(n_dims):
            size *= self.length()
        self.bytes(struct.calcsize("<IQ"))  # type and place
        return name, size


def _format(kind: int) -> str:
    if kind not in SCALARS:
        raise ValueError(f"an entry of the unknown type {kind}")
    return SCALARS[kind]
