"""The units that an attribution is about: tokens, words, sentences, paragraphs, or given ranges of tokens."""

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.arguments import Span, checked_spans
from kvlens.errors import nearest

from ..declaration import Option
from ..registry import UNITS
from ..sequences import begins_with_bos
from ..texts import joined, token_texts

END_OF_SENTENCE = (".", "!", "?", "\u2026", "\u3002", "\uff01", "\uff1f")
CLOSING = "\"')]\u201d\u2019\u00bb"
"""Marks that may stand between the end of a sentence and the blank behind it."""
BY = Option("the units", choices=UNITS)
"""How a batch chooses them."""


class Unit(NamedTuple):
    """A range of the prompt's tokens.

    Attributes:
        text: its tokens' text.
        start, stop: token range, stop left out; BOS has position 0 where there is one.
    """

    text: str
    start: int
    stop: int


Spans = Sequence[Span]


def units_of(model: KVModel, prompt: Int[Tensor, " pos"], by: str | Spans) -> list[Unit]:
    """The prompt cut into units, in order; BOS belongs to none.

    Args:
        model: whose tokenizer reads the tokens.
        prompt: [pos].
        by: one of :data:`LEVELS`, or token ranges (start, stop), which may leave tokens out.

    Raises:
        KVLensError: an unknown level, words or sentences without a tokenizer, ranges that are empty, overlap, lie outside the
            prompt or hold BOS, a prompt of BOS alone.
    """
    first = int(begins_with_bos(model, prompt))
    texts = token_texts(model, prompt)
    if not isinstance(by, str):
        ranges = _checked_ranges(by, len(prompt), first)
    elif by not in LEVELS:
        raise KVLensError(f"by: expected {', '.join(LEVELS)} or token ranges, got {by!r}{nearest(by, LEVELS)}")
    elif by != "token" and model.tokenizer is None:
        raise KVLensError(f"by: this model has no tokenizer, so that its prompts have no {by}s; give 'token' or token ranges")
    else:
        starts = [i for i in range(first, len(texts)) if i == first or LEVELS[by](texts[i - 1], texts[i])]
        ranges = list(itertools.pairwise([*starts, len(texts)]))
    if not ranges:
        raise KVLensError("by: the prompt has nothing but BOS, and no unit to take away; give a longer prompt, or other ranges")
    return [Unit(joined(texts[start:stop]), start, stop) for start, stop in ranges]


def positions_of(units: Sequence[Unit], n_tokens: int) -> Bool[Tensor, "unit pos"]:
    """True at each unit's own positions."""
    own = torch.zeros(len(units), n_tokens, dtype=torch.bool)
    for row, unit in enumerate(units):
        own[row, unit.start : unit.stop] = True
    return own


def _token(before: str, after: str) -> bool:
    return True


def _word(before: str, after: str) -> bool:
    return after[:1].isspace() or before[-1:].isspace() or (after[:1].isalnum() and not before[-1:].isalnum())


def _sentence(before: str, after: str) -> bool:
    ended = before.rstrip().rstrip(CLOSING).endswith(END_OF_SENTENCE)
    return "\n" in before or (ended and not after[:1].isdigit() and after.strip(CLOSING) != "")


def _paragraph(before: str, after: str) -> bool:
    return "\n" in before and "\n" not in after


LEVELS: dict[str, Callable[[str, str], bool]] = dict(zip(UNITS, (_token, _word, _sentence, _paragraph), strict=True))
"""name -> whether a unit begins between two tokens, from their texts; finest first."""


def _checked_ranges(spans: Spans, n_tokens: int, first: int) -> list[Span]:
    ranges = checked_spans("by", spans, n_tokens)
    if ranges and ranges[0][0] < first:
        raise KVLensError(f"by: the range {ranges[0]!r} holds BOS, which is always there and no unit; begin at {first}")
    return ranges
