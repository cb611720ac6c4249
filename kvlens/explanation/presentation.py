"""Step 8: an explanation in sentences. Each is about runs that were made, and names their rows."""

import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pandas as pd

from kvlens.explanation.claims import FIRM, GONE, LOST, NEAR_TIES, NOT_KNOWN, OTHER_WORDS, PARTLY, SAME
from kvlens.explanation.exchanges import POSITION_GROUPS
from kvlens.explanation.explained import Findings
from kvlens.explanation.explaining import SEPARATOR

LONGEST_UNIT, LONGEST_SAID = 160, 240
MEANINGS = (
    ("without", "these tokens are deleted, the others keep their positions, and the model is run again"),
    (
        "the model says",
        "its own text, from the first difference on that is no near tie; before it, and so at near ties, the answer's words "
        "are kept",
    ),
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


class PrintedSentence(NamedTuple):
    """A sentence.

    Attributes:
        text: what it says.
        rows: indices of ``statements`` that it is about.
    """

    text: str
    rows: tuple[int, ...]


def paragraphs(found: Findings) -> list[list[PrintedSentence]]:
    """The sentences on the response and its claims, on the units, on the layers, and on positions."""
    units = [*_of_units(found), *_of_groups(found)]
    return [each for each in map(list, (_of_claims(found), units, _of_layers(found), _of_positions(found))) if each]


def asked(question: str) -> str:
    """What the model was asked; nothing where that is not known."""
    return f"Asked: {quoted(question)}" if question else ""


def answered(response: str, cut_after: int | None) -> str:
    """What the model answers, and whether it was cut off there."""
    return f"The model answers: {quoted(response, len(response))}{cut_off(cut_after)}"


def kept_in_words(found: Findings) -> str:
    """What no run of the explanation is without."""
    return f"Never removed: {listed(found.always_there)}."


def cut_off(cut_after: int | None) -> str:
    """What stands behind an answer that had not ended."""
    return "" if cut_after is None else f" (cut off after {cut_after} tokens)"


def quoted(text: str, longest: int = LONGEST_SAID) -> str:
    """A text in quotation marks, on one line, cut to a length."""
    line = " ".join(text.split())
    return f'"{line if len(line) <= longest else line[: longest - 1].rstrip() + "…"}"'


def odds(row: Any) -> str:
    """What becomes of a claim's probability: in percent, or in nats where one of the two cannot be read or both look alike.

    What is lost without a firm fall is lost as its first differing token gives way to another, by the definition of *lost*.
    """
    before, after = map(_percent, (row.p_before, row.p_after))
    nats = round(float(row.nats), 1)
    by = "; another word becomes likelier" if row.verdict in GONE and row.nats <= FIRM else ""
    if min(row.p_before, row.p_after) >= READABLE and before != after:
        return f"{before} to {after}{by}"
    return f"it {'falls' if nats >= 0 else 'rises'} by {abs(nats):.1f} nats{by}"


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


def some_named(words: Iterable[str]) -> str:
    """List words, each once, and at most `MOST_LISTED` of them."""
    words = list(dict.fromkeys(words))
    n = len(words) - MOST_LISTED
    more = [f"{n} other{'s' if n > 1 else ''}"] if n > 0 else []
    return listed([*words[:MOST_LISTED], *more])


def _some_units(names: Iterable[str]) -> str:
    """List units, numbered ones in a row together: ``sentences 1 to 20 of system``."""
    found = []
    for (noun, owner), each in itertools.groupby(map(_numbered, names), key=lambda name: name[:2]):
        numbers = [number for *_, number in each if number is not None]
        found.append(f"{noun}{'s' if len(numbers) > 1 else ''} {_ranges(numbers)}{owner}" if numbers else noun)
    return some_named(found)


def _numbered(name: str) -> tuple[str, str, int | None]:
    """``system, sentence 3`` as ``sentence``, ``of system`` and 3."""
    found = re.fullmatch(r"(?:(.*), )?(\w+) (\d+)", name)
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


def unit_named(found: Findings, number: int) -> str:
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
        return f"{instead}: of {named} only {some_named(map(repr, row.kept_words.split()))} is left ({odds(row)})"
    if row.verdict == OTHER_WORDS:
        return f"{instead}: {named} is still said"
    return f"{instead}: it does not come to {named}, although that itself falls by only {max(row.nats, 0.0):.2g} nats"


def switched_in_words(found: Findings, units: Iterable[int]) -> list[PrintedSentence]:
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


def _of_claims(found: Findings) -> Iterator[PrintedSentence]:
    nothing = found.rows("units", "none").iloc[0]
    row = int(nothing.name)
    instead = "the model gives the same answer" if nothing.verdict == SAME else None
    if nothing.verdict == NEAR_TIES:
        instead = "the model gives the same answer, but for near ties"
    without = instead or f"the model says {quoted(found.without or '')}"
    n = len(found.units)
    of_several = "both parts" if n == 2 else f"all {n} parts"
    gone = f"With {of_several} of the prompt removed" if n > 1 else "With the prompt's one part removed"
    if found.is_whole:
        whole = "Behind the words before it, no word falls by much; what is explained is the whole answer."
        yield PrintedSentence(_ended(f"{whole} {gone}, {without}"), (row,))
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


def _of_units(found: Findings) -> Iterator[PrintedSentence]:
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
        those = "that part" if SEPARATOR not in row.parts else "those parts"
        yield PrintedSentence(_ended(f"With only {those} left, {outcome(named, row)}"), (int(row.Index),))
    yield from one_way


def _of_groups(found: Findings) -> Iterator[PrintedSentence]:
    """The sentences on units that were not removed by themselves."""
    rows, names = found.rows("units", "group"), found.units["name"]
    for group, units in found.units[~found.units["alone"]].groupby("group", sort=False):
        if not group:
            yield PrintedSentence(f"Not removed, as the budget had no room for it: {_some_units(units['name'])}.", ())
            continue
        of_group = rows[rows["parts"] == group]
        named = _some_units(names[int(unit)] for unit in group.split(SEPARATOR))
        text = f"Removed together: {named}. Without these, {outcome(found.named, of_group.iloc[0])}"
        yield PrintedSentence(_ended(text), tuple(map(int, of_group.index)))


def _one_way(found: Findings) -> Iterator[PrintedSentence]:
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


def _no_cause(found: Findings) -> Iterator[PrintedSentence]:
    each, groups, together = (found.rows("units", role) for role in ("each", "group", "together"))
    if not len(each) + len(groups):
        return
    one_way = list(_one_way(found))
    which = " that was removed" if (found.units["verdict"] == NOT_KNOWN).any() else ""
    most = " and no set of up to five that was tried" if len(together) else ""
    tried = [*groups.index, *each.index, *together.index]
    text = f"No part{which}{most} loses {found.named}{_both_ways(one_way)}."
    yield PrintedSentence(text, tuple(map(int, tried)))
    yield from one_way
    kept = each[(each["gap"] == "kept") & (each["nats"] > 0)]
    for row in kept.nlargest(1, "nats").itertuples():
        of_these = "Of the parts that were removed alone it" if len(groups) else "It"
        most = f"{of_these} falls most without {unit_named(found, int(row.parts))}, by {row.nats:.2g} nats{_where(found, row)}"
        yield PrintedSentence(_ended(f"{most}: {outcome(found.named, row)}"), (int(row.Index),))


def _where(found: Findings, row: Any) -> str:
    """At which word a whole answer falls most, which need not be one that the answer is about."""
    if not found.is_whole:
        return ""
    falls = found.effects[found.effects["unit"] == int(row.parts)]
    return f", most of all at {falls['text'][falls['effect'].idxmax()]!r}"


def _of_layers(found: Findings) -> Iterator[PrintedSentence]:
    tried = found.rows("layers", "each", "together")
    if not len(tried):
        return
    those = "that part" if len(found.cause) == 1 else "those parts"
    breaking = found.rows("layers", "breaking")
    for i, row in enumerate(breaking.head(MOST_NAMED).itertuples()):
        is_single = SEPARATOR not in row.parts
        when = f"{layers_named(row.parts)} {'alone reads' if is_single else 'together read'} the prompt without {those}"
        when = f"{layers_named(row.parts)} {'alone does' if is_single else 'together do'} so" if i else when
        when += "" if i else ", and the other layers read all of it"
        yield PrintedSentence(_ended(f"When {when}, {outcome(found.named, row)}"), (int(row.Index),))
    yield from _layers_beside(found, tried, breaking)
    for row in found.rows("layers", "keeping").itertuples():
        which = f"{layers_named(row.parts)} {'read' if SEPARATOR in row.parts else 'reads'}"
        text = f"When only {which} the whole prompt, and the others read it without {those}, {outcome(found.named, row)}"
        yield PrintedSentence(_ended(text), (int(row.Index),))


def _layers_beside(found: Findings, tried: pd.DataFrame, breaking: pd.DataFrame) -> Iterator[PrintedSentence]:
    """The sentences on other layers that lose the claim, and on those that do not."""
    alone = breaking[~breaking["parts"].str.contains(SEPARATOR, regex=False)]
    if len(more := breaking.iloc[MOST_NAMED:]):
        others = listed(layers_named(parts) for parts in more["parts"])
        yield PrintedSentence(f"So do {others}, {'each by itself' if len(more) > 1 else 'too'}.", tuple(map(int, more.index)))
    singles = tried[~tried["parts"].str.contains(SEPARATOR, regex=False)]
    if len(singles) == found.n_layers:
        text = (
            f"No single one of the {found.n_layers} layers{'' if len(breaking) else ', and no set that was tried,'} loses it."
        )
        if len(alone):
            text = f"Each of the {found.n_layers} layers was tried; no other loses it alone."
        yield PrintedSentence(text, tuple(map(int, singles.index)))
        return
    kept = tried[~tried["verdict"].isin([*GONE, NOT_KNOWN])]
    kept = kept[[is_range(parts) and not _is_inside(parts, kept["parts"]) for parts in kept["parts"]]]
    if len(kept):
        named = listed(map(layers_named, sorted(kept["parts"], key=_first_layer)))
        loses = f"loses it{'' if len(breaking) else ', nor did any set of these that was tried'}"
        yield PrintedSentence(f"None of these by itself {loses}: {named}.", tuple(map(int, kept.index)))


def layers_named(parts: str) -> str:
    """``22+23+24`` as ``layers 22 to 24``."""
    layers = [int(part) for part in parts.split(SEPARATOR)]
    return f"layer{'s' if len(layers) > 1 else ''} {_ranges(layers)}"


def _first_layer(parts: str) -> int:
    return int(parts.split(SEPARATOR)[0])


def is_range(parts: str) -> bool:
    """Whether layers are neighbors."""
    layers = [int(part) for part in parts.split(SEPARATOR)]
    return layers[-1] - layers[0] == len(layers) - 1


def _is_inside(parts: str, others: Iterable[str]) -> bool:
    """Whether a set of layers is a part of another one."""
    own = set(parts.split(SEPARATOR))
    return any(own < set(other.split(SEPARATOR)) for other in others)


def _of_positions(found: Findings) -> Iterator[PrintedSentence]:
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
