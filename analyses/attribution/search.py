"""Smallest sets of parts that decide whether an answer is lost or kept, each confirmed by an exact run.

Parts are units, heads or positions. Two questions are put to the same runs, because exchanging a set keeps its complement:

    breaking set S: with S exchanged, the answer is lost        keeping set S: with all but S exchanged, it is kept

An order of the parts comes from outside, the most promising first. Two searches follow it, and the smaller result stays:

- *grow and drop*: the shortest prefix of the order that holds, then each of its parts dropped, last first, if the rest holds;
- *fix the last*: the last part of the shortest prefix is fixed, and the shortest prefix sought again that holds together with
  what is fixed, until what is fixed holds by itself.

Then smaller sets are run, by size and along the order, as far as the cap allows; where all of them were run, the set is a
smallest one. If one that differs from it in a single part is stronger, that one takes its place. No set that was run is smaller
than the one that is named, also where a search ends at its cap. Neither search needs the property to be monotone: every answer
is a run. (A superset of a breaking set may keep the answer again.)

Source: an order from gradients with exact confirmation is the use of attribution patching (Nanda 2023) and AtP* (Kramar et al.
2024, arXiv 2403.00745); the second search is QuickXplain's (Junker 2004) without its halving. Here the order comes from
:mod:`~kvlens.analyses.attribution.order`, and nothing but the runs is reported.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from .answers import Read
from .verdicts import KEPT, LOST, Outcome, Outcomes, Verdict

Set = tuple[int, ...]
ONE_BY_ONE, AT_ONCE = 8, 4
"""Prefixes up to so many parts are all tried, so many together; longer ones by doubling and halving."""


class CapReached(Exception):
    """No more runs are allowed."""


@dataclass
class Runs:
    """Sets that were exchanged, each run once.

    Args:
        outcomes: reads what the model says.
        n_parts: how many parts there are.
        read: (exchanged parts, [row, part]) -> a reading of those rows.
        left: how many more rows may be run.
        at_once: rows that one reading has room for.
    """

    outcomes: Outcomes
    n_parts: int
    read: Callable[[Bool[Tensor, "row part"]], Read]
    left: int
    at_once: int = 64
    found: dict[frozenset[int], Outcome] = field(default_factory=dict)

    def of(self, exchanged: Iterable[Iterable[int]]) -> list[Outcome]:
        """What the model says with each set exchanged.

        Raises:
            CapReached: these are more than are allowed; none of them was run.
        """
        sets = [frozenset(each) for each in exchanged]
        new = [each for each in dict.fromkeys(sets) if each not in self.found]
        if len(new) > self.left:
            raise CapReached
        for start in range(0, len(new), self.at_once):
            some = new[start : start + self.at_once]
            rows = torch.zeros(len(some), self.n_parts, dtype=torch.bool)
            for row, each in enumerate(some):
                rows[row, sorted(each)] = True
            self.found.update(zip(some, self.outcomes.under(self.read(rows)), strict=True))
        self.left -= len(new)
        return [self.found[each] for each in sets]

    def verdict(self, exchanged: Iterable[int]) -> Verdict:
        """Of a set that was run."""
        return self.outcomes.verdict(self.found[frozenset(exchanged)])


class FoundSet(NamedTuple):
    """A breaking or a keeping set.

    Attributes:
        parts: in ascending order.
        smallest: whether all smaller sets were run, and none holds.
    """

    parts: Set
    smallest: bool


@dataclass(frozen=True)
class Asked:
    """One of the two questions, put to runs.

    Attributes:
        runs: where sets are run.
        keeping: whether sets are kept alone instead of exchanged.
        among: the parts that sets consist of; the others are never exchanged (keeping: are always exchanged).
    """

    runs: Runs
    keeping: bool
    among: frozenset[int]

    def exchanged(self, parts: Iterable[int]) -> frozenset[int]:
        """What is exchanged to ask about a set."""
        return frozenset(range(self.runs.n_parts)) - set(parts) if self.keeping else frozenset(parts)

    def holds(self, sets: Sequence[Iterable[int]]) -> list[bool]:
        """Whether each set is one."""
        exchanged = [self.exchanged(each) for each in sets]
        self.runs.of(exchanged)
        return [self.runs.verdict(each).name == (KEPT if self.keeping else LOST) for each in exchanged]

    def effect(self, parts: Iterable[int]) -> float:
        """How strongly a set that was run does what is asked, for ranking sets of one size."""
        log_p = self.runs.found[self.exchanged(parts)].log_p
        return log_p if self.keeping else -log_p

    def smallest_run(self) -> "FoundSet | None":
        """Of the sets that were run and are one, but for all parts together, the strongest of the smallest."""
        name, every = KEPT if self.keeping else LOST, frozenset(range(self.runs.n_parts))
        of = [every - each if self.keeping else each for each in self.runs.found if self.runs.verdict(each).name == name]
        best = min((each for each in of if each and each < self.among), key=lambda x: (len(x), -self.effect(x)), default=None)
        return None if best is None else FoundSet(tuple(sorted(best)), len(best) == 1)


def sets_of(runs: Runs, order: Sequence[int], *, keeping: bool, most_ways: int = 2) -> tuple[list[FoundSet], bool]:
    """Disjoint minimal sets, the first of them as small as could be found; and whether the search came to its end.

    Args:
        runs: where sets are run.
        order: the parts, the most promising first.
        keeping: sets that keep the answer alone, instead of sets that break it.
        most_ways: how many are sought.
    """
    found: list[FoundSet] = []
    rest = list(order)
    while rest and len(found) < most_ways:
        asked = Asked(runs, keeping, frozenset(rest))
        try:
            parts = _smaller_of_two(asked, rest)
            if parts is None:
                return found, True
            if found:
                found.append(FoundSet(parts, False))
            else:
                found.append(_made_smallest(asked, parts, order))
        except CapReached:
            known = None if found else asked.smallest_run()
            return [known] if known is not None and len(known.parts) <= ONE_BY_ONE else found, False
        rest = [part for part in rest if part not in found[-1].parts]
    return found, True


def _smaller_of_two(asked: Asked, order: list[int]) -> Set | None:
    """The smaller result of both searches, without parts that are not needed; None where all parts together do not hold."""
    if not asked.holds([order])[0]:
        return None
    found = _dropped(asked, _shortest(asked, (), order))
    fixed: Set = ()
    with contextlib.suppress(CapReached):
        while len(fixed) < len(found) and not (fixed and asked.holds([fixed])[0]):
            fixed = (*fixed, _shortest(asked, fixed, [part for part in order if part not in fixed])[-1])
        if fixed and asked.holds([fixed])[0]:
            found = min(found, _dropped(asked, fixed), key=len)
    return tuple(sorted(found))


def _shortest(asked: Asked, fixed: Set, order: Sequence[int]) -> Set:
    """``fixed`` and the first parts of an order, as many as are needed; all together are known to hold.

    Short prefixes are tried one after another, long ones by doubling and halving.
    """
    n = len(order)

    def of(length: int) -> Set:
        return (*fixed, *order[:length])

    low = 0
    while low < min(ONE_BY_ONE, n):
        some = range(low + 1, min(low + AT_ONCE, n) + 1)
        holding = [length for length, holds in zip(some, asked.holds([of(x) for x in some]), strict=True) if holds]
        if holding:
            return of(holding[0])
        low = some[-1]
    high = min(2 * low, n)
    while high < n and not asked.holds([of(high)])[0]:
        low, high = high, min(2 * high, n)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if asked.holds([of(middle)])[0] else (middle, high)
    return of(high)


def _dropped(asked: Asked, parts: Set) -> Set:
    """``parts`` without those that are not needed, until every one that is left is, or the cap is reached."""
    with contextlib.suppress(CapReached):
        while len(parts) > 1:
            for part in reversed(parts):
                without = tuple(other for other in parts if other != part)
                if asked.holds([without])[0]:
                    parts = without
                    break
            else:
                break
    return parts


def _made_smallest(asked: Asked, parts: Set, order: Sequence[int]) -> FoundSet:
    """Run all smaller sets, and all single parts, as far as the cap allows; of those of one size the strongest stays."""
    for size in range(1, max(2, len(parts))):
        if math.comb(len(order), size) > asked.runs.left // 2:
            known = asked.smallest_run()
            if known is not None and len(known.parts) < len(parts):
                return known
            return FoundSet(_strongest_near(asked, parts, order), len(parts) == 1)
        sets = list(itertools.combinations(order, size))
        holding = [each for each, holds in zip(sets, asked.holds(sets), strict=True) if holds]
        if holding:
            return FoundSet(tuple(sorted(max(holding, key=asked.effect))), True)
    return FoundSet(_strongest_near(asked, parts, order), True)


def _strongest_near(asked: Asked, parts: Set, order: Sequence[int]) -> Set:
    """The strongest of ``parts`` and the sets with one other part in place of one of them; ``parts`` where the cap is near."""
    others = [part for part in order if part not in parts]
    sets = [tuple(sorted({*parts, new} - {old})) for old in parts for new in others]
    if len(sets) > asked.runs.left // 2:
        return parts
    holding = [each for each, holds in zip(sets, asked.holds(sets), strict=True) if holds]
    return tuple(sorted(_dropped(asked, max((parts, *holding), key=asked.effect))))
