"""The marks of an answer, with the list below it: what each mark stands for, in words and on the page."""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import pandas as pd

from kvlens.explanation.citations import (
    FOLLOWS,
    FOLLOWS_FROM,
    IN_QUESTION,
    SAID_ANYWAY,
    SOURCE,
    TOGETHER,
    UNFOUND,
    MarkedRun,
    marked_runs,
)
from kvlens.explanation.claims import GONE, NEAR_TIES, PARTLY, SAID, SAME, normal, words_in
from kvlens.explanation.explained import Findings
from kvlens.explanation.explaining import SEPARATOR
from kvlens.explanation.presentation import LONGEST_UNIT, listed, quoted, some_named, unit_named
from kvlens.texts import WORD
from kvlens.viz._text import html_text

FULL_SHADE = 8.0
"""How many nats give a word or a unit the full color."""
SHOWN_BEFORE = 30
"""Characters of a long text that are quoted before it differs from the response."""


@dataclass(frozen=True, eq=False)
class SourceLine:
    """What the list below the answer says of a mark.

    Attributes:
        mark: what stands in the brackets; empty of words that have no mark.
        text: what it says.
        rows: indices of ``statements`` that it is about.
    """

    mark: str
    text: str
    rows: tuple[int, ...]

    def __str__(self) -> str:
        return f"[{self.mark}] {self.text}" if self.mark else self.text


def sources_in_words(found: Findings) -> list[SourceLine]:
    """A line for each mark: a source, sources that are needed together, what needs no part, and what none was found for."""
    own = found.citations[found.citations["account"].isin([SOURCE, TOGETHER])]
    lines = []
    for number, rows in own.sort_values("source").groupby("source"):
        alone, unit = rows[rows["account"] == SOURCE], int(rows["unit"].iloc[0])
        text, of_claims = _without_these(found, alone, str(unit), "it") if len(alone) else ("", ())
        lines.append(SourceLine(str(number), f"{unit_named(found, unit)}{f'. {text}.' if text else ''}", of_claims))
    return [*lines, *_of_several(found, own), *_without_sources(found)]


def _of_several(found: Findings, own: pd.DataFrame) -> Iterator[SourceLine]:
    """The lines on claims with several sources: those that are all needed, and those of which one is enough."""
    for account, joint in ((SOURCE, ", "), (TOGETHER, SEPARATOR)):
        several = [rows for _, rows in own[own["account"] == account].groupby("claim", sort=False) if len(rows) > 1]
        numbers = [joint.join(map(str, sorted(rows["source"]))) for rows in several]
        for mark in dict.fromkeys(numbers):
            claims = pd.concat([rows for rows, number in zip(several, numbers, strict=True) if number == mark])
            yield SourceLine(mark, *(_all_needed if account == SOURCE else _one_enough)(found, claims))


def _all_needed(found: Findings, claims: pd.DataFrame) -> tuple[str, tuple[int, ...]]:
    """What is said of claims that are lost without each of several sources, and the statements that say so."""
    units = set(map(str, claims["unit"]))
    weakest = claims.sort_values("verdict", key=lambda verdicts: verdicts != PARTLY, kind="stable").drop_duplicates("claim")
    lost, rows = _lost_in_words(found, weakest), _breaking(found, claims, units)
    return f"{'Both' if len(units) == 2 else 'All'} are needed: without one of these, {lost}.", rows


def _one_enough(found: Findings, claims: pd.DataFrame) -> tuple[str, tuple[int, ...]]:
    """What is said of claims that are lost without several sources together: likewise."""
    units = sorted(set(claims["unit"]))
    each = found.statements.query("about == 'units' and role == 'each' and gap == 'kept'")
    alone = each[each["claim"].isin(claims["claim"]) & each["parts"].isin([*map(str, units)])]
    text, rows = _without_these(found, claims.drop_duplicates("claim"), SEPARATOR.join(map(str, units)), "these together")
    differs = ~alone["verdict"].isin([SAME, NEAR_TIES]) if found.is_whole else alone["verdict"].isin(GONE)
    if len(alone) < len(claims) or differs.any():
        return f"{text}.", rows
    return f"{text}, but not without one of them alone.", (*rows, *map(int, alone.index))


def _without_these(found: Findings, claims: pd.DataFrame, parts: str, them: str) -> tuple[str, tuple[int, ...]]:
    """What the model says without units, which claims are lost, and the statements that say so."""
    said = f"the model says {quoted(_from_difference(found.response, claims['says'].iloc[0]), LONGEST_UNIT)}"
    return f"Without {them}, {said}: {_lost_in_words(found, claims)}", _breaking(found, claims, {parts})


def _from_difference(response: str, says: str) -> str:
    """What is said instead; from a few words before it differs, where a quotation of its beginning would not show that."""
    n_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(response, says, strict=False)))
    return says if n_same < LONGEST_UNIT // 2 else f"… {says[says.rfind(' ', 0, n_same - SHOWN_BEFORE) + 1 :]}"


def _breaking(found: Findings, claims: pd.DataFrame, sets: Collection[str]) -> tuple[int, ...]:
    """The statements by which claims are lost without sets of units."""
    lost = found.statements.query("about == 'units' and role == 'breaking'")
    return tuple(map(int, lost.index[lost["claim"].isin(claims["claim"]) & lost["parts"].isin(sets)]))


def _lost_in_words(found: Findings, rows: pd.DataFrame) -> str:
    """Which claims are lost, and which in part; of a whole answer, that another one is given."""
    if found.is_whole:
        return f"another answer is given{', with some of its words' if PARTLY in set(rows['verdict']) else ''}"
    by_verdict = rows.groupby("verdict", sort=False)["text"]
    named = {verdict: [*dict.fromkeys(map(repr, words))] for verdict, words in by_verdict}
    return " and ".join(
        f"{listed(words)} {'is' if len(words) == 1 else 'are'} lost{' in part' if verdict == PARTLY else ''}"
        for verdict, words in named.items()
    )


def _without_sources(found: Findings) -> Iterator[SourceLine]:
    """The lines on words without a source; what they say is about the run without any part."""
    rows = tuple(map(int, found.rows("units", "none").index))
    account = found.citations["account"]
    yield from _following(found, rows)
    yield from _of_memory(found, rows)
    if of_words := _phrases(found, (account == FOLLOWS) & (found.citations["unit"] < 0)):
        text = f"Not said without any part of the prompt, but behind the words before, {_do_not_fall(of_words)}."
        yield SourceLine(FOLLOWS, text, rows)
    if unfound := _phrases(found, account == UNFOUND):
        text = f"Lost without all parts of the prompt, and no part was found that loses it: {some_named(unfound)}."
        yield SourceLine("?", text, rows)
    question = words_in(found.question)
    in_question = found.citations["text"].map(lambda text: words_in(text) <= question)
    for whose, chosen in (("the question", in_question), ("what else is never removed", ~in_question)):
        if asked := _phrases(found, (account == IN_QUESTION) & chosen):
            yield SourceLine("", f"Words of {whose} have no mark: {some_named(asked)}.", ())


def _of_memory(found: Findings, of_nothing: tuple[int, ...]) -> Iterator[SourceLine]:
    """The line on words that are said without any part, or without all parts that have them."""
    of_memory, said = found.citations["account"] == SAID_ANYWAY, found.citations["verdict"].isin(SAID)
    told, rows, texts = of_memory & ~said, of_nothing, []
    if (anyway := of_memory & said).any():
        verdicts = set(found.citations.loc[anyway, "verdict"])
        text = f"Said without any part of the prompt, too: {some_named(_phrases(found, anyway))}."
        if verdicts <= {SAME, NEAR_TIES}:
            ties = ", but for near ties" if NEAR_TIES in verdicts else ""
            text = f"Without any part of the prompt, the model gives the same answer{ties}."
        texts.append(text + _in_parts(found, anyway))
    if told.any():
        words, rows = _phrases(found, told), (*rows, *map(int, found.rows("units", "telling").index))
        texts.append(f"Said without all parts that have {'it' if len(set(words)) == 1 else 'them'}, too: {some_named(words)}.")
    if texts:
        yield SourceLine("memory", " ".join(texts), rows)


def _in_parts(found: Findings, chosen: pd.Series) -> str:
    """Which of some words stand in a part of the prompt as well; where none does, the parts say something else, or nothing."""
    chosen = chosen & (found.citations["text"].map(normal) != "no")
    parts, n = " ".join(found.units["unit_text"]), found.citations.loc[chosen, "text"].map(normal).nunique()
    known = words_in(parts)
    stands = found.citations["text"].map(lambda text: normal(text) in known or (len(WORD.findall(text)) > 1 and text in parts))
    these = "this word" if n == 1 else "these words"
    if not (chosen & stands).any():
        return f" No part has {these}." if n else ""
    if not (chosen & ~stands).any():
        return f" {'A part has' if n == 1 else 'The parts have'} {these} as well."
    return f" Of these words the parts have {some_named(_phrases(found, chosen & stands))}."


def _following(found: Findings, of_nothing: tuple[int, ...]) -> Iterator[SourceLine]:
    """The lines on words that follow from words before them."""
    runs = [run for run in marked_runs(found.response, found.citations) if run.mark.startswith(FOLLOWS_FROM)]
    for mark in dict.fromkeys(run.mark for run in runs):
        chosen = found.citations.index.isin([row for run in runs if run.mark == mark for row in run.rows])
        units = found.citations[chosen].drop_duplicates("source").sort_values("source")
        lost = found.statements.query("about == 'units' and role == 'breaking'")
        rows = lost.index[lost["parts"].isin(set(map(str, units["unit"])))]
        without = " or without ".join(f"[{number}]" for number in units["source"])
        text = f"Not said without {without}, but behind the words before, {_do_not_fall(_phrases(found, chosen))}."
        yield SourceLine(mark, text, (*of_nothing, *map(int, rows)))


def _do_not_fall(words: Sequence[str]) -> str:
    return f"{'it does not fall' if len(set(words)) == 1 else 'these do not fall'}: {some_named(words)}"


def _phrases(found: Findings, chosen: pd.Series) -> list[str]:
    """The words of some rows of the citations in quotation marks, neighbors together."""
    spans: list[tuple[int, int]] = []
    for row in found.citations[chosen].itertuples():
        if spans and not found.response[spans[-1][1] : row.response_start].strip():
            spans[-1] = (spans[-1][0], row.response_stop)
        else:
            spans.append((row.response_start, row.response_stop))
    return [repr(found.response[start:stop]) for start, stop in spans]


# --- on the page ---


def shade(nats: float) -> str:
    """The color of what falls by so many nats, as CSS."""
    share = max(0.0, min(1.0, nats / FULL_SHADE))
    return f"background:color-mix(in srgb, var(--positive-fill) {round(100 * share)}%, transparent)"


def marked_response(found: Findings, lines: Sequence[SourceLine]) -> str:
    """The words as they stand in the response, shaded; those of a claim are buttons, and marks lead to their lines."""
    text, at, parts = found.response, 0, []
    names = [line.mark for line in lines]
    marks = {run.stop: _mark(names, number, run) for number, run in enumerate(marked_runs(text, found.citations))}
    for word in found.words[found.words["start"] < found.words["stop"]].itertuples():
        of_claim = f' data-claim="{word.claim}" class="in-claim"' if word.claim >= 0 and not found.is_whole else ""
        tag = "button" if of_claim else "span"
        of_account = f' data-account="{word.account}"' if word.account else ""
        title = f"falls by {word.nats:.1f} nats without all parts"
        parts.append(
            f'{html_text(text[at : word.start])}<{tag}{of_claim}{of_account} style="{shade(word.nats)}" '
            f'title="{title}">{html_text(word.text)}</{tag}>{marks.get(word.stop, "")}'
        )
        at = word.stop
    return "".join(parts) + html_text(text[at:])


def _mark(marks: Sequence[str], number: int, run: MarkedRun) -> str:
    """A mark, of which each number or word leads to the first line that has it."""
    names = re.split(rf"(, |\+|{FOLLOWS_FROM})", run.mark)
    links = "".join(f'<a href="#source-{marks.index(name)}">{name}</a>' if name and name in marks else name for name in names)
    return f'<sup class="mark" id="mark-{number}">[{links}]</sup>'


def source_list(found: Findings, lines: Sequence[SourceLine]) -> str:
    """A line for each mark, with links back to where it stands in the answer."""
    runs, items = marked_runs(found.response, found.citations), []
    for i, line in enumerate(lines):
        back = "".join(
            f' <a href="#mark-{number}" title="in the answer: {html_text(found.response[run.start : run.stop])}">↑</a>'
            for number, run in enumerate(runs)
            if line.mark and line.mark in (run.mark, *re.split(rf", |\+|{FOLLOWS_FROM}", run.mark))
        )
        mark = f'<b class="cited">[{html_text(line.mark)}]</b> ' if line.mark else ""
        items.append(f'<li id="source-{i}">{mark}{html_text(" ".join(line.text.split()))}{back}</li>')
    return f'<ul class="citations">{"".join(items)}</ul>' if items else ""
