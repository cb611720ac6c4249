"""Texts as tokens: a byte-level BPE tokenizer, windows on which language models are trained, and the folder that keeps both.

TransformerLens accepts the tokenizer without a network. Byte-level means that the alphabet is the 256 bytes: any Unicode text
can be encoded, and decoding returns exactly the encoded text. Small vocabularies (1024) suit small models: the embedding stays
small, and each token is seen often.

For windows all documents are concatenated in one flat tensor, with BOS before each, which marks the boundary that a window may
cross. A window of length n is the BOS token and n - 1 consecutive tokens from any position of that tensor. TransformerLens
prepends BOS to every prompt, so with the BOS the model sees the same token at position 0 in training and in use.

The folder is the one that Hugging Face's libraries use for such files (``HF_ASSETS_CACHE``). Building and tokenizing the docs
corpus takes half a minute of every process. The result is kept under a hash of everything that decides it: the texts (for the
docs corpus, the versions of the packages they are read from), the tokenizer, the version of the ``tokenizers`` package and the
source of :mod:`kvlens.corpus`. A file that is missing, damaged or not writable only costs the time of making it again.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
from huggingface_hub import cached_assets_path
from jaxtyping import Int
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.checks import Count, Within, checked
from kvlens.errors import KVLensError
from kvlens.files import write_atomically
from kvlens.files.tensors import checked_tensor_bytes, read_checked_tensors
from kvlens.tokenizer import with_bos

BOS_TOKEN, EOS_TOKEN, PAD_TOKEN = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN, "pad_token": PAD_TOKEN}
VocabularySize = Annotated[int, Within(256 + 3, 2**20)]
"""Of 256 bytes and 3 special tokens; tokenizers allocates memory for all at once, and may abort."""
_NAME = "kvlens-byte-bpe"


@checked
def train_bpe_tokenizer(texts: Iterable[str], vocab_size: VocabularySize = 1024) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer; equal texts give an equal tokenizer.

    Args:
        texts: texts on which merges are counted, read once.
        vocab_size: size of the vocabulary: 3 special tokens (BOS 0, EOS 1, PAD 2), 256 bytes, the rest merges. It is smaller
            if no pair is left that occurs twice in the texts.

    Returns:
        A tokenizer that pads on the right, prepends BOS unless ``add_special_tokens=False``, and decodes losslessly. As with
        every Hugging Face tokenizer, the spelling of a special token in a text is read as that token.

    Raises:
        KVLensError: ``vocab_size`` is below 259, or above a million; ``texts`` is one string, or has other values.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[BOS_TOKEN, EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return restored_tokenizer(tokenizer)


def restored_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """A trained byte-level BPE, as `train_bpe_tokenizer` returns it."""
    return with_bos(tokenizer, _NAME, **SPECIAL_TOKENS)


@checked
def encode_texts(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> list[list[int]]:
    """Return each text's token ids, without BOS, in one parallel call (megabytes per second)."""
    encodings = tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


FORMAT, FORMAT_VERSION = "kvlens.tokens", 3
logger = logging.getLogger(__name__)


class TokenWindows:
    """A flat tensor of tokens and the windows cut from it.

    Attributes:
        tokens: Int[Tensor, "total"], on the CPU.
        bos_token_id: the token before each document, and at the start of each window.
        n_documents: number of documents.
        n_chars: number of characters of the tokenized text, or 0 if unknown.
    """

    @checked
    def __init__(self, tokens: Int[Tensor, " total"], bos_token_id: int, *, n_chars: int = 0):
        """Use an existing flat tensor; `from_texts` makes one.

        Raises:
            KVLensError: the tensor is not flat, or does not hold integers.
        """
        if tokens.ndim != 1 or tokens.is_floating_point() or tokens.is_complex():
            raise KVLensError(
                f"TokenWindows: tokens must be a flat tensor of integers, got {tokens.dtype} {list(tokens.shape)}"
            )
        self.tokens = tokens.long()
        self.bos_token_id = bos_token_id
        self.n_documents = int((tokens == bos_token_id).sum())
        self.n_chars = n_chars

    @classmethod
    @checked
    def from_texts(cls, texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> "TokenWindows":
        """Tokenize ``texts`` (such as ``[document.text for document in corpus.train]``), BOS before each.

        Raises:
            KVLensError: there is no text, or the tokenizer has no BOS.
        """
        bos = tokenizer.bos_token_id
        pieces = [torch.tensor([bos, *ids]) for ids in encode_texts(tokenizer, texts)]
        return cls(torch.cat(pieces), bos, n_chars=sum(map(len, texts)))

    def __len__(self) -> int:
        """Number of tokens, the BOS of each document included."""
        return self.tokens.numel()

    @property
    def chars_per_token(self) -> float:
        """Characters of text per token, not counting BOS: loss / (ln 2 * this) is bits per character."""
        return self.n_chars / max(1, len(self) - self.n_documents)

    @checked
    def sample(self, batch: Count, length: int, generator: torch.Generator) -> Int[Tensor, "{batch} {length}"]:
        """Return ``batch`` windows at uniformly random positions.

        Args:
            batch: number of windows.
            length: tokens in each.
            generator: source of the randomness, on the CPU; equal seeds give equal windows.

        Raises:
            KVLensError: a window would be longer than the text, or shorter than 2.
        """
        stride = self._stride(length, "sample")
        starts = torch.randint(len(self) - stride + 1, (batch, 1), generator=generator)
        return self._with_bos(self.tokens[starts + torch.arange(stride)])

    @checked
    def consecutive(self, length: int, max_windows: Count | None = None) -> Int[Tensor, "window {length}"]:
        """Return non-overlapping windows in order, for evaluation; an incomplete last window is left out.

        Args:
            length: tokens in each.
            max_windows: return at most this many windows, spread evenly over the text; None returns all.

        Raises:
            KVLensError: a window would be longer than the text, or shorter than 2; ``max_windows`` is below 1.
        """
        stride = self._stride(length, "consecutive")
        n_windows = len(self) // stride
        windows = self.tokens[: n_windows * stride].view(n_windows, stride)
        if max_windows is not None:
            n_kept = min(max_windows, n_windows)
            windows = windows[torch.arange(n_kept) * n_windows // n_kept]
        return self._with_bos(windows)

    def _stride(self, length: int, method: str) -> int:
        """Tokens of text in a window of this length."""
        stride = length - 1
        if length < 2 or stride > len(self):
            raise KVLensError(
                f"TokenWindows.{method}: length must be from 2 to {len(self) + 1} (the text has {len(self)} tokens), got "
                f"{length}"
            )
        return stride

    def _with_bos(self, windows: Int[Tensor, "window stride"]) -> Int[Tensor, "window pos"]:
        return torch.cat([windows.new_full((len(windows), 1), self.bos_token_id), windows], dim=1)


Tokenized = tuple[Mapping[str, TokenWindows], PreTrainedTokenizerFast | None]
"""The tokens of each split, and the tokenizer if it was trained on them (else None)."""


def kept_tokens(of: Mapping[str, object], make: Callable[[], Tokenized]) -> Tokenized:
    """What ``make`` returns, from the file kept for ``of`` if there is one.

    Args:
        of: JSON values that decide the tokens, together with the source of :mod:`kvlens.corpus`.
        make: called if nothing is kept; its tokenizer is one of :func:`~kvlens.corpus.tokenized.train_bpe_tokenizer`, or None.
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
    splits, tokenizer = made
    tokens = {split: windows.tokens.to(torch.int32) for split, windows in splits.items()}
    facts = {split: [windows.bos_token_id, windows.n_chars] for split, windows in splits.items()}
    header = {"format": FORMAT, "format_version": str(FORMAT_VERSION), "windows": json.dumps(facts)}
    if tokenizer is not None:
        header["tokenizer"] = tokenizer.backend_tokenizer.to_str()
    write_atomically(path, checked_tensor_bytes(tokens, header))


def _read(path: Path) -> Tokenized:
    tokens, header = read_checked_tensors(path, "kept tokens", FORMAT, FORMAT_VERSION)
    windows = {
        split: TokenWindows(tokens[split], bos, n_chars=n_chars)
        for split, (bos, n_chars) in json.loads(header["windows"]).items()
    }
    trained = header.get("tokenizer")
    return windows, None if trained is None else restored_tokenizer(Tokenizer.from_str(trained))
