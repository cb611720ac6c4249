"""Next-token prediction on windows of a text: the docs corpus, Python's help topics, or any text file or folder of text files.

The held-out part is that of :class:`kvlens.corpus.DocsCorpus`, or the last twentieth of the characters of each file or topic.
The tokenizer is given, or trained on the training part. Tokens and tokenizer are made on first use, and kept for later
processes (:mod:`kvlens.corpus.tokenized`).
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from pydoc_data.topics import topics
from typing import Annotated, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvlens.arguments import path_of
from kvlens.checks import Seed, Within, ensure
from kvlens.conversion import convert_prompt
from kvlens.corpus import DocsCorpus, TokenWindows, build_docs_corpus, train_bpe_tokenizer
from kvlens.corpus.docs import docs_versions
from kvlens.corpus.tokenized import Tokenized, kept_tokens
from kvlens.errors import KVLensError
from kvlens.files import check_regular, checksum_of_json, reading_file
from kvlens.model import HookedKVTransformer
from kvlens.tasks.task import Batch, Model, Task
from kvlens.tokenizer import read_tokenizer

DOCS, TOPICS = "docs", "topics"
HELDOUT_SHARE = 0.05
MOST_BYTES = 259
"""The smallest vocabulary of a byte-level tokenizer: 256 bytes, 3 special tokens."""
N_CONTEXT, N_TEXT = 256, 64
"""Tokens of context and of the text after it with which a shipped model's use of its context is measured."""
WINDOWS_AT_ONCE = 32


@dataclass(frozen=True)
class TextTask(Task):
    """Windows of text; every token but the first is predicted.

    Attributes:
        corpus: "docs" (:func:`kvlens.corpus.build_docs_corpus`), "topics" (the topics of Python's ``help()``: half a million
            characters, loaded at once, for quick trials), or the path of a UTF-8 text file or a folder of ``*.txt``.
        vocab_size: vocabulary of the byte-level BPE that is trained if ``tokenizer`` is None.
        tokenizer: the folder of a Hugging Face tokenizer that has a BOS, or None.
        length: tokens of a training window, BOS included.
        heldout_length: tokens of a held-out window; None takes ``length``.

    Raises:
        KVLensError: a length below 2, or a corpus or tokenizer that cannot be read (when it is first needed).
    """

    name: ClassVar[str] = "text"
    corpus: str = DOCS
    vocab_size: Annotated[int, Within(MOST_BYTES)] = 1024
    tokenizer: str | None = None
    length: Annotated[int, Within(2)] = 512
    heldout_length: Annotated[int, Within(2)] | None = None

    @property
    def n_positions(self) -> int:
        """Tokens of the longer window."""
        return max(self.length, self.heldout_length or 0)

    @property
    def d_input(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return len(self.built_tokenizer)

    @cached_property
    def built_tokenizer(self) -> PreTrainedTokenizerFast:
        """The given tokenizer, or the one trained on the training part."""
        if self.tokenizer is not None:
            return read_tokenizer(self.tokenizer)
        _, trained = self._tokenized
        assert trained is not None
        return trained

    @cached_property
    def texts(self) -> dict[str, list[str]]:
        """The documents of each split."""
        if self.corpus == DOCS:
            corpus = docs_corpus()
            return {"train": [d.text for d in corpus.train], "heldout": [d.text for d in corpus.heldout]}
        texts = list(topics.values()) if self.corpus == TOPICS else _read(path_of("task 'text': corpus", self.corpus))
        cut = [(text, round(len(text) * (1 - HELDOUT_SHARE))) for text in texts]
        return {"train": [text[:at] for text, at in cut], "heldout": [text[at:] for text, at in cut]}

    @property
    def windows(self) -> Mapping[str, TokenWindows]:
        """The tokens of each split."""
        return self._tokenized[0]

    @cached_property
    def _tokenized(self) -> Tokenized:
        given = None if self.tokenizer is None else self.built_tokenizer
        texts = docs_versions() if self.corpus == DOCS else checksum_of_json(self.texts)
        tokenizer = self.vocab_size if given is None else given.backend_tokenizer.to_str()
        return kept_tokens({"texts": texts, "tokenizer": tokenizer}, lambda: tokenized(self.texts, given, self.vocab_size))

    def data_hash(self) -> str:
        """sha256 of the tokens of both splits."""
        digest = hashlib.sha256()
        for windows in self.windows.values():
            digest.update(windows.tokens.numpy().tobytes())
        return digest.hexdigest()

    def describe_data(self) -> dict[str, object]:
        """The source of the text, its licences, and the number of tokens in each split."""
        tokens = {split: len(windows) for split, windows in self.windows.items()}
        if self.corpus == DOCS:
            return {"source": "docstrings and help topics as installed", "tokens": tokens, **docs_corpus().summary()}
        return {"source": self.corpus, "tokens": tokens, "licences": {}, "tokens_hash": self.data_hash()}

    def measure_more(self, model: Model, n_sequences: int, loss: float) -> Mapping[str, object]:
        """Bits per character; for linear attention also the gain from a converted context, if windows are long enough."""
        self._check_kind(model, HookedKVTransformer)
        assert isinstance(model, HookedKVTransformer)
        windows = self.windows["heldout"].consecutive(self.heldout_length or self.length, n_sequences)
        bits = loss / self.windows["heldout"].chars_per_token / math.log(2)
        measured = {"sequences": len(windows), "bits_a_character": bits}
        if model.cfg.attention != "linear" or windows.shape[1] < N_CONTEXT + N_TEXT:
            return measured
        effect = context_effect(model, windows[:, : N_CONTEXT + N_TEXT])
        return {**measured, "n_context": N_CONTEXT, "n_text": N_TEXT, **effect}

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw windows at random positions of ``split``."""
        self.check_drawable(batch_size, generator, split)
        length = self.length if split == "train" else self.heldout_length or self.length
        return next_token_batch(self.windows[split].sample(batch_size, length, generator))

    def heldout(self, n_sequences: int, seed: int = 0) -> Batch:
        """Windows spread evenly over the held-out part, the same for every seed; fewer if the held-out part is too short."""
        ensure(f"task {self.name!r}: seed", Seed, seed)
        windows = self.windows["heldout"].consecutive(self.heldout_length or self.length, n_sequences)
        return next_token_batch(windows)


def next_token_batch(tokens: Tensor) -> Batch:
    """Make a batch from windows [batch pos]: every token but the first is a target."""
    scored = torch.ones_like(tokens, dtype=torch.bool)
    scored[:, -1] = False
    return Batch(tokens, tokens.roll(-1, dims=1), scored)


def tokenized(texts: Mapping[str, Sequence[str]], given: PreTrainedTokenizerFast | None, vocab_size: int) -> Tokenized:
    """The tokens of each split by the ``given`` tokenizer, or by one of ``vocab_size`` trained on the training part."""
    tokenizer = train_bpe_tokenizer(texts["train"], vocab_size) if given is None else given
    windows = {split: TokenWindows.from_texts(part, tokenizer) for split, part in texts.items()}
    return windows, tokenizer if given is None else None


@cache
def docs_corpus() -> DocsCorpus:
    """The docs corpus, built once per process (about ten seconds)."""
    return build_docs_corpus()


def _read(path: Path) -> list[str]:
    files = sorted(path.rglob("*.txt")) if path.is_dir() else [path]
    for file in files:
        check_regular("task 'text'", file)
    try:
        with reading_file("task 'text'", path):
            texts = [file.read_text(encoding="utf-8") for file in files]
    except UnicodeDecodeError as error:
        raise KVLensError(f"task 'text': a file of {path} is not UTF-8 text (byte {error.start})") from error
    texts = [text for text in texts if text]
    if not texts:
        raise KVLensError(f"task 'text': {path} holds no text (of a folder, .txt files are read)")
    return texts


@torch.no_grad()
def context_effect(model: HookedKVTransformer, windows: Int[Tensor, "window pos"]) -> dict[str, float]:
    """How much a context helps a model, as tokens before the text and as a bias: a requirement for shipped models.

    Args:
        model: with linear attention and a tokenizer that has a BOS.
        windows: `N_CONTEXT` tokens of context, BOS included, and the text, of which every token but the first is predicted.

    Returns:
        Mean next-token losses on the text, nats per token, over the same predictions: ``without`` (after BOS alone),
        ``with_context``, ``converted`` (with the context as a bias); ``relative_error`` of the logits with the bias against
        those with the context, ||new - old|| / ||old||; and ``gain``, what the converted context saves.
    """
    losses, squares = torch.zeros(3, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for batch in windows.split(WINDOWS_AT_ONCE):
        batch = batch.to(model.W_E.device)
        text = batch[:, N_CONTEXT:]
        bos = torch.full_like(text[:, :1], model.tokenizer.bos_token_id)
        alone = model(torch.cat([bos, text], dim=1))[:, 1:]
        original = model(batch)[:, N_CONTEXT:]
        with model.kv_bias(convert_prompt(model, batch[:, :N_CONTEXT])):
            converted = model(text)
        losses += torch.stack([_summed_loss(logits, text) for logits in (alone, original, converted)])
        squares += torch.stack([(converted - original).double().square().sum(), original.double().square().sum()]).cpu()
    names = ("without", "with_context", "converted")
    found = dict(zip(names, (losses / len(windows)).tolist(), strict=True))
    return {**found, "relative_error": float((squares[0] / squares[1]).sqrt()), "gain": found["without"] - found["converted"]}


def _summed_loss(logits: Tensor, text: Tensor) -> Tensor:
    """Loss in float64, summed over windows and averaged over their predictions."""
    log_probs = logits[:, :-1].double().log_softmax(dim=-1)
    return -log_probs.gather(-1, text[:, 1:, None]).squeeze(-1).mean(dim=1).sum().cpu()
