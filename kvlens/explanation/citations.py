"""Sources in the answer: every content word of a response has one account, which names the run that it comes from.

- *source*: the word is in a claim that is lost without one unit, with its gap kept and closed. The claim is cited by the
  numbers of all such units, which count from 1 in the order in which the response comes to them.
- *together*: the claim is lost without several units, and without none of them alone.
- *question*: the word is in no such claim, and the question has it, or what else is never removed, as what a template writes.
- *repeated*: a claim with sources before it has the word, and where that claim is given it is not lost without any unit: it is
  cited as that claim.
- *follows*: without any unit it is not said, nor does it fall where the words before it are given, of which no claim has it: it
  follows from these (``9 + 4 = 13``). It is cited by the units that words before it in its sentence are cited by, and without
  which it is not said; by none if there are no such units.
- *memory*: without any unit the model says it, too; or units have it, none of them is its source, and the model says it without
  all units that have this or another word without a source.
- *unfound*: without any unit it is lost, and no unit or set of units that was tried loses it.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from kvlens.analyses.declaration import Columns
from kvlens.arguments import Span
from kvlens.explanation.claims import GONE, NOT_REACHED, SAID, claim_of, needs_account, normal, places_of_words, words_in
from kvlens.explanation.explaining import DocumentSpan, Explaining
from kvlens.texts import Word
from kvlens.units import Layout, Unit, spans_of

ACCOUNTS = ("source", "together", "repeated", "follows", "memory", "question", "unfound")
SOURCE, TOGETHER, SAID_BEFORE, FOLLOWS, SAID_ANYWAY, IN_QUESTION, UNFOUND = ACCOUNTS
CITATION_COLUMNS = Columns(
    claim=("int64", "the claim; of a word that is ``repeated`` the one before it; -1: in none that has a source"),
    text=("str", "as the response has it"),
    response_start=("int64", "its first character in the response"),
    response_stop=("int64", "behind its last"),
    account=(
        "str",
        f"{', '.join(f'``{name}``' for name in ACCOUNTS)}: :mod:`~kvlens.explanation.citations`",
    ),
    source=("int64", "the number that it is cited by, from 1; 0: it has no source"),
    unit=("int64", "that source; -1: none"),
    document=("str", "that has it: a name of ``documents``; empty: none"),
    document_start=("int64", "the source's first character there; -1: none"),
    document_stop=("int64", "behind its last; -1: none"),
    verdict=("str", "on the text without the source, without all of them (``together``), or without any unit"),
    nats=("float64", "by which it falls then"),
    says=("str", "what the model says then, the gap kept; empty of text without a source"),
)
SENTENCE_COLUMNS = Columns(
    sentence=("int64", "of the response, from 0"),
    text=("str", "the sentence"),
    response_start=("int64", "its first character in the response"),
    response_stop=("int64", "behind its last"),
    sources=("str", "the numbers that it cites, such as ``1,3``"),
    **{name: ("int64", f"how many of its content words have this account: {name}") for name in ACCOUNTS},
)
MARK_OF = {SAID_ANYWAY: "memory", UNFOUND: "?"}
"""What stands in brackets behind words without a source; nothing behind those of the question."""
FOLLOWS_FROM = "follows from "
"""What stands there before the numbers of what a word follows from; where it follows from no source, ``follows`` alone."""
ENDS_OF_RUNS = frozenset(".!?\n\u3002\uff01\uff1f")
"""Words on both sides of these have a mark each."""


def documents_of(layout: Layout, units: Sequence[Unit], given: object = None) -> tuple[dict[str, str], list[DocumentSpan]]:
    """The documents and messages of a prompt by name, as the model read them, and where each unit stands in them.

    Of a prompt that was ``given`` as a string, the text begins where the string does: some tokenizers write a blank in front.
    """
    ranges: dict[str, Span] = {}
    for name, start, stop in [*layout.pieces, *layout.asked]:
        first, last = ranges.get(name or "prompt", (start, stop))
        ranges[name or "prompt"] = (min(first, start), max(last, stop))
    if isinstance(given, str) and "prompt" in ranges:
        start, stop = ranges["prompt"]
        added = _n_blanks(layout.text[start:stop]) - _n_blanks(given)
        ranges["prompt"] = (start + max(added, 0), stop)
    found = [_place_of(layout, unit, ranges) for unit in units]
    if any(place.document not in ranges for place in found):
        ranges["prompt"] = (0, len(layout.text))
    return {name: layout.text[start:stop] for name, (start, stop) in ranges.items()}, found


def _n_blanks(text: str) -> int:
    """In front."""
    return len(text) - len(text.lstrip())


def _place_of(layout: Layout, unit: Unit, ranges: Mapping[str, Span]) -> DocumentSpan:
    start, stop = layout.spans[unit.start][0], layout.spans[unit.stop - 1][1]
    text = layout.text[start:stop]
    start, stop = start + _n_blanks(text), stop - (len(text) - len(text.rstrip()))
    for name, (first, last) in ranges.items():
        if first <= start and stop <= last:
            return DocumentSpan(name, start - first, stop - first)
    return DocumentSpan("prompt", start, stop)


class AccountedSpan(NamedTuple):
    """Neighboring words of a response with one account."""

    claim: int
    first: int
    last: int
    account: str
    sources: Sequence[tuple[int, ...]] = ()


class FallOfWords(NamedTuple):
    """A run's verdict on words, by how many nats they fall in it, and what is said there without their source."""

    verdict: str
    nats: float
    says: str | None = ""


def citations_of(explaining: Explaining) -> pd.DataFrame:
    """The rows of `CITATION_COLUMNS`, in the response's order."""
    response, places = explaining.response, places_of_words(explaining.response)
    numbers: dict[int, int] = {}
    rows = []
    for claim, first, last, account, sets in _accounts(explaining):
        start, stop = places[first][0], places[last][1]
        for units in sets or [()]:
            found = _lost_without(explaining, claim).get(units) or _without_any(explaining, first, last)
            for unit in units or (-1,):
                number = numbers.setdefault(unit, len(numbers) + 1) if units else 0
                place = explaining.read.unit_places[unit] if units else DocumentSpan("", -1, -1)
                rows.append((claim, response.text[start:stop], start, stop, account, number, unit, *place, *found))
    return CITATION_COLUMNS.frame({name: [row[i] for row in rows] for i, name in enumerate(CITATION_COLUMNS)})


def _accounts(explaining: Explaining) -> Iterator[AccountedSpan]:
    """A span for each claim that has sources, and for each other content word."""
    words, claims = explaining.response.words, explaining.claims
    sources = [_sources(explaining, number) for number in range(len(claims))]
    places = places_of_words(explaining.response)
    shown = [i for i, (start, stop) in enumerate(places) if start < stop]

    def owner(i: int) -> int:
        return next((n for n, c in enumerate(claims) if sources[n] and c.start <= words[i].start < c.stop), -1)

    cited: list[tuple[int, ...]] = []  # what words before in the sentence are cited by
    for number, group in itertools.groupby(shown, key=owner):
        members = list(group)
        if number >= 0:
            account = SOURCE if len(sources[number][0]) == 1 else TOGETHER
            yield AccountedSpan(number, members[0], members[-1], account, sources[number])
            cited += sources[number]
            continue
        for i in members:
            if needs_account(words[i], explaining.response.text, *places[i]):
                yield (found := _without_source(explaining, i, sources, cited))
                cited += found.sources
            if ENDS_OF_RUNS.intersection((words[i].text, *explaining.response.text[places[i][1] :][:1])):
                cited = []


def _sources(explaining: Explaining, number: int) -> list[tuple[int, ...]]:
    """The units that lose a claim alone; where there are none, the set that does."""
    lost = list(_lost_without(explaining, number))
    return [units for units in lost if len(units) == 1] or lost[:1]


def _without_source(
    explaining: Explaining, i: int, sources: Sequence[list[tuple[int, ...]]], cited: Iterable[tuple[int, ...]]
) -> AccountedSpan:
    """The account of a word that is in no claim with sources.

    Args:
        explaining: the explanation.
        i: which word of the response.
        sources: of each claim.
        cited: what words before it in its sentence are cited by.
    """
    word, claims = explaining.response.words[i], explaining.claims
    name, verdict = normal(word.text), _without_any(explaining, i, i).verdict
    if name in explaining.question:
        return AccountedSpan(-1, i, i, IN_QUESTION)
    before = [n for n, claim in enumerate(claims) if sources[n] and claim.stop <= word.start and name in claim.words]
    if verdict not in GONE and before:
        return AccountedSpan(before[-1], i, i, SAID_BEFORE, sources[before[-1]])
    followed = [units for units in dict.fromkeys(cited) if len(units) == 1 and not _is_said_without(explaining, units[0], word)]
    if not followed and verdict not in SAID and _is_said_untold(explaining, i):
        return AccountedSpan(-1, i, i, SAID_ANYWAY)
    if verdict == NOT_REACHED:
        return AccountedSpan(-1, i, i, FOLLOWS, followed)
    return AccountedSpan(-1, i, i, SAID_ANYWAY if verdict in SAID else UNFOUND)


def _is_said_untold(explaining: Explaining, i: int) -> bool:
    """Whether a word that units have is said without all of these."""
    word = claim_of(explaining.response, i, i + 1, 0.0, explaining.question)
    untold = explaining.untold
    return untold is not None and explaining.is_told(word) and explaining.of(word, untold).name in SAID


def _is_said_without(explaining: Explaining, unit: int, word: Word) -> bool:
    """Whether a text has a word that was said without a unit which loses a claim, its gap kept or closed."""
    texts = [row.says or "" for row in explaining.rows if (row.role, row.parts) == ("breaking", str(unit))]
    if word.language == "zh":  # another text may have it in other tokens
        return any(word.text in text for text in texts)
    return any(normal(word.text) in words_in(text) for text in texts)


def _without_any(explaining: Explaining, first: int, last: int) -> FallOfWords:
    """The verdict on words of the response when no unit is left."""
    claim = claim_of(explaining.response, first, last + 1, 0.0, explaining.question)
    return FallOfWords(*explaining.of(claim, explaining.nothing)[:2])


def _lost_without(explaining: Explaining, number: int) -> dict[tuple[int, ...], FallOfWords]:
    """The units, or sets of these, without which a claim is lost with the gap kept and closed."""
    return {
        tuple(map(int, row.parts.split("+"))): FallOfWords(row.verdict, row.nats, row.says)
        for row in explaining.rows
        if (row.claim, row.about, row.role, row.gap) == (number, "units", "breaking", "kept")
    }


# --- what readers see ---------------------------------------------------------------------------------------------------------


class MarkedRun(NamedTuple):
    """Words of the response with one mark behind them.

    Attributes:
        start, stop: its characters.
        mark: what stands in the brackets.
        rows: of ``citations``.
    """

    start: int
    stop: int
    mark: str
    rows: tuple[int, ...]


def marked_runs(response: str, citations: pd.DataFrame) -> list[MarkedRun]:
    """What gets a mark: each claim with its sources, and neighboring words without one; words of the question get none."""
    found: list[MarkedRun] = []
    for (start, stop), rows in citations.groupby(["response_start", "response_stop"], sort=False):
        account, numbers = rows["account"].iloc[0], rows["source"].tolist()
        if account == IN_QUESTION:
            continue
        together = TOGETHER in set(citations.loc[citations["claim"] == rows["claim"].iloc[0], "account"])
        mark = MARK_OF.get(account) or ("+" if together else ", ").join(map(str, sorted(numbers)))
        if account == FOLLOWS:
            mark = f"{FOLLOWS_FROM}{mark}" if any(numbers) else FOLLOWS
        before = found[-1] if found else None
        goes_on = before is not None and before.mark == mark and not ENDS_OF_RUNS.intersection(response[before.stop : start])
        if before is not None and goes_on and account not in (SOURCE, TOGETHER):
            found[-1] = MarkedRun(before.start, int(stop), mark, (*before.rows, *map(int, rows.index)))
        else:
            found.append(MarkedRun(int(start), int(stop), mark, tuple(map(int, rows.index))))
    return found


def marked(response: str, citations: pd.DataFrame) -> str:
    """The response with its marks, each in brackets behind a blank."""
    at, parts = 0, []
    for _, stop, mark, _ in marked_runs(response, citations):
        parts.append(f"{response[at:stop]} [{mark}]")
        at = stop
    return "".join(parts) + response[at:]


def by_sentence(response: str, words: pd.DataFrame, citations: pd.DataFrame) -> pd.DataFrame:
    """The rows of `SENTENCE_COLUMNS`.

    Args:
        response: as it was said.
        words: with the account of each.
        citations: of :func:`citations_of`.
    """
    found = []
    for number, (start, stop) in enumerate(_stripped(response, spans_of(response, "sentence"))):
        here = citations[(citations["response_start"] < stop) & (citations["response_stop"] > start)]
        numbers = sorted(set(here["source"]) - {0})
        accounts = words.loc[(words["start"] >= start) & (words["stop"] <= stop), "account"]
        counts = [int((accounts == name).sum()) for name in ACCOUNTS]
        found.append((number, response[start:stop], start, stop, ",".join(map(str, numbers)), *counts))
    return SENTENCE_COLUMNS.frame({name: [row[i] for row in found] for i, name in enumerate(SENTENCE_COLUMNS)})


def _stripped(text: str, spans: Iterable[Span]) -> Iterator[Span]:
    for start, stop in spans:
        sentence = text[start:stop]
        yield start + len(sentence) - len(sentence.lstrip()), start + len(sentence.rstrip())
