"""Tokens as text, for tables, pages and terminals, and as words: a character is shown at the token that completes it.

A token of a byte-level tokenizer (GPT-2's, or SentencePiece when it falls back to bytes) may contain only part of a character.
Decoded alone it is unreadable. Here every token is read after those before it, as UTF-8 is:

- bytes that complete a character are shown as that character;
- bytes whose character is not complete yet, or never will be, are shown one by one, as SentencePiece writes them: ``<0xC3>``.

GPT-2 reads "你好" as four tokens of the bytes E4 BD, A0, E5 A5 and BD: they are shown as ``<0xE4><0xBD>``, ``你``,
``<0xE5><0xA5>`` and ``好``. `joined` concatenates the texts of neighbors without the parts that a later token completes: for a
whole text it returns what the tokenizer decodes.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvlens.arguments import Span
from kvlens.checks import checked
from kvlens.model import KVModel

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
NEWLINE, SPACE, TAB = "⏎", "·", "⇥"
"""Signs for white space."""
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PARTS_AND_NEXT = re.compile("((?:<0x[0-9A-F]{2}>)+)([^\x00-\x7f])")
_SHOWN_AS_THEMSELVES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _SHOWN_AS_THEMSELVES]
BYTE_OF_LETTER = {chr(byte): byte for byte in _SHOWN_AS_THEMSELVES} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The byte alphabet of GPT-2 and similar tokenizers: printable Latin letters as they are, the others from U+0100 on."""


def stripped(text: str) -> str:
    """``text`` without the white space around it; white space alone is shown by signs."""
    return text.strip() or with_white_space_shown(text)


def with_white_space_shown(text: str) -> str:
    """``text`` with a sign for each space, line end and tab, as token lists show them."""
    return text.replace("\n", NEWLINE).replace(" ", SPACE).replace("\t", TAB)


@checked
def token_texts(model: KVModel, tokens: Int[Tensor, " pos"]) -> list[str]:
    """Each token of a text as text, as described in the module; its id if the model has no tokenizer.

    Args:
        model: its tokenizer decodes them.
        tokens: a text from its beginning; use `next_token_texts` for tokens that are not consecutive.
    """
    return [text for text, _ in _read(model.tokenizer, tokens.tolist())]


@checked
def next_token_texts(model: KVModel, tokens: Int[Tensor, " pos"], candidates: Int[Tensor, "pos candidate"]) -> list[list[str]]:
    """Candidate next tokens, each as `token_texts` would show it there, so that the one that does follow has the same text.

    Args:
        model: its tokenizer decodes them.
        tokens: a text from its beginning.
        candidates: for each position of the text, tokens that may follow it.

    Returns:
        The candidates' texts, position by position.
    """
    tokenizer, pieces = model.tokenizer, {}
    if tokenizer is not None:
        pieces = {token: _piece(tokenizer, token) for token in candidates.unique().tolist()}
    found = []
    for (_, waiting), row in zip(_read(tokenizer, tokens.tolist()), candidates.tolist(), strict=True):
        found.append([_behind(waiting, pieces[token])[0] if pieces else str(token) for token in row])
    return found


def joined(texts: Iterable[str]) -> str:
    """The text of neighboring tokens, without those bytes that the next character completes."""
    return _PARTS_AND_NEXT.sub(_without_completed, "".join(texts))


def _without_completed(found: re.Match[str]) -> str:
    parts, character = _BYTE.findall(found[1]), found[2]
    whole = [f"{byte:02X}" for byte in character.encode(errors="replace")]
    n = next((n for n in range(min(len(parts), len(whole) - 1), 0, -1) if parts[-n:] == whole[:n]), 0)
    return "".join(f"<0x{byte}>" for byte in parts[: len(parts) - n]) + character


def _read(tokenizer: PreTrainedTokenizerBase | None, ids: list[int]) -> list[tuple[str, bytes]]:
    """The text of every token, and the trailing bytes of a character that is not complete yet."""
    if tokenizer is None:
        return [(str(token), b"") for token in ids]
    pieces = {token: _piece(tokenizer, token) for token in set(ids)}  # a long prompt repeats tokens
    found, waiting = [], b""
    for token in ids:
        text, waiting = _behind(waiting, pieces[token])
        found.append((text, waiting))
    return found


def _behind(waiting: bytes, piece: tuple[str, bytes | None]) -> tuple[str, bytes]:
    """The text of a piece after the pending bytes of an incomplete character, and the bytes pending after it."""
    whole, part = piece
    if part is None:
        return whole, b""
    read, text, at = waiting + part, "", 0
    while True:
        try:
            return text + read[at:].decode(), b""
        except UnicodeDecodeError as error:
            start, end = at + error.start, at + error.end
            own = read[max(start, len(waiting)) : end]  # those that waited are shown already
            text += read[at:start].decode() + "".join(f"<0x{byte:02X}>" for byte in own)
            if error.reason == "unexpected end of data":
                return text, read[start:]
            at = end


def _piece(tokenizer: PreTrainedTokenizerBase, token: int) -> tuple[str, bytes | None]:
    """A token as it appears inside a text, and its bytes where they are not UTF-8 by themselves.

    SentencePiece tokenizers drop the leading blank of a token decoded alone.
    """
    text, name = tokenizer.decode([token]), tokenizer.convert_ids_to_tokens(token)
    if not isinstance(name, str):
        return text, None
    if UNREADABLE in text:
        part = _bytes_of(name)
        return text, part if part is not None and not _is_utf_8(part) else None
    blanks = len(name) - len(name.lstrip("\u2581 "))
    return " " * blanks + text.lstrip(" ") if blanks else text, None


def _bytes_of(name: str) -> bytes | None:
    """The bytes that a vocabulary's entry stands for: ``<0xC3>``, or letters of GPT-2's alphabet; None for any other."""
    if byte := _BYTE.fullmatch(name):
        return bytes.fromhex(byte[1])
    return bytes(BYTE_OF_LETTER[letter] for letter in name) if all(letter in BYTE_OF_LETTER for letter in name) else None


def _is_utf_8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


# --- words ------------------------------------------------------------------------------------------------------------------

HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
WORD = re.compile(f"[{HAN}]|[^\\W_{HAN}]+(?:['\u2019.,:/@&+\u2013-][^\\W_{HAN}]+|_+[^\\W_{HAN}]+)*|[^\\s]", re.UNICODE)
"""A word, with the marks inside it (``3.5``, ``1,000``, ``half-time``, ``O'Brien``, ``snake_case``), or a mark by itself.

A Chinese character is a word, as no blanks stand between words there; those that a token has in common are one."""
_IS_HAN = re.compile(f"[{HAN}]+$")
FUNCTION_WORDS = {
    language: frozenset(words.split())
    for language, words in dict(
        en=(
            "a an the this that these those and or but nor so yet if then than as at by for from in into of off on onto out "
            "over to up with within without about above after again against all also am any are aren't be been before being "
            "below between both can can't cannot could couldn't did didn't do does doesn't doing don't down during each few "
            "further had hadn't has hasn't have haven't having he her here hers herself him himself his how i i'm it its it's "
            "itself just me more most my myself no not now once only other our ours ourselves own same she should some such "
            "their theirs them themselves there they through too under until very was wasn't we were weren't what when where "
            "which while who whom whose why will won't would you your yours yourself yourselves is isn't called named known "
            "located according based there's that's upon per via since because however therefore thus hence may might must "
            "shall sure certainly okay"
        ),
        de=(
            "aber alle allem allen aller alles als also am an auch auf aus bei beim bin bis bist da dabei dafür damit dann "
            "das dass dein deine dem den denn der deren des dessen dich die dies diese diesem diesen dieser dieses dir doch "
            "dort du durch ein eine einem einen einer eines er es etwa euch euer eure für gegen habe haben hat hatte hatten "
            "hier ich ihm ihn ihnen ihr ihre ihrem ihren ihrer ihres im in indem ins ist jede jedem jeden jeder jedes jetzt "
            "kann kein keine keinem keinen keiner können könnte man mein meine mich mir mit muss müssen nach nicht noch nun "
            "nur ob oder ohne sehr sein seine seinem seinen seiner seit sich sie sind so solche soll sollen sondern sowie "
            "über um und uns unser unsere unter vom von vor während war waren warum was weil welche welchem welchen welcher "
            "welches wenn wer werde werden wie wir wird wo worden wurde wurden zu zum zur zwar zwischen"
        ),
        zh="的 了 是 在 和 与 及 或 也 就 而 把 被 将 于 从 着 这 那 吗 呢 吧",
    ).items()
}
"""Words that carry no content of their own, by language."""
_ALSO_ENGLISH = frozenset(("die", "war", "man", "hat", "den", "bin"))
"""Words of German that have another meaning in English, and so are no sign of it."""


class Word(NamedTuple):
    """A word of a response, or a mark.

    Attributes:
        text: without blanks; of a token that ends the response, its name; of white space in a response of nothing else, signs.
        start, stop: range of the response's tokens, stop left out.
        is_word: False for a mark.
        language: whose function words it may be one of.
    """

    text: str
    start: int
    stop: int
    is_word: bool
    language: str = "en"


@dataclass(frozen=True)
class Response:
    """What a model answered.

    Attributes:
        tokens: [pos], with the token that ended it.
        words: words and marks, in order; each token belongs to at most one.
        text: without the token that ended it; white space alone is shown by signs.
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
        if not words and not any(token in special for token in tokens.tolist()):  # white space alone: each token by its signs
            words = [Word(stripped(text), i, i + 1, False) for i, text in enumerate(shown)]
        words += [Word(texts[i], i, i + 1, False) for i, token in enumerate(tokens.tolist()) if token in special]
        return cls(tokens, tuple(sorted(words, key=lambda word: word.start)), stripped(joined(shown)))


def _words(texts: list[str]) -> list[Word]:
    """A token belongs to the word that has most of its characters, the first of equals."""
    text, owners = _with_owners(texts)
    found = [(text[start:stop], (start, stop)) for start, stop in _spans_of_words(text, owners)]
    shares: dict[int, dict[int, int]] = {}
    for number, (_, (start, stop)) in enumerate(found):
        for token in itertools.chain(*owners[start:stop]):
            of_token = shares.setdefault(token, {})
            of_token[number] = of_token.get(number, 0) + 1
    tokens_of: dict[int, list[int]] = {}
    for token, of_token in shares.items():
        tokens_of.setdefault(max(of_token, key=lambda number: (of_token[number], -number)), []).append(token)
    language = _language(word for word, _ in found)
    return [
        Word(word, min(own), max(own) + 1, word[0].isalnum(), "zh" if _IS_HAN.match(word) else language)
        for (word, _), own in ((found[number], own) for number, own in sorted(tokens_of.items()))
    ]


def _with_owners(texts: list[str]) -> tuple[str, list[list[int]]]:
    """The text of tokens, and of each character the tokens that it is in; it is in all that have bytes of it."""
    shown, owner = "".join(texts), [i for i, each in enumerate(texts) for _ in each]
    text, owners, at = "", list[list[int]](), 0
    for found in _PARTS_AND_NEXT.finditer(shown):
        first = found.start() + len(_without_completed(found)) - 1  # of the bytes that the character completes
        text += shown[at:first] + found[2]
        owners += [*([i] for i in owner[at:first]), [*dict.fromkeys(owner[first : found.end()])]]
        at = found.end()
    return text + shown[at:], [*owners, *([i] for i in owner[at:])]


def _spans_of_words(text: str, owners: list[list[int]]) -> list[Span]:
    """The characters of each word; Chinese ones that have a token in common are one word."""
    spans: list[Span] = []
    for found in WORD.finditer(text):
        start, stop = found.span()
        if spans and spans[-1][1] == start and _IS_HAN.match(text, start - 1, stop) and {*owners[start - 1]} & {*owners[start]}:
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
    return spans


def _language(words: Iterable[str]) -> str:
    """German where more words are function words of German alone than of English alone; otherwise English."""
    said = [word.casefold() for word in words]
    only_german, only_english = FUNCTION_WORDS["de"] - FUNCTION_WORDS["en"], FUNCTION_WORDS["en"] - FUNCTION_WORDS["de"]
    n_german = sum(word in only_german - _ALSO_ENGLISH for word in said)
    return "de" if n_german > sum(word in only_english for word in said) else "en"
