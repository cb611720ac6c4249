"""Steps 3 to 6: which units of the prompt lose a claim.

1. *Screen*, of a prompt of more than `MANY` units. Each unit is hidden from the response, for which the prompt is not read
   again: the response does not read the unit's own positions, but what later ones have read of it. Units without which nothing
   changes then (no firm difference, and no claim that falls by more than `SEEMS` nats) are removed *together*, and where
   nothing changes either, that run is what is known about each of them. Where something does, they are halved by what they
   change when hidden, the strongest in one half, each half is tried by itself, and what is left of fewer than `FEWEST` is
   removed unit by unit. So every unit that is said to change nothing is missing in a run. What such a run does not show are
   units whose effects cancel, and, as none does, what also stands elsewhere: see 3.
2. Every other unit is removed, its gap kept. Units that lose a claim are removed again with what follows moved up: those that
   lose it both ways are causes.
3. Where no unit alone is one, the strongest are removed together, then pairs of those that lose the claim together. Strong is a
   unit that costs much when it goes, and little when it alone stays. Of more than `MOST_ORDERED` only the strongest
   are tried so, by what the response loses when these, or all others, are hidden from it.
4. A word that falls by too little to be a claim, but is lost without all units, is one where a unit loses it alone.
5. All units that have a word which is left without a source are removed together: what is said then, too, was not read there.
"""

import itertools
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TypeVar

from kvlens.arguments import Positions
from kvlens.explanation.claims import GONE, Claim, may_be_lost
from kvlens.explanation.explaining import Explaining
from kvlens.explanation.heading import expected_claim
from kvlens.explanation.runs import MORE_TOKENS, PASS, IndexSet, Outcome

MANY = 6
"""How many units are removed one by one without a screen, which would take about as many runs."""
SEEMS, NOTHING = 0.3, 1.0
"""Nats: without units nothing changes if no claim falls by more than `NOTHING`, and there is no firm difference either; a unit
seems to change nothing if no claim falls by more than `SEEMS` when it is hidden. (SmolLM2, nine questions about two or three
documents: none of the 29 sentences in documents without which no claim falls by more than 1 had a firm difference alone.)"""
FEWEST = 3
"""So many units at least are removed together."""
MOST_TOGETHER = 5
"""The largest set of the strongest units that is removed."""
AT_ONCE = 2
"""So many sets are tried before the next ones."""
MOST_ORDERED = 12
"""So many units at most are kept alone."""
Removed = TypeVar("Removed", int, IndexSet)


class UnitSearch:
    """The removals of one explanation's units.

    Args:
        explaining: the explanation.

    Attributes:
        each: what is said without each unit that was removed by itself.
        together: what is said without units that were removed together, where nothing changes.
    """

    def __init__(self, explaining: Explaining) -> None:
        self.explaining, self.runs = explaining, explaining.runs
        self.each: dict[int, Outcome] = {}
        self.together: dict[IndexSet, Outcome] = {}

    @property
    def everything(self) -> frozenset[int]:
        """All units."""
        return frozenset(range(len(self.explaining.units)))

    @property
    def n_first(self) -> int:
        """How many units are removed one by one, about."""
        return min(len(self.everything), MANY)

    def cost(self) -> int:
        """Estimate what it takes to remove units: see `ExplanationProgress`."""
        n, n_response = len(self.explaining.prompt), len(self.explaining.response.tokens) + MORE_TOKENS
        n_rows = self.n_first + 3
        return n_rows * (n // 2 + n_response) + 2 * n_response * PASS

    def begin(self) -> Outcome:
        """Remove everything, which shows the claims, then units; returns what is said without everything."""
        few = sorted(self.everything) if len(self.everything) <= MANY else []
        with self.runs.texts_together():
            nothing, *_ = self.runs.without([self.everything, *([unit] for unit in few)])
            self.explaining.find_claims(nothing)
            self.explaining.expected = expected_claim(self.explaining)
            chosen = few or self._screened()
            self._remove(chosen)
            self._follow(nothing)
        self._remove(chosen)
        return self.runs.without([self.everything])[0]

    def _remove(self, units: Sequence[int]) -> None:
        """Remove units one by one, or read what is said by now."""
        self.each |= dict(zip(units, self.runs.without([[unit] for unit in units]), strict=True))

    # --- the screen ---------------------------------------------------------------------------------------------------

    @cached_property
    def hidden(self) -> list[Outcome]:
        """What becomes of the response with each unit hidden from it."""
        return [*self.runs.hidden([[unit] for unit in sorted(self.everything)])]

    def _screened(self) -> list[int]:
        """Remove together what seems to change nothing; returns the other units, the strongest first."""
        order = sorted(self.everything, key=lambda unit: -self._change(self.hidden[unit]))
        waiting = [[unit for unit in order if not self._changes(self.hidden[unit], SEEMS)]]
        while waiting:
            units = waiting.pop()
            if len(units) < FEWEST:
                continue
            (now,) = self.runs.without([units], wants_text=lambda now: False)
            if self._changes(now):
                strongest = self._half(units)
                waiting += [units[:strongest], units[strongest:]]
            else:
                self.together[tuple(sorted(units))] = now
        left = [unit for unit in order if not any(unit in units for units in self.together)]
        n = len(self.explaining.prompt)
        return [unit for i, unit in enumerate(left) if self.explaining.room("the weakest parts one by one", (i + 1) * n)]

    def _half(self, units: Sequence[int]) -> int:
        """How many of the strongest units make half of all falls when each is hidden; where these are small, half of the units.

        Where few units matter, the other half is large, and a large group leaves few tokens to read.
        """
        share = NOTHING / len(units)
        falls = list(itertools.accumulate(max(self._change(self.hidden[unit]), 0.0) + share for unit in units))
        return max(1, sum(fall <= falls[-1] / 2 for fall in falls))

    def _change(self, now: Outcome) -> float:
        """By how much the claim falls that falls most."""
        return max(self.fall(number, now) for number in range(len(self.explaining.claims)))

    def _changes(self, now: Outcome, most: float = NOTHING) -> bool:
        return now.firm is not None or self._change(now) > most

    # --- statements ---------------------------------------------------------------------------------------------------

    def _follow(self, nothing: Outcome) -> None:
        """Run at once what follows where units lose a claim, or may together, so that all texts are generated together."""
        lost: dict[int, None] = {}
        for number in range(len(self.explaining.claims)):
            may = sorted(self._may_lose(number, self.each), key=lambda unit: -self.fall(number, self.each[unit]))
            lost |= dict.fromkeys(may)
            if len(self.everything) == 1:
                continue
            others = self.everything.difference(may)
            if may and others and number == self.explaining.expected:
                self.runs.without([others])
            elif not may and self._may_lose(number, {0: nothing}):
                self._follow_sets(number)
        self.runs.without([[unit] for unit in lost], "closed")

    def _follow_sets(self, number: int) -> None:
        sets = self._sets(number)[:AT_ONCE]
        with self.runs.step("sets"):
            found = self._may_lose(number, dict(zip(sets, self._without(sets), strict=True)))
            self.runs.without(found[:1], "closed")
            if number == self.explaining.expected:
                self.runs.without([others for members in found[:1] if (others := self.everything.difference(members))])

    def _without(self, sets: Sequence[IndexSet]) -> list[Outcome]:
        """What is said without sets; as a text where that decides about any claim."""
        return self.runs.without(
            sets, wants_text=lambda now: any(self._may_lose(i, {0: now}) for i in range(len(self.explaining.claims)))
        )

    def _may_lose(self, number: int, outcomes: dict[Removed, Outcome]) -> list[Removed]:
        """What may lose a claim, so that the text that is said instead decides."""
        claim = self.explaining.claims[number]
        return [key for key, now in outcomes.items() if may_be_lost(claim, self.fall(number, now), now.firm)]

    def causes(self, heading: int) -> list[IndexSet]:
        """The statements on units; of each claim the first set that loses it."""
        for number in range(len(self.explaining.claims)):
            for units, now in self.together.items():
                self.add(number, now, "group", units)
        self._add_each(self.each)
        found = [self._cause(number, self._losing(number), number == heading) for number in range(len(self.explaining.claims))]
        words = self.explaining.words_lost()
        may = [unit for unit in sorted(self.each) if any(self._loses(unit, word) for word in words)]
        self.runs.without([[unit] for unit in may], "closed")
        for word in words:
            if losing := [unit for unit in may if self._loses(unit, word) and self._loses(unit, word, "closed")]:
                number = self.explaining.with_claim(word)
                for unit in sorted(self.each):
                    self.add(number, self.each[unit], "each", [unit])
                found.append(self._cause(number, losing, False))
        self._remove_told()
        return found

    def _remove_told(self) -> None:
        """Remove all units that have a word without a source; see :attr:`Explaining.untold`."""
        explaining = self.explaining
        words = frozenset(word for claim in explaining.words_without_source() for word in claim.words)
        having = [unit for unit, own in enumerate(explaining.words_of_units) if not own.isdisjoint(words)]
        if having and len(having) < len(self.everything) and explaining.room("words without a source", len(explaining.prompt)):
            (explaining.untold,) = self.runs.without([having])
            for number in range(len(explaining.claims)):
                self.add(number, explaining.untold, "telling", having)

    def _loses(self, unit: int, claim: Claim, gap: Positions = "kept") -> bool:
        return self.explaining.of(claim, self.runs.without([[unit]], gap)[0]).name in GONE

    def _add_each(self, units: Iterable[int]) -> None:
        for number, unit in itertools.product(range(len(self.explaining.claims)), sorted(units)):
            self.add(number, self.each[unit], "each", [unit])

    def _losing(self, number: int) -> list[int]:
        """The units that lose a claim with their gap kept, the strongest first."""
        order = sorted(self.each, key=lambda unit: -self.fall(number, self.each[unit]))
        return [unit for unit in order if self.explaining.lost(number, self.each[unit])]

    def _cause(self, number: int, single: list[int], is_heading: bool) -> IndexSet:
        breaking: list[IndexSet] = [(unit,) for unit in single if self._closed(number, (unit,), self.each[unit])]
        several = len(self.everything) > 1 and self.explaining.lost(number, self.explaining.nothing)
        n_tokens = 2 * min(len(self.everything), MOST_ORDERED) * len(self.explaining.prompt)
        if not breaking and several and self.explaining.room("sets of units", n_tokens):
            with self.runs.step("sets"):
                breaking = self._several(number)
        others = self.everything.difference(*breaking)
        if breaking and others and is_heading:
            self.add(number, self.runs.without([others])[0], "only", self.everything - others, others=True)
        return breaking[0] if breaking else ()

    def _closed(self, number: int, members: Iterable[int], kept: Outcome) -> bool:
        """Whether a set that loses the claim with its gap kept does so with its gap closed."""
        now = self.runs.without([members], "closed")[0]
        lost = self.explaining.lost(number, now)
        self.add(number, now, "breaking" if lost else "each", members, gap="closed")
        if lost:
            self.add(number, kept, "breaking", members)
        return lost

    def _several(self, number: int) -> list[IndexSet]:
        """The smallest set of units that loses the claim, of those that were tried; or those of its units that do so alone."""
        found = self._first_lost(number, self._sets(number))
        if found is not None and len(found) > 2:
            strongest = [unit for unit in self._order(number) if unit in found]
            pairs = [tuple(sorted(pair)) for pair in itertools.combinations(strongest, 2)]
            found = self._first_lost(number, pairs[1:]) or found  # the strongest two were tried
        if found is None:
            return []
        new = [unit for unit in found if unit not in self.each]
        self._remove(new)
        self._add_each(new)
        alone = [unit for unit in self._losing(number) if unit in new]
        return [(unit,) for unit in alone if self._closed(number, (unit,), self.each[unit])] or [found]

    def _sets(self, number: int) -> list[IndexSet]:
        """The strongest two units, three, and so on; of few units all of them at last."""
        order = self._order(number)
        return [tuple(sorted(order[:size])) for size in range(2, min(MOST_TOGETHER, len(order)) + 1)]

    def _order(self, number: int) -> list[int]:
        """Units, first those that cost most when they go and least when they alone stay."""
        units = sorted(self.everything)
        if len(units) > MOST_ORDERED:
            alone = self.runs.hidden([self.everything - {unit} for unit in units])
            units = self._by_strength(number, units, self.hidden, alone)[:MOST_ORDERED]
        gone = [self.each[unit] if unit in self.each else self.hidden[unit] for unit in units]
        only = self.runs.without([self.everything - {unit} for unit in units], wants_text=lambda now: False)
        return self._by_strength(number, units, gone, only)

    def _by_strength(self, number: int, units: Sequence[int], gone: Sequence[Outcome], only: Sequence[Outcome]) -> list[int]:
        strength = [self.fall(number, a) - self.fall(number, b) for a, b in zip(gone, only, strict=True)]
        return [unit for _, unit in sorted(zip(strength, units, strict=True), key=lambda pair: -pair[0])]

    def _first_lost(self, number: int, sets: Sequence[IndexSet]) -> IndexSet | None:
        """The first set without which the claim is lost; a few are removed at a time."""
        for start in range(0, len(sets), AT_ONCE):
            some = sets[start : start + AT_ONCE]
            with self.runs.texts_together():
                may = self._may_lose(number, dict(zip(some, self._without(some), strict=True)))
                self.runs.without(may[:1], "closed")
            outcomes = self._without(some)
            for members, now in zip(some, outcomes, strict=True):
                self.add(number, now, "together", members)
            for members, now in zip(some, outcomes, strict=True):
                if self.explaining.lost(number, now) and self._closed(number, members, now):
                    return members
        return None

    def fall(self, number: int, now: Outcome) -> float:
        return self.explaining.fall(self.explaining.claims[number], now)

    def add(
        self, number: int, now: Outcome, role: str, members: Iterable[int], *, others: bool = False, gap: Positions = "kept"
    ) -> None:
        self.explaining.add(number, now, "units", role, sorted(members), others=others, gap=gap)
