"""Tokenized texts, kept in the folder that Hugging Face's libraries use for such files (``HF_ASSETS_CACHE``).

Building and tokenizing the docs corpus takes half a minute of every process. The result is kept under a hash of everything that
decides it: the texts (for the docs corpus, the versions of the packages they are read from), the tokenizer, the version of the
``tokenizers`` package and the source of :mod:`kvlens.corpus`. A file that is missing, damaged or not writable only costs the
time of making it again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import cached_assets_path
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from kvlens.corpus.tokenizer import restored_tokenizer
from kvlens.corpus.windows import TokenWindows
from kvlens.errors import KVLensError
from kvlens.files import write_atomically
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors

FORMAT, FORMAT_VERSION = "kvlens.tokens", 3
logger = logging.getLogger(__name__)


class Tokenized(NamedTuple):
    """The tokens of each split, and the tokenizer if it was trained on them (else None)."""

    windows: Mapping[str, TokenWindows]
    tokenizer: PreTrainedTokenizerFast | None


def kept_tokens(of: Mapping[str, object], make: Callable[[], Tokenized]) -> Tokenized:
    """What ``make`` returns, from the file kept for ``of`` if there is one.

    Args:
        of: JSON values that decide the tokens, together with the source of :mod:`kvlens.corpus`.
        make: called if nothing is kept; its tokenizer is one of :func:`~kvlens.corpus.tokenizer.train_bpe_tokenizer`, or None.
    """
    source = "".join(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py")))
    name = hashlib.sha256(json.dumps([dict(of), source, version("tokenizers")], sort_keys=True).encode()).hexdigest()[:32]
    try:
        path = cached_assets_path("kvlens", namespace="corpora") / f"{name}.safetensors"
        if path.is_file():
            return _read(path)
    except (OSError, KVLensError) as error:
        logger.warning("the tokens of a corpus are made again, since the kept ones cannot be read: %s", error)
        return make()
    made = make()
    with suppress(KVLensError):
        _write(path, made)
    return made


def _write(path: Path, made: Tokenized) -> None:
    tokens = {split: windows.tokens.to(torch.int32) for split, windows in made.windows.items()}
    facts = {split: [windows.bos_token_id, windows.n_chars] for split, windows in made.windows.items()}
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "windows": json.dumps(facts)}
    if made.tokenizer is not None:
        header["tokenizer"] = made.tokenizer.backend_tokenizer.to_str()
    write_atomically(path, checked_tensor_bytes(tokens, header))


def _read(path: Path) -> Tokenized:
    tokens, header = read_checked_tensors(path, "kept tokens", FORMAT, FORMAT_VERSION)
    windows = {
        split: TokenWindows(tokens[split], bos, n_chars=n_chars)
        for split, (bos, n_chars) in json.loads(header["windows"]).items()
    }
    trained = header.get("tokenizer")
    return Tokenized(windows, None if trained is None else restored_tokenizer(Tokenizer.from_str(trained)))
