"""Step 8: an explanation in sentences, and as a page. Each sentence is about runs that were made, and names their rows.

The page shows the response with its words shaded by how much they depend on the prompt. Choosing a claim shades the prompt's
parts by what the claim loses without each; choosing a part shows what the model says without it. Below is a strip of layers.
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pandas as pd

from kvlens.explanation.citations import IN_QUESTION, SAID_ANYWAY, SOURCE, TOGETHER, UNFOUND, MarkedRun, marked_runs
from kvlens.explanation.claims import GONE, LOST, NEAR_TIES, OTHER_WORDS, PARTLY, SAID, SAME
from kvlens.explanation.exchanges import POSITION_GROUPS
from kvlens.viz import Piece
from kvlens.viz._text import data_script, html_text

LONGEST_UNIT, LONGEST_SAID = 160, 240
MEANINGS = (
    ("without", "these tokens are deleted, the others keep their positions, and the model is run again"),
    ("the gap is closed", "what follows the deleted tokens moves up, as if they had never been there"),
    (
        "lost",
        "its words fall by more than ln 4 nats, or the first difference that is no near tie is among them, and the text "
        "that is said instead does not have them; partly: it has some",
    ),
    ("still said", "the model says something else, which has them"),
    ("does not come to, or not reached", "it goes another way before these words, which do not fall themselves"),
    ("near ties", "tokens differ only where the odds between two moved by less than a factor of 4"),
    (
        "a layer reads the prompt without a part",
        "its keys and values of everything before the answer are those of a run without it",
    ),
    ("nats", "the log-probability of the words with the whole prompt, minus that without, the words before them given"),
)
"""What the sentences' words mean."""
MOST_NAMED, MOST_LISTED = 3, 6
"""How many of the units or layers that lose a claim alone are described, and how many names stand in a list."""
READABLE = 1e-5
"""The smallest probability that is written as a percentage, 0.001 %."""
SEPARATOR = "+"
"""What stands between the members of a set."""
NO_BREAK = "\N{NO-BREAK SPACE}"
FULL_SHADE = 8.0
"""How many nats give a word or a unit the full color."""


class PrintedSentence(NamedTuple):
    """A sentence.

    Attributes:
        text: what it says.
        rows: indices of ``statements`` that it is about.
    """

    text: str
    rows: tuple[int, ...]


class SourceLine(NamedTuple):
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


def paragraphs(found: Any) -> list[list[PrintedSentence]]:
    """The sentences on the response and its claims, on the units, on the layers, and on positions."""
    return [each for each in map(list, (_of_claims(found), _of_units(found), _of_layers(found), _of_positions(found))) if each]


def in_words(found: Any) -> str:
    """The response with its sources, what is never removed, and the paragraphs, as text."""
    texts = [" ".join(sentence.text for sentence in paragraph) for paragraph in paragraphs(found)]
    sources = "\n".join(map(str, sources_in_words(found)))
    return "\n\n".join(filter(None, [answered(found.marked, found.cut_after), sources, kept_in_words(found), *texts]))


def answered(response: str, cut_after: int | None) -> str:
    """What the model answers, and whether it was cut off there."""
    return f"The model answers: {quoted(response, len(response))}{cut_off(cut_after)}"


def kept_in_words(found: Any) -> str:
    """What no run of the explanation is without."""
    return f"Never removed: {listed(found.always_there)}."


def sources_in_words(found: Any) -> list[SourceLine]:
    """A line for each mark: a source, sources that are needed together, what needs no part, and what none was found for."""
    own = found.citations[found.citations["account"].isin([SOURCE, TOGETHER])]
    lines = []
    for number, rows in own.sort_values("source").groupby("source"):
        alone, unit = rows[rows["account"] == SOURCE], int(rows["unit"].iloc[0])
        text, of_claims = _without_these(found, alone, str(unit), "it") if len(alone) else ("", ())
        lines.append(SourceLine(str(number), f"{unit_named(found, unit)}{'. ' if text else ''}{text}", of_claims))
    several = [rows for _, rows in own[own["account"] == TOGETHER].groupby("claim", sort=False)]
    numbers = [SEPARATOR.join(map(str, sorted(rows["source"]))) for rows in several]
    for mark in dict.fromkeys(numbers):
        claims = pd.concat([rows.head(1) for rows, number in zip(several, numbers, strict=True) if number == mark])
        parts = SEPARATOR.join(map(str, sorted(several[numbers.index(mark)]["unit"])))
        lines.append(SourceLine(mark, *_without_these(found, claims, parts, "these together")))
    return [*lines, *_without_sources(found)]


def _without_these(found: Any, claims: pd.DataFrame, parts: str, them: str) -> tuple[str, tuple[int, ...]]:
    """Which claims are lost without units, and the statements that say so."""
    lost = found.statements.query("about == 'units' and role == 'breaking'")
    rows = lost.index[lost["claim"].isin(claims["claim"]) & (lost["parts"] == parts)]
    return f"Without {them}, {_lost_in_words(found, claims)}.", tuple(map(int, rows))


def _lost_in_words(found: Any, rows: pd.DataFrame) -> str:
    """Which claims are lost, and which in part."""
    by_verdict = rows.groupby("verdict", sort=False)["text"]
    named = {verdict: ["the answer"] if found.is_whole else [*dict.fromkeys(map(repr, words))] for verdict, words in by_verdict}
    return " and ".join(
        f"{listed(words)} {'is' if len(words) == 1 else 'are'} lost{' in part' if verdict == PARTLY else ''}"
        for verdict, words in named.items()
    )


def _without_sources(found: Any) -> Iterator[SourceLine]:
    """The lines on words without a source; what they say is about the run without any part."""
    rows = tuple(map(int, found.rows("units", "none").index))
    account, is_said = found.citations["account"], found.citations["verdict"].isin(SAID)
    verdicts = set(found.citations.loc[account == SAID_ANYWAY, "verdict"])
    left = _phrases(found, (account == SAID_ANYWAY) & ~is_said)
    if verdicts and verdicts <= {SAME, NEAR_TIES}:
        ties = ", but for near ties" if NEAR_TIES in verdicts else ""
        yield SourceLine("memory", f"Without any part of the prompt, the model gives the same answer{ties}.", rows)
    elif said := _phrases(found, (account == SAID_ANYWAY) & is_said):
        yield SourceLine("memory", f"Said without any part of the prompt, too: {_some(said)}.", rows)
    if left:
        fall = "it does not fall" if len(left) == 1 else "these do not fall"
        text = f"Not said without any part of the prompt, but behind the same words {fall}: {_some(left)}."
        yield SourceLine("memory", text, rows)
    if unfound := _phrases(found, account == UNFOUND):
        text = f"Lost without all parts of the prompt, and no part was found that loses it: {_some(unfound)}."
        yield SourceLine("?", text, rows)
    if asked := _phrases(found, account == IN_QUESTION):
        yield SourceLine("", f"Words of the question have no mark: {_some(asked)}.", ())


def _phrases(found: Any, chosen: pd.Series) -> list[str]:
    """The words of some rows of the citations in quotation marks, neighbors together."""
    spans: list[tuple[int, int]] = []
    for row in found.citations[chosen].itertuples():
        if spans and not found.response[spans[-1][1] : row.response_start].strip():
            spans[-1] = (spans[-1][0], row.response_stop)
        else:
            spans.append((row.response_start, row.response_stop))
    return [repr(found.response[start:stop]) for start, stop in spans]


def cut_off(cut_after: int | None) -> str:
    """What stands behind an answer that had not ended."""
    return "" if cut_after is None else f" (cut off after {cut_after} tokens)"


def quoted(text: str, longest: int = LONGEST_SAID) -> str:
    """A text in quotation marks, on one line, cut to a length."""
    line = " ".join(text.split())
    return f'"{line if len(line) <= longest else line[: longest - 1].rstrip() + "…"}"'


def odds(row: Any) -> str:
    """What becomes of a claim's probability: in percent, or in nats where one of the two cannot be read or both look alike."""
    before, after = map(_percent, (row.p_before, row.p_after))
    if min(row.p_before, row.p_after) >= READABLE and before != after:
        return f"{before} to {after}"
    nats = round(float(row.nats), 1)
    return f"it {'falls' if nats >= 0 else 'rises'} by {abs(nats):.1f} nats"


def _percent(p: float) -> str:
    """A probability as people read it."""
    return "> 99.9 %" if p >= 0.9995 else f"{100 * p:.3g} %"


def listed(names: Iterable[object]) -> str:
    """Join names with commas, and the last two with "and"."""
    *most, last = map(str, names)
    return f"{', '.join(most)} and {last}" if most else last


def _ended(sentence: str) -> str:
    """The sentence with a full stop, unless it ends with that of a text in quotation marks."""
    return sentence if sentence.endswith(('."', '!"', '?"')) else f"{sentence}."


def _some(words: Iterable[str]) -> str:
    """List words, each once, and at most `MOST_LISTED` of them."""
    words = list(dict.fromkeys(words))
    n = len(words) - MOST_LISTED
    more = [f"{n} other{'s' if n > 1 else ''}"] if n > 0 else []
    return listed([*words[:MOST_LISTED], *more])


def _some_groups(names: Iterable[str]) -> str:
    """List documents and paragraphs, numbered ones in a row together: ``paragraphs 1 to 20 of system``."""
    found = []
    for (noun, owner), each in itertools.groupby(map(_numbered, names), key=lambda name: name[:2]):
        numbers = [number for *_, number in each if number is not None]
        found.append(f"{noun}{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}{owner}" if numbers else noun)
    return _some(found)


def _numbered(name: str) -> tuple[str, str, int | None]:
    """``system, paragraph 3`` as ``paragraph``, ``of system`` and 3."""
    found = re.fullmatch(r"(?:(.*), )?(paragraph|document) (\d+)", name)
    return (found[2], f" of {found[1]}" if found[1] else "", int(found[3])) if found else (name, "", None)


def _ranges(numbers: Iterable[int]) -> str:
    """Numbers that grow, three or more in a row by their ends: ``1 to 3 and 5``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return listed(each for run in runs for each in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else run))


def unit_named(found: Any, number: int) -> str:
    """A unit by its name, with its text."""
    row = found.units.iloc[number]
    text = f" ({quoted(row.unit_text, LONGEST_UNIT)})" if row.unit_text.strip() != row["name"] else ""
    return f"{row['name']}{text}"


def spoken(row: Any, longest: int | None = LONGEST_SAID) -> str:
    """What the model says in a run; None for ``longest``: all of it."""
    if row.verdict in (SAME, NEAR_TIES):
        return f"the model answers as before{', but for near ties' if row.verdict == NEAR_TIES else ''}"
    if not isinstance(row.says, str):
        return "the model says something else"
    return f"the model says {quoted(row.says, longest or len(row.says))}"


def outcome(named: str, row: Any) -> str:
    """What the model says then, and what that makes of the claim, as sentences name it."""
    instead = spoken(row)
    if row.verdict in (SAME, NEAR_TIES):
        return instead
    if row.verdict == LOST:
        return f"{instead}: {named} is lost ({odds(row)})"
    if row.verdict == PARTLY:
        return f"{instead}: of {named} only {_some(map(repr, row.kept_words.split()))} is left ({odds(row)})"
    if row.verdict == OTHER_WORDS:
        return f"{instead}: {named} is still said"
    return f"{instead}: it does not come to {named}, although that itself falls by only {max(row.nats, 0.0):.2g} nats"


def switched_in_words(found: Any, units: Iterable[int]) -> list[PrintedSentence]:
    """What is said without units that somebody left out, and what becomes of each claim: statements ``switched``."""
    members, table = sorted(units), found.statements
    runs = table[(table["role"] == "switched") & (table["parts"] == SEPARATOR.join(map(str, members)))]
    by_claim = {claim: list(rows.itertuples()) for claim, rows in runs.groupby("claim")}  # the gap kept, then closed
    kept, closed = by_claim[found.about]
    then = spoken(closed, None) if str(closed.says) != str(kept.says) else "the same is said"
    names = listed(found.units["name"][unit] for unit in members)
    said = [
        PrintedSentence(_ended(f"Without {names}, {spoken(kept, None)}"), (int(kept.Index),)),
        PrintedSentence(_ended(f"When the gap is closed, {then}"), (int(closed.Index),)),
    ]
    for claim, (kept, closed) in sorted(by_claim.items(), key=lambda pair: pair[0] != found.about):
        named = found.named if claim == found.about else repr(found.claims["text"][claim])
        other = "" if closed.verdict == kept.verdict else f"; when the gap is closed: {closed.verdict}, {odds(closed)}"
        rows = (int(kept.Index), int(closed.Index)) if other else (int(kept.Index),)
        said.append(PrintedSentence(f"{named}: {kept.verdict}, {odds(kept)}{other}.", rows))
    return said


def _of_claims(found: Any) -> Iterator[PrintedSentence]:
    nothing = found.rows("units", "none").iloc[0]
    row = int(nothing.name)
    instead = "the model gives the same answer" if nothing.verdict == SAME else None
    if nothing.verdict == NEAR_TIES:
        instead = "the model gives the same answer, but for near ties"
    without = instead or f"the model says {quoted(found.without)}"
    n = len(found.units)
    gone = f"With all {n} parts of the prompt removed" if n > 1 else "With the prompt's one part removed"
    if found.is_whole:
        yield PrintedSentence(_ended(f"No single word of it depends on the prompt's parts. {gone}, {without}"), (row,))
        return
    others = [claim for claim in found.claims.itertuples() if claim.claim != found.about]
    first = found.claims.iloc[found.about]
    if nothing.verdict not in GONE:
        yield PrintedSentence(_ended(f"{gone}, {outcome(found.named, nothing)}"), (row,))
    else:
        most = " most," if others and first.nats == found.claims["nats"].max() else ""
        falls = f"{first.text!r} falls{most} by {first.nats:.1f} nats of log-probability"
        yield PrintedSentence(_ended(f"{gone}, {falls}, and {without}"), (row,))
    if others:
        named = listed(f"{claim.text!r} ({claim.nats:.1f})" for claim in others)
        rows = found.statements[found.statements["role"] == "none"].index
        yield PrintedSentence(f"Other words that fall: {named}.", tuple(map(int, rows)))


def _of_units(found: Any) -> Iterator[PrintedSentence]:
    yield from _of_groups(found)
    if not found.cause:
        yield from _no_cause(found)
        return
    named, one_way = found.named, list(_one_way(found))
    breaking = found.rows("units", "breaking")
    kept, closed = breaking[breaking["gap"] == "kept"], breaking[breaking["gap"] == "closed"]
    for row in list(kept.itertuples())[:MOST_NAMED]:
        parts = [int(part) for part in row.parts.split("+")]
        names = listed(unit_named(found, part) for part in parts)
        both = [int(row.Index), *map(int, closed.index[closed["parts"] == row.parts])]
        yield PrintedSentence(f"Without {names}, {outcome(named, row)}, also when the gap is closed.", tuple(both))
    if len(kept) > MOST_NAMED:
        yield PrintedSentence(
            f"{len(kept) - MOST_NAMED} other parts lose it alone, too.", tuple(map(int, kept.index[MOST_NAMED:]))
        )
    if len(found.cause) > 1:
        each = found.rows("units", "each")
        yield PrintedSentence(f"None of the parts loses it alone{_both_ways(one_way)}.", tuple(map(int, each.index)))
    for row in found.rows("units", "only").itertuples():
        those = "that part" if len(found.cause) == 1 else "those parts"
        yield PrintedSentence(_ended(f"With only {those} left, {outcome(named, row)}"), (int(row.Index),))
    yield from one_way


def _of_groups(found: Any) -> Iterator[PrintedSentence]:
    """The sentence on documents or paragraphs inside which nothing was removed by itself."""
    unopened = found.units[~found.units["alone"] & found.units["verdict"].isin([SAME, NEAR_TIES])]
    if not len(unopened):
        return
    rows = found.rows("units", "group")
    members = {"+".join(map(str, units.index)): name for name, units in unopened.groupby("group", sort=False)}
    names = [members[parts] for parts in rows["parts"] if parts in members]
    parts, were = (f"The {len(unopened)} parts", "were") if len(unopened) > 1 else ("The part", "was")
    without = f"any of these {len(names)} as a whole" if len(names) > 1 else "all of it"
    yield PrintedSentence(
        f"{parts} of {_some_groups(names)} {were} not removed one by one: without {without}, the model answers as before, but "
        "for near ties.",
        tuple(map(int, rows.index[rows["parts"].isin(list(members))])),
    )


def _one_way(found: Any) -> Iterator[PrintedSentence]:
    """The sentence on units, or the smallest set of them, that lose the claim only while what follows stays where it stood."""
    removed = found.rows("units", "each", "together").reset_index()
    kept = removed[(removed["gap"] == "kept") & removed["verdict"].isin(GONE)]
    closed = removed[(removed["gap"] == "closed") & ~removed["verdict"].isin(GONE)]
    both = kept.merge(closed, on="parts", suffixes=("", "_closed")).drop_duplicates("parts")
    if not len(both):
        return
    sizes = both["parts"].str.count(r"\+")
    chosen = both[sizes == sizes.min()].head(1 if sizes.min() else MOST_NAMED)
    units = [int(unit) for parts in chosen["parts"] for unit in parts.split("+")]
    names = f"{listed(unit_named(found, unit) for unit in units)}{' together,' if sizes.min() else ''}"
    is_lost = f"{'it is also' if found.cause else f'{found.named} is'} lost"
    yield PrintedSentence(
        f"Without {names} {is_lost}, but only while the gap is left, not when it is closed; so this is not a cause.",
        tuple(map(int, [*chosen["index"], *chosen["index_closed"]])),
    )


def _both_ways(one_way: list[PrintedSentence]) -> str:
    """What a sentence on parts that lose nothing adds where some of them do, while their gap is left."""
    return " both with the gap left and with it closed" if one_way else ""


def _no_cause(found: Any) -> Iterator[PrintedSentence]:
    each, groups, together = (found.rows("units", role) for role in ("each", "group", "together"))
    lost = groups[groups["verdict"].isin(GONE)]
    names = dict(zip(found.units["unit"].astype(str), found.units["group"], strict=True))
    for row in list(lost.itertuples())[:MOST_NAMED]:
        text = f"Without all of {names[row.parts.split('+')[0]]}, {outcome(found.named, row)}"
        yield PrintedSentence(_ended(text), (int(row.Index),))
    if not len(each):
        return
    one_way = list(_one_way(found))
    which = " that was removed by itself" if len(lost) else ", no whole document or paragraph," if len(groups) else ""
    most = " and no set of up to five that was tried" if len(together) else ""
    tried = [*groups.index, *each.index, *together.index]
    text = f"No part{which}{most} loses {found.named}{_both_ways(one_way)}."
    yield PrintedSentence(text, tuple(map(int, tried)))
    yield from one_way
    kept = each[each["gap"] == "kept"]
    row = kept.loc[kept["nats"].idxmax()]
    if row.nats > 0:
        most = f"It falls most, by {row.nats:.2g} nats, without {unit_named(found, int(row.parts))}"
        yield PrintedSentence(_ended(f"{most}: {outcome(found.named, row)}"), (int(row.name),))


def _of_layers(found: Any) -> Iterator[PrintedSentence]:
    singles = found.rows("layers", "each")
    if not len(singles):
        return
    named, n = found.named, found.n_layers
    those = "that part" if len(found.cause) == 1 else "those parts"
    breaking = found.rows("layers", "breaking")
    for i, row in enumerate(breaking.head(MOST_NAMED).itertuples()):
        parts = row.parts.split("+")
        which = f"layer {parts[0]} alone reads" if len(parts) == 1 else f"layers {listed(parts)} together read"
        when = f"{which} the prompt without {those}, and the other layers read all of it"
        when = f"layer {parts[0]} alone does so" if i else when
        yield PrintedSentence(_ended(f"When {when}, {outcome(named, row)}"), (int(row.Index),))
    if not len(breaking):
        yield PrintedSentence(
            f"No single one of the {n} layers, and no set that was tried, loses it.", tuple(map(int, singles.index))
        )
    elif "+" in breaking.iloc[0].parts:
        yield PrintedSentence(f"No single one of the {n} layers loses it.", tuple(map(int, singles.index)))
    else:
        more = [row.parts for row in breaking.itertuples()][MOST_NAMED:]
        also = f"So {'does layer' if len(more) == 1 else 'do layers'} {listed(more)} alone. " if more else ""
        yield PrintedSentence(
            f"{also}Each of the {n} layers was tried; no other loses it alone.", tuple(map(int, singles.index))
        )
    for row in found.rows("layers", "keeping").itertuples():
        parts = row.parts.split("+")
        which = f"layer {parts[0]} reads" if len(parts) == 1 else f"layers {listed(parts)} read"
        text = f"When only {which} the whole prompt, and the others read it without {those}, {outcome(named, row)}"
        yield PrintedSentence(_ended(text), (int(row.Index),))


def _of_positions(found: Any) -> Iterator[PrintedSentence]:
    each = found.rows("positions", "each")
    if not len(each):
        return
    those = "that part" if len(found.cause) == 1 else "those parts"
    breaking = found.rows("positions", "breaking")
    for row in list(breaking.itertuples())[:MOST_NAMED]:
        text = f"When {_places(row)} from the prompt without {those}, in all layers, {outcome(found.named, row)}"
        yield PrintedSentence(_ended(text), (int(row.Index),))
    if not len(breaking) or "+" in breaking.iloc[0].parts:
        yield PrintedSentence(f"None of the {len(each)} groups of positions loses it alone.", tuple(map(int, each.index)))
    for row in list(found.rows("positions", "keeping").itertuples())[:MOST_NAMED]:
        text = f"When only {_places(row)} from the whole prompt, {outcome(found.named, row)}"
        yield PrintedSentence(_ended(text), (int(row.Index),))


def _places(row: Any) -> str:
    groups = row.parts.split("+")
    is_plural = len(groups) > 1 or groups[0] in ("cause", "end")
    return f"{listed(POSITION_GROUPS[name] for name in groups)} {'are' if is_plural else 'is'} read"


# --- the page ---


def explanation_view(found: Any, *, asked: bool = True) -> Piece:
    """Draw an explanation.

    Args:
        found: a :class:`kvlens.explanation.Explained`.
        asked: whether the question stands above the answer, where nothing else says what it was.
    """
    question = f'<p class="found">Asked: {html_text(quoted(found.question))}</p>' if asked and found.question else ""
    told = "".join(
        f'<p class="found">{html_text(text.replace(" %", NO_BREAK + "%"))}</p>'
        for text in (kept_in_words(found), *(" ".join(each.text for each in paragraph) for paragraph in paragraphs(found)))
    )
    meanings = "".join(f"<dt>{html_text(word)}</dt><dd>{html_text(meaning)}</dd>" for word, meaning in MEANINGS)
    body = (
        f'<figure class="piece explained" data-kvlens="explained">{question}'
        f"<figcaption>The model answers{cut_off(found.cut_after)}</figcaption>"
        f'<div class="tokens response">{_response(found)}</div>{_sources(found)}'
        '<p class="note">The darker a word, the more of its log-probability is gone without the parts of the prompt. '
        f"Underlined: words that depend on them; choose one. Dotted: words without a source.</p>{told}"
        f"<h3>The parts of the prompt, and what is lost without each</h3>{_without_numbers(found)}"
        f'<div class="sources">{_units(found)}</div>'
        f'<p class="says" role="status"></p>{_strip(found)}{_positions(found)}'
        f"<details><summary>What the words mean</summary><dl>{meanings}</dl></details>"
        f"{data_script(_data(found))}</figure>"
    )
    return Piece("why the model said that", body)


def _shade(nats: float) -> str:
    share = max(0.0, min(1.0, nats / FULL_SHADE))
    return f"background:color-mix(in srgb, var(--positive-fill) {round(100 * share)}%, transparent)"


def _response(found: Any) -> str:
    """The words as they stand in the response, shaded; those of a claim are buttons, and marks lead to their lines."""
    text, at, parts = found.response, 0, []
    marks = {run.stop: _mark(found, number, run) for number, run in enumerate(marked_runs(text, found.citations))}
    for word in found.words[found.words["start"] < found.words["stop"]].itertuples():
        of_claim = f' data-claim="{word.claim}" class="in-claim"' if word.claim >= 0 and not found.is_whole else ""
        tag = "button" if of_claim else "span"
        of_account = f' data-account="{word.account}"' if word.account else ""
        title = f"falls by {word.nats:.1f} nats without all parts"
        parts.append(
            f'{html_text(text[at : word.start])}<{tag}{of_claim}{of_account} style="{_shade(word.nats)}" '
            f'title="{title}">{html_text(word.text)}</{tag}>{marks.get(word.stop, "")}'
        )
        at = word.stop
    return "".join(parts) + html_text(text[at:])


def _mark(found: Any, number: int, run: MarkedRun) -> str:
    """A mark, of which each number or word leads to the first line that has it."""
    marks = [line.mark for line in sources_in_words(found)]
    names = re.split(r"(, |\+)", run.mark)
    links = "".join(f'<a href="#source-{marks.index(name)}">{name}</a>' if name in marks else name for name in names)
    return f'<sup class="mark" id="mark-{number}">[{links}]</sup>'


def _sources(found: Any) -> str:
    """A line for each mark, with links back to where it stands in the answer."""
    runs, lines = marked_runs(found.response, found.citations), []
    for i, line in enumerate(sources_in_words(found)):
        back = "".join(
            f' <a href="#mark-{number}" title="in the answer: {html_text(found.response[run.start : run.stop])}">↑</a>'
            for number, run in enumerate(runs)
            if line.mark and line.mark in (run.mark, *re.split(r", |\+", run.mark))
        )
        mark = f'<b class="cited">[{html_text(line.mark)}]</b> ' if line.mark else ""
        lines.append(f'<li id="source-{i}">{mark}{html_text(" ".join(line.text.split()))}{back}</li>')
    return f'<ul class="citations">{"".join(lines)}</ul>' if lines else ""


def _without_numbers(found: Any) -> str:
    """The note on parts that were not removed by themselves."""
    if found.units["alone"].all():
        return ""
    return '<p class="note">Those without a number were removed only with their whole document or paragraph.</p>'


def _units(found: Any) -> str:
    return "".join(
        f'<button class="source" data-unit="{row["unit"]}" data-start="{row["start"]}" data-stop="{row["stop"]}">'
        f'<span class="unit">{html_text(row["name"])}</span> {html_text(" ".join(row["unit_text"].split()))} '
        '<b class="effect"></b></button>'
        for row in found.units.to_dict("records")
    )


def _data(found: Any) -> dict[str, Any]:
    """The fall, the label and what is said without the unit, for each claim and unit."""
    runs = found.statements.query("about == 'units' and role in ('each', 'group') and gap == 'kept'")
    causes = [set(map(int, filter(None, cause.split("+")))) for cause in found.claims["cause"]]
    claims = []
    for claim, rows in runs.groupby("claim"):
        named = found.named if claim == found.about else repr(found.claims["text"][claim])
        of_unit = {int(unit): row for row in rows.itertuples() for unit in row.parts.split("+") if row.role == "group"}
        of_unit |= {int(row.parts): row for row in rows.itertuples() if row.role == "each"}
        claims.append([_entry(found, named, unit, of_unit[unit], unit in causes[claim]) for unit in range(len(found.units))])
    return {"about": found.about, "full": FULL_SHADE, "claims": claims}


def _entry(found: Any, named: str, unit: int, row: Any, is_cause: bool) -> dict[str, Any]:
    if row.role == "each":
        label = f"{round(row.nats, 1) + 0.0:.1f} nats, {row.verdict}"
        return {
            "nats": round(float(row.nats), 3),
            "label": label,
            "says": _says(found.units["name"][unit], named, row, is_cause),
        }
    group = found.units["group"][unit]
    says = f"{found.units['name'][unit]} was not removed by itself. {_says(f'all of {group}', named, row, False)}"
    is_first = unit == int(row.parts.split("+")[0])
    label = f"without all of {group}: {row.verdict}" if is_first and row.verdict not in (SAME, NEAR_TIES) else ""
    return {"nats": 0.0, "label": label, "says": says}


def _says(unit: str, claim: str, row: Any, is_cause: bool) -> str:
    said = f"the model says {quoted(row.says, 600)}" if isinstance(row.says, str) else f"the model says the {row.verdict}"
    cause = " It is a cause: the claim is also lost when the gap is closed." if is_cause else ""
    return f"Without {unit}, {said}. {claim}: {row.verdict}, {odds(row)}.{cause}"


def _strip(found: Any) -> str:
    """A bar for each layer: what the claim loses when that layer alone reads the prompt without the cause."""
    singles = found.rows("layers", "each")
    if not len(singles):
        return ""
    highest = max(0.0, float(singles["nats"].max()))
    top = max(0.5, highest)
    bars = "".join(
        f'<div class="layer{" lost" if row.verdict in GONE else ""}" style="height:{100 * max(0.0, row.nats) / top:.1f}%" '
        f'title="layer {row.parts}: {row.nats:+.2f} nats, {row.verdict}"></div>'
        for row in singles.itertuples()
    )
    without = html_text(listed(found.units["name"][unit] for unit in found.cause))
    last, n_lost = len(singles) - 1, int(singles["verdict"].isin(GONE).sum())
    lost = "In the darker ones the claim is lost." if n_lost else "None of them alone loses the claim."
    axis = "".join(f"<span>{i if i % 5 == 0 or i == last else ''}</span>" for i in range(len(singles)))
    return (
        f"<h3>Layers: what {html_text(found.named)} loses when that layer alone reads the prompt without {without}</h3>"
        f'<div class="layers" role="img" aria-label="falls by layer, the highest {highest:.2f} nats">{bars}</div>'
        f'<div class="axis">{axis}</div><p class="note">All {len(singles)} layers were tried one by one. Highest bar: '
        f"{highest:.2g} nats. {lost}</p>"
    )


def _positions(found: Any) -> str:
    """A row for each group of positions: what the claim loses when it holds what the prompt without the cause leaves there."""
    each = found.rows("positions", "each")
    if not len(each):
        return ""
    rows = "".join(
        f'<tr><th scope="row">{html_text(POSITION_GROUPS[row.parts])}</th><td style="{_shade(row.nats)}">{row.nats:.1f} nats, '
        f"{row.verdict}</td></tr>"
        for row in each.itertuples()
    )
    return (
        f"<h3>Positions: what {html_text(found.named)} loses when they are read from the prompt without the cause</h3>"
        f'<table class="positions">{rows}</table><p class="note">In all layers at once. Positions before the cause are '
        "equal in both prompts.</p>"
    )
