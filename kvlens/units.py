"""What a prompt is cut into: messages, documents, sentences, words ..., each a range of the prompt's tokens with a name.

1. A :class:`Layout` is a prompt's text, its tokens with the characters of each, and its *pieces*: what may be taken out of it.
   A raw prompt is one piece; a chat has one for each message and document. BOS, the marks of a chat's template and its question
   lie in none.
2. The text of each piece is cut into spans (:data:`CUTS`). White space belongs to the span before it, and a span of nothing
   else is none.
3. A sentence ends at a period where both say so: rules for English prose, and sentencex, which knows the abbreviations and
   ordinals of the text's language (``Am 3. Mai``, ``Av. Colón``). sentencex alone cuts at ``fig. 3`` and knows no wrapped
   lines; of 34 short texts of five languages the rules cut 22 as a reader would, sentencex 26, and both together 28.
4. A token belongs to the span that has most of its characters, white space not counted; to none if most are outside of all.
   Of equal ones it belongs to the first.
"""

import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.arguments import UNITS, Span, checked_spans
from kvlens.errors import KVLensError, brief, nearest, nearest_name
from kvlens.model.protocol import KVModel
from kvlens.texts import joined, token_texts

By = str | Sequence[str] | Sequence[Span]
WRAPPED = 50
"""A line of so many characters goes on in the next one, if that begins with a lowercase letter."""
_NEVER_LAST = (
    "Dr dr Mr Mrs Ms Prof prof St Gen Col Sgt Capt Lt Rev Hon Gov Sen Rep Mt Fig Figs fig figs Eq eq Sec sec Vol vol Ch ch pp "
    "cf vs viz ca approx max min tel Tel e.g i.e E.g I.e al Jan Feb Aug Sept Oct Nov Dec"
)
_OPENERS = (
    "A After All An And As At But By For From He Her His However I If In It Its My No On Our She So That The Their Then There "
    "These They This Those To We What When Where Who Why You"
)
NEVER_LAST, OPENERS = frozenset(_NEVER_LAST.split()), frozenset(_OPENERS.split())
"""Abbreviations that end no sentence; words that seldom go on with one."""
BEFORE_CAPITALS = frozenset(("etc", "a.m", "p.m"))
"""Abbreviations that end a sentence where a capital follows."""
BEFORE_OPENERS = frozenset(("Inc", "Ltd", "Co", "Corp", "Jr", "Sr", "Bros"))
"""Abbreviations that end one, as acronyms and initials do, before one of `OPENERS`: 'in the U.S. The'."""
LANGUAGES = ("de", "en", "es", "fr", "it", "ja", "nl", "pl", "pt", "ru", "sv", "zh")
"""That a text is taken to be in one of; of a few words, more of them would be confused."""
ENOUGH = 2000
"""Characters by which its language is told."""
_CLOSING = "\"')\\]\u201d\u2019\u00bb*_"
_END = re.compile(f"(?:[.!?\u2026]+[{_CLOSING}]*(?=\\s)|[\u3002\uff01\uff1f]+[{_CLOSING}]*)\\s*")
_LAST_WORD = re.compile(r"[\w.'\u2019-]*$")
_FIRST_WORD = re.compile(r"[\"'(\[\u201c\u2018\u00ab*_]*([\w'\u2019]*)")
_LETTERS = re.compile(r"[A-Za-z](\.[A-Za-z])*")
_WHITE = re.compile(r"\s*")
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")
_COMMENT = re.compile(r"(^|\s)\s*(#\s|//).*$")
_OPENS_JSON = re.compile(r"^[^\S\n]*(?=[\[{])", re.MULTILINE)
_JSON_STRING = re.compile(r'(?P<before>[\[,]\s*)?(?P<brace>\{\s*)?(?P<string>"(?:[^"\\]|\\.)*")(?P<colon>\s*:)?')
LONGEST_WORD = 40
NAMED = 40
"""Characters of a given string that name it."""


class Unit(NamedTuple):
    """A range of a prompt's tokens, which can be taken out by itself.

    Attributes:
        name: as a person would say it: ``minutes.txt, sentence 5``.
        text: of its tokens.
        start, stop: its tokens' positions, counted from the prompt's first; stop is left out.
    """

    name: str
    text: str
    start: int
    stop: int


class Passage(NamedTuple):
    """A message or document: characters [start, stop) of a layout's text; a raw prompt has the name ''."""

    name: str
    start: int
    stop: int


class NamedSpan(NamedTuple):
    """What a piece is cut into: characters [start, stop); without a noun its name is the piece's."""

    piece: str
    noun: str | None
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Layout:
    """A prompt before it is cut.

    Attributes:
        text: the whole of it; without a BOS that is not written.
        tokens: [pos], BOS included.
        spans: the characters of each token.
        pieces: what is cut.
        asked: what is not, but may be named as a given string: a chat's question.
        names: the names of documents that stand in front of these, which are not cut either.
    """

    text: str
    tokens: Int[Tensor, " pos"]
    spans: list[Span]
    pieces: list[Passage]
    asked: list[Passage]
    names: Sequence[Passage] = ()

    def first(self, n: int) -> "Layout":
        """Its first ``n`` tokens."""
        end = max(stop for _, stop in self.spans[:n])
        kept = [
            [each._replace(stop=min(each.stop, end)) for each in of if each.start < end] for of in (self.pieces, self.asked)
        ]
        return Layout(self.text[:end], self.tokens[:n], self.spans[:n], *kept)


def layout_of_tokens(model: KVModel, tokens: Int[Tensor, " pos"]) -> Layout:
    """The layout of a raw prompt: all of it but a BOS in front is one piece."""
    first = int(begins_with_bos(model, tokens))
    ids, tokenizer = tokens[first:].tolist(), model.tokenizer
    if tokenizer is not None and tokenizer.is_fast:
        text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        again = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        if again["input_ids"] == ids:
            return Layout(text, tokens, [(0, 0)] * first + tiled(again["offset_mapping"]), [Passage("", 0, len(text))], [])
    texts = token_texts(model, tokens)[first:]
    ends = [0, *itertools.accumulate(map(len, texts))]
    spans = [(0, 0)] * first + list(itertools.pairwise(ends))
    return Layout("".join(texts), tokens, spans, [Passage("", 0, ends[-1])], [])


def begins_with_bos(model: KVModel, tokens: Int[Tensor, " pos"]) -> bool:
    """Whether the first token is the tokenizer's BOS."""
    return model.tokenizer is not None and len(tokens) > 0 and int(tokens[0]) == model.tokenizer.bos_token_id


def pieces_of_tokens(layout: Layout) -> list[Passage | None]:
    """The message, document or question that each token belongs to; None for BOS and marks."""
    pieces = [*layout.pieces, *layout.asked]
    owners = _owners(layout, [NamedSpan(piece.name, None, piece.start, piece.stop) for piece in pieces])
    return [None if owner is None else pieces[owner] for owner in owners]


def always_there(layout: Layout) -> Bool[Tensor, " pos"]:
    """True at tokens that are in no unit whatever the level: BOS, and the marks and the question of a chat."""
    return torch.tensor([owner is None for owner in _owners(layout, _spans(layout, "message"))])


def tiled(spans: Iterable[Span]) -> list[Span]:
    """Each token's characters, with those that the tokenizer trimmed in front of it (GPT-2's does so with blanks)."""
    found, end = [], 0
    for start, stop in spans:
        found.append((min(start, end), max(stop, min(start, end))))
        end = max(end, stop)
    return found


def cut(model: KVModel, layout: Layout, by: By) -> list[Unit]:
    """The units of a prompt, in order.

    Args:
        model: whose tokenizer reads the tokens.
        layout: the prompt.
        by: one of :data:`~kvlens.arguments.UNITS`; or strings that occur in it, once each; or ranges of tokens (start, stop).

    Raises:
        KVLensError: an unknown level, a level of text without a tokenizer, strings that do not occur (the nearest sentence is
            named), occur twice or overlap, ranges that are empty, overlap, lie outside or hold BOS, a prompt without any unit.
    """
    texts = token_texts(model, layout.tokens)
    if isinstance(by, str) and by not in UNITS:
        raise KVLensError(f"by: expected {', '.join(UNITS)}, given strings or token ranges, got {by!r}{nearest(by, UNITS)}")
    given = not isinstance(by, str) and bool(len(by)) and all(isinstance(each, str) for each in by)
    if not isinstance(by, str) and not given:
        first = int(begins_with_bos(model, layout.tokens))
        named = [(f"tokens {start} to {stop - 1}", (start, stop)) for start, stop in _checked_ranges(by, len(texts), first)]
    elif model.tokenizer is None and by != "token":
        raise KVLensError("by: this model has no tokenizer, so its prompts are no text; give 'token' or token ranges")
    else:
        named = _numbered(_given(layout, by), layout) if given else _numbered(_spans(layout, str(by)), layout, by == "token")
    if not named:
        raise KVLensError(_no_unit(layout))
    if given and len(named) < len(by):
        raise KVLensError(f"by: {brief(_missing(by, named))} is less than a token; give more of the text around it")
    return [Unit(name, joined(texts[start:stop]), start, stop) for name, (start, stop) in named]


def units_of_names(model: KVModel, layout: Layout) -> list[Unit]:
    """The names of documents as units, which :func:`cut` leaves out."""
    texts, spans = token_texts(model, layout.tokens), [NamedSpan(name, None, *span) for name, *span in layout.names]
    return [Unit(name, joined(texts[start:stop]), start, stop) for name, (start, stop) in _numbered(spans, layout)]


def positions_of(units: Sequence[Unit], n_tokens: int) -> Bool[Tensor, "unit pos"]:
    """True at each unit's own positions."""
    own = torch.zeros(len(units), n_tokens, dtype=torch.bool)
    for row, unit in enumerate(units):
        own[row, unit.start : unit.stop] = True
    return own


def _missing(by: By, named: Sequence[tuple[str, Span]]) -> str:
    return next(each for each in map(str, by) if _short(each) not in [name for name, _ in named])


def _no_unit(layout: Layout) -> str:
    if layout.asked:
        return (
            "by: the chat has nothing but its question, which is no unit; give what it is about as documents, "
            "Chat.ask(question, documents={name: text}), or the words of the question to remove, by=[...]"
        )
    return "by: the prompt has nothing but BOS, and no unit to take away; give a longer prompt, or other ranges"


def _checked_ranges(spans: object, n_tokens: int, first: int) -> list[Span]:
    ranges = checked_spans("by", spans, n_tokens)
    if ranges and ranges[0][0] < first:
        raise KVLensError(f"by: the range {ranges[0]!r} holds BOS, which is never removed; begin at {first}")
    return ranges


# --- characters to tokens ----------------------------------------------------------------------------------------------------


def _numbered(spans: Sequence[NamedSpan], layout: Layout, each_token: bool = False) -> list[tuple[str, Span]]:
    """The name and range of tokens of each span that has any; or of each token of the spans, if ``each_token``."""
    owned: dict[int, list[int]] = {}
    for at, owner in enumerate(_owners(layout, spans)):
        if owner is not None:
            owned.setdefault(owner, []).append(at)
    found, numbers = [], Counter[str]()
    for i, tokens in sorted(owned.items()):
        piece, noun = spans[i].piece, spans[i].noun
        for start, stop in [(at, at + 1) for at in tokens] if each_token else [(tokens[0], tokens[-1] + 1)]:
            numbers[piece] += 1
            found.append((", ".join(filter(None, (piece, noun and f"{noun} {numbers[piece]}"))), (start, stop)))
    return found


def _owners(layout: Layout, spans: Sequence[NamedSpan]) -> list[int | None]:
    """The span of each token; None for marks."""
    span_of: list[int | None] = [None] * len(layout.text)
    for i, span in enumerate(spans):
        span_of[span.start : span.stop] = [i] * (span.stop - span.start)
    owners = []
    for start, stop in layout.spans:
        inside = [at for at in range(start, stop) if not layout.text[at].isspace()] or range(start, stop)
        counts = Counter(span_of[at] for at in inside)
        owners.append(counts.most_common(1)[0][0] if counts else None)
    return owners


# --- text to spans -----------------------------------------------------------------------------------------------------------


def _spans(layout: Layout, by: str) -> list[NamedSpan]:
    """The spans of all pieces at a level; at those of whole pieces, and of tokens, the pieces themselves."""
    if by not in CUTS:
        noun = "token" if by == "token" else None
        return [NamedSpan(name if noun else name or "prompt", noun, start, stop) for name, start, stop in layout.pieces]
    noun = "statement" if by == "code" else by
    return [
        NamedSpan(piece.name, noun, piece.start + start, piece.start + stop)
        for piece in layout.pieces
        for start, stop in spans_of(layout.text[piece.start : piece.stop], by)
    ]


def _given(layout: Layout, strings: Any) -> list[NamedSpan]:
    """Find where the given strings stand in the pieces, or in what is asked."""
    found = [NamedSpan(_short(string), None, *_only_place(layout, string)) for string in strings]
    found.sort(key=lambda span: span.start)
    for before, after in itertools.pairwise(found):
        if after.start < before.stop:
            raise KVLensError(f"by: the strings {before.piece!r} and {after.piece!r} overlap; give each part once")
    return found


def _short(string: str) -> str:
    return string if len(string) <= NAMED else f"{string[: NAMED - 3]}..."


def _only_place(layout: Layout, string: str) -> Span:
    regions = [*layout.pieces, *layout.asked]
    everywhere = [layout.text[piece.start : piece.stop] for piece in regions]
    n = sum(text.count(string) for text in everywhere) if string.strip() else 0
    if n == 1:
        piece, text = next((piece, text) for piece, text in zip(regions, everywhere, strict=True) if string in text)
        start = piece.start + text.index(string)
        return start, start + len(string)
    if n:
        raise KVLensError(f"by: {brief(string)} occurs {n} times in the prompt; give more of the text around it")
    near = nearest_name(string, _as_many_words(everywhere, len(string.split())), likeness=0.3)
    hint = "" if near is None else f"; the nearest is {brief(near)}"
    raise KVLensError(f"by: {brief(string)} does not occur in the prompt{hint}; give strings as they stand there")


def _as_many_words(texts: Sequence[str], n: int) -> Iterable[str]:
    """Every passage of n words, or of all where there are fewer."""
    for text in texts:
        words = [word.span() for word in re.finditer(r"\S+", text)]
        for first, last in zip(words, [*words[max(n, 1) - 1 :]] or words[-1:], strict=False):
            yield text[first[0] : last[1]]


def spans_of(text: str, by: str) -> list[Span]:
    """The ranges of characters into which a level cuts a text; together they are all of it.

    >>> text = "Dr. Lee paid 3.5 euros. She left."
    >>> [text[start:stop] for start, stop in spans_of(text, "sentence")]
    ['Dr. Lee paid 3.5 euros. ', 'She left.']
    """
    needed = str.isalnum if by in ("sentence", "paragraph") else lambda letter: not letter.isspace()
    edges = [*sorted({0, *CUTS[by](text)} - {len(text)}), len(text)]
    starts = [start for start, stop in itertools.pairwise(edges) if any(map(needed, text[start:stop]))]
    return list(itertools.pairwise([0, *starts[1:], len(text)])) if starts else []


def _words(text: str) -> Iterable[int]:
    return (word.start() for word in re.finditer(r"\S+", text))


def _lines(text: str) -> Iterable[int]:
    return (end.end() for end in re.finditer("\n", text))


def _paragraphs(text: str) -> Iterable[int]:
    """Cut behind blank lines; where there is none between two lines, the lines."""
    return [blank.end() for blank in _BLANK_LINES.finditer(text) if text[: blank.start()].strip()] or _unwrapped(text)


def _unwrapped(text: str) -> Iterable[int]:
    """Find where lines begin that do not go on with the one before."""
    before = ""
    for line in re.finditer("[^\n]*(\n|$)", text):
        goes_on = len(before.rstrip()) >= WRAPPED and not before.rstrip().endswith((".", "!", "?", ":", ";"))
        if not (goes_on and line[0].lstrip()[:1].islower()):
            yield line.start()
        before = line[0]


def _sentences(text: str) -> Iterable[int]:
    """Find where lines and sentences begin, and in JSON its keys."""
    lines, in_lowercase, keys = [*_unwrapped(text)], text == text.lower(), [*_json_keys(text)]
    if keys:
        lines = [line for line in lines if not text[:line].rstrip().endswith(("{", "["))]
    ends = [end for end in _END.finditer(text) if _is_end(text, end, in_lowercase)]
    at_periods = _ends_in_its_language(text, lines) if any(end[0][0] == "." for end in ends) else set()
    yield from lines
    yield from (end.end() for end in ends if end[0][0] != "." or end.end() in at_periods)
    yield from keys


def _json_keys(text: str) -> Iterator[int]:
    """Find where JSON that begins a line and has keys begins and ends, and where its keys begin but for the first."""
    behind = 0
    for opens in _OPENS_JSON.finditer(text):
        if opens.end() < behind:
            continue
        try:
            _, behind = json.JSONDecoder().raw_decode(text, opens.end())
        except (ValueError, RecursionError):
            continue
        keys = [found for found in _JSON_STRING.finditer(text, opens.end(), behind) if found["colon"]]
        if keys:
            yield from (opens.end(), *map(_begin_of_key, keys[1:]), behind)


def _begin_of_key(key: re.Match[str]) -> int:
    """Where a key begins: the first of an object in a list with the object's brace."""
    return key.start("brace" if key["brace"] and key["before"] else "string")


def _ends_in_its_language(text: str, lines: Sequence[int]) -> set[int]:
    """Where sentencex ends the sentences of each line, with the white space behind them."""
    import sentencex

    language, _ = _identifier().classify(text[:ENOUGH])
    found = set[int]()
    for start, stop in itertools.pairwise(sorted({*lines, len(text)})):
        for sentence in sentencex.get_sentence_boundaries(language, text[start:stop]):
            found.add(_WHITE.match(text, start + sentence["end_index"]).end())  # type: ignore[union-attr]
    return found


@functools.cache
def _identifier() -> Any:
    """Of languages; one of kvlens' own, as others may use the package with other languages."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    identifier = LanguageIdentifier.from_model_file(MODEL_FILE)
    identifier.set_languages(LANGUAGES)
    return identifier


def _is_end(text: str, end: re.Match[str], in_lowercase: bool) -> bool:
    mark, before = end[0].strip(), _LAST_WORD.search(text, max(0, end.start() - LONGEST_WORD), end.start())
    first, last = _FIRST_WORD.match(text, end.end())[1], "" if before is None else before[0]  # type: ignore[index]
    if mark[0] not in ".\u2026":
        return not (first[:1].islower() and mark[-1] in _CLOSING)
    if first[:1].islower() and not in_lowercase:
        return False
    if mark[0] != "." or mark.startswith(".."):
        return not first[:1].islower()
    line = text.rfind("\n", 0, end.start()) + 1
    if last in NEVER_LAST or (
        last.isalnum()
        and len(last) <= 3
        and not text[line : end.start()].removesuffix(last).strip()
        and (last.isdigit() or len(last) == 1)
    ):
        return False
    if last.lower() in BEFORE_CAPITALS:
        return first[:1].isupper()
    if last in BEFORE_OPENERS or _LETTERS.fullmatch(last):
        return first in OPENERS
    return not (last in ("No", "no", "Nos", "nos") and first.isdigit())


def _statements(text: str) -> Iterable[int]:
    """Find where lines begin that do not go on with the one before: closing brackets do, what stands behind a backslash, and
    what is indented deeper, unless it is the block behind a colon or brace. A line of comment belongs to what follows."""
    depth, before, comment = 0, "", None
    for line in re.finditer("[^\n]*(\n|$)", text):
        code = _COMMENT.sub("", line[0].expandtabs(4).rstrip())
        indent = len(code) - len(code.lstrip())
        if not code.strip():
            comment = line.start() if comment is None and line[0].strip() else comment
            continue
        deeper = bool(before) and indent > depth and not before.endswith((":", "{", "=>", "->"))
        if not (code[indent] in ")]}" or before.endswith("\\") or deeper):
            depth = indent
            yield line.start() if comment is None else comment
        before, comment = code, None


CUTS: dict[str, Callable[[str], Iterable[int]]] = {
    "paragraph": _paragraphs,
    "line": _lines,
    "sentence": _sentences,
    "code": _statements,
    "word": _words,
}
"""name of a level -> where its spans begin in a text."""
