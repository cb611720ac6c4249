"""A chat's tokens, with special tokens that are written out in its messages read as text, so that they begin no message.

A template writes what begins and ends a message as a string, ``<|im_start|>``, and a tokenizer turns that string into the same
token wherever it stands, in a document, too: text from outside could become a system's message.

1. *Marks* are a tokenizer's special tokens, and the added ones that its template writes (``<think>``).
2. In the characters that the template takes from a message, a mark is text.
3. The whole text is read at once, since what a tokenizer makes of a word may depend on its neighbors. For this, a copy of the
   tokenizer has the marks under other names, of private characters and equal length, so that offsets stay as they are; the
   template's own marks are renamed in the text, and those in messages mean nothing to that copy.

A template whose roles are plain words (``USER:``) has nothing that could be told from the same words in a document.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from kvlens.arguments import Span
from kvlens.errors import KVLensError
from kvlens.templates import written_by_template

ROLES = ("system", "user", "assistant", "tool")
PRIVATE = range(0x100000, 0x10FFFE)
"""Unicode's last plane of private characters, in which the names of marks are written."""


ReadText = tuple[list[int], list[Span] | None]
"""A text as a tokenizer reads it: the ids of its tokens, without a BOS that is not written, and the characters of each; None if
the tokenizer does not tell."""


def read(tokenizer: PreTrainedTokenizerBase, text: str) -> ReadText:
    """Read a text as Transformers does: whatever is written like a mark is one."""
    found = tokenizer(text, add_special_tokens=False)
    return found["input_ids"], found.encodings[0].offsets if tokenizer.is_fast else None


def marks_of(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """The marks by their ids; a token that stands for unknown words is none, unless it is something else, too."""
    template = _written(tokenizer, str(getattr(tokenizer, "chat_template", None) or ""))
    knows_all = tokenizer.is_fast and getattr(tokenizer.backend_tokenizer.model, "unk_token", "") is None
    unknown = None if knows_all else tokenizer.unk_token_id
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    return {
        i: token.content
        for i, token in tokenizer.added_tokens_decoder.items()
        if token.content.strip() and (token.special or token.content in template)
        if i != unknown or i in ends or token.content in template
    }


@lru_cache(maxsize=1)  # every prompt asks for the marks
def _written(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """A chat template's source and what it writes around a message of each role, where it puts strings together."""
    found = [template]
    for role, before in itertools.product(ROLES, ([], [{"role": "user", "content": "-"}])) if template else ():
        with contextlib.suppress(Exception):  # of a role that it refuses, or refuses there
            chat = [*before, {"role": role, "content": "-"}]
            found.append(written_by_template(tokenizer, chat, tokenize=False, add_generation_prompt=True))
    return "\n".join(found)


def marks_in(tokenizer: PreTrainedTokenizerBase, marks: Mapping[int, str], text: str) -> list[str]:
    """The marks that a tokenizer finds in a text by itself, each once, in order."""
    return list(dict.fromkeys(marks[i] for i in read(tokenizer, text)[0] if i in marks))


def without_marks(tokenizer: PreTrainedTokenizerBase, sentences: Iterable[str]) -> list[str]:
    """The sentences that contain no mark: text that is read after a prompt must begin no message, either."""
    marks = marks_of(tokenizer)
    return [sentence for sentence in sentences if not marks_in(tokenizer, marks, sentence)]


def read_as_text(tokenizer: PreTrainedTokenizerBase, marks: Mapping[int, str], text: str, words: Sequence[Span]) -> ReadText:
    """Read a text in which marks among ``words`` are text, and all others are marks.

    Args:
        tokenizer: a fast one.
        marks: of this tokenizer.
        text: as the template writes it.
        words: the ranges of its characters that come from messages.

    Raises:
        KVLensError: a slow tokenizer.
    """
    if not tokenizer.is_fast:
        raise KVLensError(
            "messages: they contain marks of the chat template, and only a fast tokenizer can read these as text; take them "
            "out, or read them as they are, Chat(..., marks='as they are')"
        )
    free = (chr(letter) for letter in PRIVATE if chr(letter) not in text)
    names = {mark: next(free) * len(mark) for mark in marks.values()}
    longest_first = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))
    parts = [
        part if from_message else longest_first.sub(lambda mark: names[mark[0]], part)
        for part, from_message in _parts(text, words)
    ]
    renamed = _renamed(tokenizer.backend_tokenizer.to_str(), tuple(names.items()))
    found = renamed.encode("".join(parts), add_special_tokens=False)
    return found.ids, found.offsets


def _parts(text: str, words: Sequence[Span]) -> Iterator[tuple[str, bool]]:
    """The text in parts, and whether each comes from a message."""
    at = 0
    for start, stop in sorted(words):
        yield text[at:start], False
        yield text[start:stop], True
        at = stop
    yield text[at:], False


@lru_cache(maxsize=1)  # of a large vocabulary a copy takes seconds, and an explanation reads its prompt several times
def _renamed(stored: str, pairs: Sequence[tuple[str, str]]) -> Tokenizer:
    """A copy of the tokenizer in which the marks have other names, and their old ones mean nothing."""
    names, written = dict(pairs), json.loads(stored) | {"truncation": None, "padding": None}
    kept = Tokenizer.from_str(stored).normalizer
    for token in (token for token in written["added_tokens"] if token["content"] in names):
        token["content"] = name = names[token["content"]]
        token["normalized"] &= kept is None or name == kept.normalize_str(name)  # BERT's leaves out private characters
    model = written["model"]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): i for piece, i in model["vocab"].items()}
    else:  # Unigram's, in the order of the ids
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if "merges" in model:  # of some vocabularies a mark is made of smaller pieces
        model["merges"] = [pair for pair in model["merges"] if not names.keys() & {*pair, "".join(pair)}]
    return Tokenizer.from_str(json.dumps(written))
