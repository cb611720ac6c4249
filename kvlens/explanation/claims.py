"""Steps 3 and 4: claims, and what becomes of them under an intervention.

*Claims* are the words of a response that depend on the prompt's units. A word depends on them if it falls by more than
`DEPENDS` nats, all its tokens together, when every unit is gone. Claims are runs of such words, over gaps of one other word.
They end with a line, at full stops (but for those of ``Mr. Hansen`` and ``C. S. Lewis``), at commas (but for those inside a
date), and at function words, unless both neighbors are names or numbers (``Bank of England``), and go on through adjacent
capitals and digits. The number in front of a list's item is in none, nor is what has no content word, or none that is not in
the question already.

*Verdicts*: along the old response, its tokens given, the *firm difference* is the first token in whose place the model would
say another and whose log-odds against that other one moved by at least `FIRM` nats. What moved less is style, and the old token
stays. From the firm difference on the text is generated anew. Verdicts on a claim:

- *same words*: no token differs. *same but for near ties*: some do, none firmly.
- *lost*: there is a firm difference, in the claim's own tokens or so that these fall by more than `FIRM` nats, and the new text
  does not have the claim.
- *partly*: likewise, but the new text has some of its content words, not only the last.
- *other words*: there is a firm difference, and the new text has the claim.
- *not reached*: the new text does not have the claim, although the claim's tokens do not fall: it goes another way before.
- *not lost*: there is a firm difference, but the claim's tokens do not fall, and no text was generated. *unknown*: they fall,
  and none was (only where a few layers alone read the prompt, or a smaller range of layers loses the claim).

Words are compared without case, accents and possessive endings.
"""

import itertools
import math
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens.arguments import Span
from kvlens.texts import FUNCTION_WORDS, WORD, Response, Word
from kvlens.units import NEVER_LAST

DEPENDS = 2.0
"""How many nats a word falls by that depends on the units."""
STOPS = frozenset('.!?;:()[]{}"\u201c\u201d\u00ab\u00bb\u2026\u3002\uff01\uff1f|*#')
ALIKE = str.maketrans("\u2019\u2010\u2011\u2012\u2013\u2014", "'-----")
_ITEM = re.compile(r"^\s*(\d+)[.)]", re.MULTILINE)
COMMAS = frozenset(",\uff0c\u3001")


class Claim(NamedTuple):
    """Words of a response that stand together.

    Attributes:
        text: as the response has it.
        start, stop: range of the response's tokens.
        words: its content words, as :func:`normal` writes them, without those of the question, which any answer may repeat; all
            content words, or all words, where it has no others. Each once.
        nats: by which it falls when all units are gone.
    """

    text: str
    start: int
    stop: int
    words: tuple[str, ...]
    nats: float


def normal(word: str) -> str:
    """A word without case, accents and a possessive ending, for comparisons; every dash is a hyphen."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", word.casefold()) if not unicodedata.combining(c))
    return plain.translate(ALIKE).removesuffix("'s")


def words_in(text: str) -> frozenset[str]:
    """The words of a text, as :func:`normal` writes them."""
    return frozenset(map(normal, WORD.findall(text)))


def is_content(word: Word) -> bool:
    """Whether it is a word, and none of its language's function words, nor several of Chinese."""
    name, without = normal(word.text), WITHOUT_CONTENT[word.language]
    return word.is_word and not (without.issuperset(name) if word.language == "zh" else name in without)


WITHOUT_CONTENT = {language: frozenset(map(normal, words)) for language, words in FUNCTION_WORDS.items()}


def needs_account(word: Word, text: str, start: int, stop: int) -> bool:
    """Whether it is a content word, but not the number of a line in a list (``2. candles``); or a "no" that begins the answer.

    Args:
        word: of a response.
        text: the response.
        start, stop: the word's characters there.
    """
    says_no = not text[:start].strip() and normal(word.text) == "no"
    return says_no or (is_content(word) and not is_number_of_item(text, start, stop))


def content_words(words: Iterable[Word], asked: Collection[str] = ()) -> tuple[str, ...]:
    """The content words among words and marks, as :func:`normal` writes them, each once; those in ``asked`` are left out.

    Neighbors of Chinese are one word here, as another text may have them in other tokens.
    """
    found: list[str] = []
    before = None
    for word in words:
        if not is_content(word) or normal(word.text) in asked:
            continue
        if before is not None and before.language == word.language == "zh" and before.stop == word.start:
            found[-1] += normal(word.text)
        else:
            found.append(normal(word.text))
        before = word
    return tuple(dict.fromkeys(found))


def claims_of(response: Response, falls: Sequence[float], question: frozenset[str]) -> list[Claim]:
    """The claims of a response, in its order.

    Args:
        response: its words.
        falls: of each word, in nats.
        question: its content words.
    """
    claims = []
    for first, last in lines_of(response):
        words = response.words[first:last]
        for start, stop in _merged(_extended(words, *span) for span in _runs(words, falls[first:last])):
            if content_words(words[start:stop], question):
                nats = sum(falls[first + start : first + stop])
                claims.append(claim_of(response, first + start, first + stop, nats, question))
    return claims


def lines_of(response: Response) -> Iterator[Span]:
    """The words of each line, without the number of a list's item in front (``2. candles``)."""
    places, text = places_of_words(response), response.text
    starts = [i for i, (start, _) in enumerate(places) if i == 0 or "\n" in text[places[i - 1][1] : start]]
    for first, last in itertools.pairwise([*starts, len(places)]):
        yield first + is_number_of_item(text, *places[first]), last


def is_number_of_item(text: str, start: int, stop: int) -> bool:
    """Whether characters of a text are the number in front of a list's item: a 1, or one more than at a line before."""
    before, behind = text[:start], text[stop:].partition("\n")[0]
    if not text[start:stop].isdecimal() or before.rpartition("\n")[2].strip() or behind[:1] not in (".", ")"):
        return False
    number, others = int(text[start:stop]), map(int, _ITEM.findall(before))
    return number - 1 in others or (number == 1 and bool(behind[1:].strip()))


def claim_of(response: Response, start: int, stop: int, nats: float, question: frozenset[str]) -> Claim:
    """The words of a response from the start-th to before the stop-th as a claim."""
    chosen = response.words[start:stop]
    words = content_words(chosen, question) or content_words(chosen) or tuple(normal(word.text) for word in chosen)
    places = places_of_words(response)
    text = response.text[places[start][0] : places[stop - 1][1]]
    return Claim(text, chosen[0].start, chosen[-1].stop, words, nats)


def places_of_words(response: Response) -> list[Span]:
    """The characters of each word in the response's text; none of what ends it, which is not in the text."""
    at, places = 0, []
    for word in response.words:
        found = response.text.find(word.text, at)
        places.append((at, at) if found < 0 else (found, found + len(word.text)))
        at = places[-1][1]
    return places


def _is_name(word: Word) -> bool:
    """Whether it has a capital or a digit in front and is no function word."""
    return is_content(word) and (word.text[0].isupper() or word.text[0].isdigit())


def _cuts(words: Sequence[Word], i: int) -> bool:
    """Whether a claim ends at the i-th word or mark."""
    word = words[i]
    before, after = (words[i - 1] if i else None), (words[i + 1] if i + 1 < len(words) else None)
    between_names = before is not None and after is not None and _is_name(before) and _is_name(after)
    if word.is_word:
        return not is_content(word) and not between_names
    if word.text == "." and between_names:
        name: str = before.text  # type: ignore[union-attr]
        return not (name in NEVER_LAST or (len(name) == 1 and name.isalpha()))
    if word.text in COMMAS:
        in_a_date = between_names and before.text[-1].isdigit() and after.text[0].isdigit()  # type: ignore[union-attr]
        return not in_a_date
    return word.text in STOPS or word.text[0] == "<"


def _runs(words: Sequence[Word], falls: Sequence[float]) -> list[tuple[int, int]]:
    """Runs of words that depend on the units, over gaps of one other word."""
    runs: list[tuple[int, int]] = []
    start, last = None, None
    for i, word in enumerate(words):
        if _cuts(words, i):
            if start is not None:
                runs.append((start, last + 1))  # type: ignore[operator]
            start = None
        elif word.is_word and falls[i] > DEPENDS:
            gap = 0 if start is None else sum(each.is_word for each in words[last + 1 : i])  # type: ignore[operator]
            if gap > 1:
                runs.append((start, last + 1))  # type: ignore[arg-type, operator]
                start = None
            start, last = (i if start is None else start), i
    return runs + ([] if start is None else [(start, last + 1)])  # type: ignore[operator]


def _extended(words: Sequence[Word], start: int, stop: int) -> tuple[int, int]:
    """A run carried on through adjacent capitals and digits, and function words between two of them."""
    while start > 0 and not _cuts(words, start - 1) and (_is_name(words[start - 1]) or _joins(words, start - 1)):
        start -= 1
    while stop < len(words) and not _cuts(words, stop) and (_is_name(words[stop]) or _joins(words, stop)):
        stop += 1
    return start, stop


def _joins(words: Sequence[Word], i: int) -> bool:
    """Whether it stands between two names and is no name itself."""
    return 0 < i < len(words) - 1 and _is_name(words[i - 1]) and _is_name(words[i + 1])


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


FIRM = math.log(4)
"""How many nats are a firm difference: four times the odds."""
SAME, NEAR_TIES, OTHER_WORDS, PARTLY, LOST, NOT_REACHED, NOT_LOST, NOT_KNOWN = VERDICTS = (
    "same words",
    "same but for near ties",
    "other words",
    "partly",
    "lost",
    "not reached",
    "not lost",
    "unknown",
)
SAID, GONE = frozenset({SAME, NEAR_TIES, OTHER_WORDS}), frozenset({LOST, PARTLY})
"""The verdicts of a claim that is still said, and of one that is lost, wholly or in part."""


class Walk(NamedTuple):
    """A walk along the old response under each of several interventions.

    Attributes:
        falls: of each token's log-probability, in nats.
        differs: the number of tokens in whose place the model would say another.
        firm: position of the firm difference; the number of tokens where there is none.
    """

    falls: Float[Tensor, "row pos"]
    differs: Int[Tensor, " row"]
    firm: Int[Tensor, " row"]


def walk(before: Float[Tensor, "pos d_vocab"], now: Float[Tensor, "row pos d_vocab"], tokens: Int[Tensor, " pos"]) -> Walk:
    """Compare log-probabilities along a response with those under interventions.

    Args:
        before: log-probabilities with the whole prompt.
        now: under each intervention.
        tokens: the response.
    """
    of_old, old_now = (x.gather(-1, tokens[:, None].expand(*x.shape[:-1], 1)).squeeze(-1) for x in (before, now))
    said = now.argmax(dim=-1)
    new_now = now.gather(-1, said[..., None]).squeeze(-1)
    of_new = before.expand_as(now).gather(-1, said[..., None]).squeeze(-1)
    moved = (of_old - of_new) - (old_now - new_now)
    differs = said != tokens
    is_firm = differs & (moved >= FIRM)
    n = len(tokens)
    firm = torch.where(is_firm.any(dim=-1), is_firm.long().argmax(dim=-1), n)
    return Walk(of_old - old_now, differs.sum(dim=-1), firm)


def may_be_lost(claim: Claim, fall: float, firm: int | None) -> bool:
    """Whether the claim's own tokens fall firmly, or one of them is the firm difference."""
    return firm is not None and (claim.start <= firm < claim.stop or fall > FIRM)


class Verdict(NamedTuple):
    """What became of a claim.

    Attributes:
        name: one of `VERDICTS`.
        fall: of the claim's own tokens, in nats.
        kept: its content words that the new text still has, where it is ``partly`` said.
    """

    name: str
    fall: float
    kept: tuple[str, ...] = ()


def verdict(claim: Claim, falls: Float[Tensor, " pos"], differs: int, firm: int | None, new: Sequence[Word] | None) -> Verdict:
    """The verdict on a claim under one intervention.

    Args:
        claim: what is asked about.
        falls: of the response's tokens.
        differs: how many tokens the model would say another for.
        firm: position of the firm difference, None where there is none.
        new: the words of the text that is said instead; None where it was not generated.
    """
    fall = float(falls[claim.start : claim.stop].sum())
    if firm is None:
        return Verdict(NEAR_TIES if differs else SAME, fall)
    if new is None:
        return Verdict(NOT_KNOWN if may_be_lost(claim, fall, firm) else NOT_LOST, fall)
    said, chinese = {normal(word.text) for word in new}, "".join(word.text if word.language == "zh" else " " for word in new)
    kept = tuple(word for word in claim.words if word in said or word in chinese)
    if len(kept) == len(claim.words):
        return Verdict(OTHER_WORDS, fall)
    if not may_be_lost(claim, fall, firm):
        return Verdict(NOT_REACHED, fall)
    partly = bool(kept) and kept != claim.words[-1:]
    return Verdict(PARTLY if partly else LOST, fall, kept if partly else ())
