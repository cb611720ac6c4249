"""A response: the tokens that a model answers with, and the words that they spell."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.texts import joined, token_texts

WORD = re.compile(r"[^\W_]+(?:['\u2019.,:/@&+\u2013-][^\W_]+|_+[^\W_]+)*|[^\s]", re.UNICODE)
"""A word, with the marks inside it (``3.5``, ``1,000``, ``half-time``, ``O'Brien``, ``snake_case``), or a mark by itself."""


class Word(NamedTuple):
    """A word of a response, or a mark.

    Attributes:
        text: without blanks; of a token that ends the response, its name.
        start, stop: range of the response's tokens, stop left out.
        is_word: False for a mark.
    """

    text: str
    start: int
    stop: int
    is_word: bool


@dataclass(frozen=True)
class Response:
    """What a model answered.

    Attributes:
        tokens: [pos], with the token that ended it.
        words: words and marks, in order; each token belongs to at most one.
        text: without the token that ended it.
    """

    tokens: Int[Tensor, " pos"]
    words: tuple[Word, ...]
    text: str

    @classmethod
    def of(cls, model: KVModel, before: Int[Tensor, " before_pos"], tokens: Int[Tensor, " pos"]) -> "Response":
        """Read behind other tokens; without a tokenizer every token is a word."""
        texts = token_texts(model, torch.cat([before, tokens]))[len(before) :]
        special = set(getattr(model.tokenizer, "all_special_ids", ()) or ())
        if model.tokenizer is None:
            texts = [f" {text}" for text in texts]  # a word each
        shown = ["" if int(token) in special else text for token, text in zip(tokens, texts, strict=True)]
        words = _words(shown)
        words += [Word(texts[i], i, i + 1, False) for i, token in enumerate(tokens.tolist()) if token in special]
        return cls(tokens, tuple(sorted(words, key=lambda word: word.start)), joined(shown).strip())


def _words(texts: list[str]) -> list[Word]:
    """A token belongs to the word that has most of its characters, the first of equals."""
    text, owner = "".join(texts), [i for i, each in enumerate(texts) for _ in each]
    found = [(match[0], match.span()) for match in WORD.finditer(text)]
    shares: dict[int, dict[int, int]] = {}
    for number, (_, (start, stop)) in enumerate(found):
        for place in range(start, stop):
            of_token = shares.setdefault(owner[place], {})
            of_token[number] = of_token.get(number, 0) + 1
    tokens_of: dict[int, list[int]] = {}
    for token, of_token in shares.items():
        tokens_of.setdefault(max(of_token, key=lambda number: (of_token[number], -number)), []).append(token)
    return [
        Word(found[number][0], min(own), max(own) + 1, found[number][0][0].isalnum())
        for number, own in sorted(tokens_of.items())
    ]


def stop_tokens(model: KVModel) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's end of text, and those of the model's generation settings."""
    found: set[int] = set()
    original = getattr(model, "original_model", None)
    for source in (model.tokenizer, getattr(original, "generation_config", None)):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


@torch.no_grad()
def greedy(
    model: KVModel,
    biases: KVBias,
    first: Int[Tensor, " first_pos"],
    forced: Int[Tensor, "row n_forced"],
    n_forced: Int[Tensor, " row"],
    n_most: int,
    stops: Any,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> list[list[int]]:
    """Greedy texts under each bias of a batch, whose first tokens are given.

    All rows are read together, token by token: a row whose first tokens are given is fed with these until they end.

    Args:
        biases: of what comes before, a batch.
        first: tokens between that and the texts, which are read and are no part of these.
        forced: how the texts begin; of row i only the first ``n_forced[i]``.
        n_most: tokens of a text.
        stops: ``stops(tokens)`` says whether a text ends there.
        on_tokens: called with the number of tokens that each pass read for texts that had not ended.

    Returns:
        Row by row the tokens, the forced ones first.
    """
    n_rows, given = len(n_forced), n_forced.tolist()
    n_shared = min(given)
    texts = [row[:n_shared].tolist() for row in forced]
    ended = [False] * n_rows
    with model.kv_bias(biases):
        tokens, cache = torch.cat([first.expand(n_rows, -1), forced[:, :n_shared]], dim=1), None
        while True:
            on_tokens(tokens.shape[1] * (n_rows - sum(ended)))
            logits, cache = model.next_logits(tokens, cache)  # type: ignore[attr-defined]
            chosen = logits.argmax(dim=-1).tolist()
            for row, text in enumerate(texts):
                if ended[row]:
                    continue
                at = len(text)
                text.append(int(forced[row, at]) if at < given[row] else chosen[row])
                ended[row] = at >= given[row] and (len(text) >= n_most or stops(text))
            if all(ended):
                return texts
            tokens = torch.tensor([[text[-1]] for text in texts], device=first.device)
