"""Steps 3 to 6: which units of the prompt lose a claim: documents or paragraphs first, then the units inside, then sets.

1. A prompt of more than `MANY` units has its documents or paragraphs (the *groups*) removed first, each whole. Inside a group
   whose removal changes nothing (no firm difference, and no claim that falls by more than `NOTHING` nats), no unit is removed
   by itself, and nothing is said about single ones.
2. Every other unit is removed, its gap kept. Units that lose a claim are removed again with what follows moved up: those that
   lose it both ways are causes.
3. Where no unit alone is one, the strongest are removed together, then pairs of those that lose the claim together; of groups
   first. So a fact that stands in two documents, neither of which changes anything, is found: the documents are lost together,
   and their units are then tried.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvlens import KVModel
from kvlens.explanation.claims import may_be_lost
from kvlens.explanation.runs import MORE_TOKENS, PASS, IndexSet, Outcome
from kvlens.units import Layout, Unit, cut

MANY = 12
"""How many units are removed one by one from the start; of more, groups come first."""
NOTHING = 0.3
"""Nats: a group without which no claim falls by more changes nothing, if there is no firm difference either. (SmolLM2, nine
questions about two or three documents: none of the 12 sentences in such documents had a firm difference alone, and the largest
fall was 0.33 nats; with a bound of 1 none of 29.)"""
MOST_TOGETHER, AT_ONCE = 5, 2
"""Sets of the strongest units up to so many; so many sets are tried before the next ones."""


class UnitGroup(NamedTuple):
    """Units that are removed as a whole.

    Attributes:
        name: such as ``minutes.txt``, or ``minutes.txt, paragraph 2``.
        members: units by number.
    """

    name: str
    members: frozenset[int]


def groups_of(model: KVModel, layout: Layout, units: Sequence[Unit]) -> list[UnitGroup]:
    """The documents or the paragraphs of a prompt: of the two, the cut that takes fewer runs to find the units of one that
    matters. Empty if that takes no fewer runs than removing each unit."""
    best: list[UnitGroup] = []
    fewest = len(units)
    for level in ("document", "paragraph") if len(units) > MANY and model.tokenizer is not None else ():
        groups = [
            UnitGroup(each.name, frozenset(i for i, unit in enumerate(units) if each.start <= unit.start < each.stop))
            for each in cut(model, layout, level)
        ]
        groups = [group for group in groups if group.members]
        is_partition = sorted(i for group in groups for i in group.members) == list(range(len(units)))
        n_runs = len(groups) + max((len(group.members) for group in groups), default=0)
        if is_partition and len(groups) > 1 and n_runs < fewest:
            best, fewest = groups, n_runs
    return best


class UnitSearch:
    """The removals of one explanation's units.

    Args:
        explaining: the explanation.
        groups: of :func:`groups_of`.

    Attributes:
        each: what is said without each unit that was removed by itself.
        first: the sets that are removed first: groups, or single units.
    """

    def __init__(self, explaining: Any, groups: Sequence[UnitGroup]) -> None:
        self.explaining, self.runs, self.groups = explaining, explaining.runs, groups
        self.everything = frozenset(range(len(explaining.units)))
        self.each: dict[int, Outcome] = {}
        self.first = [group.members for group in groups] or [frozenset({unit}) for unit in self.everything]

    @property
    def noun(self) -> str:
        return "documents or paragraphs" if self.groups else "units"

    def cost(self) -> int:
        """Estimate what it takes to remove what is removed first, and the units of one group: see `ExplanationProgress`."""
        n, n_response = len(self.explaining.prompt), len(self.explaining.response.tokens) + MORE_TOKENS
        n_rows = len(self.first) + 3 + max((len(group.members) for group in self.groups), default=0)
        return n_rows * (n // 2 + n_response) + (4 if self.groups else 2) * n_response * PASS

    def begin(self) -> Outcome:
        """Remove everything, which shows the claims, and what is removed first; returns what is said without everything."""
        sets = [self.everything, *self.first]
        with self.runs.texts_together():
            nothing, *first = self.runs.without(sets)
            self.explaining.find_claims(nothing)
            if not self.groups:
                self._follow(dict(enumerate(first)))
        nothing, *first = self.runs.without(sets)
        self.of_groups = list(zip(self.groups, first, strict=True)) if self.groups else []
        if not self.groups:
            self.each = dict(enumerate(first))
        return nothing

    def causes(self) -> list[IndexSet]:
        """The statements on units; of each claim the first set that loses it."""
        claims = range(len(self.explaining.claims))
        for number in claims:
            for group, now in self.of_groups:
                self.add(number, now, "group", group.members)
        self._open([group for group, now in self.of_groups if self._matters(now)])
        return [self._cause(number, self._losing(number)) for number in claims]

    def _follow(self, each: dict[int, Outcome]) -> None:
        """Run at once what follows where a unit loses a claim: its gap closed, and all but the strongest removed."""
        lost: dict[int, None] = {}
        strongest: dict[int, None] = {}
        for number, claim in enumerate(self.explaining.claims):
            falls = {unit: self.fall(number, now) for unit, now in each.items()}
            may = [unit for unit, now in each.items() if may_be_lost(claim, falls[unit], now.firm)]
            lost |= dict.fromkeys(may)
            if may and len(self.everything) > 1:
                strongest[max(may, key=falls.__getitem__)] = None
        self.runs.without_these(
            [*(([unit], "closed") for unit in lost), *((self.everything - {unit}, "kept") for unit in strongest)]
        )

    def _matters(self, now: Outcome) -> bool:
        falls = (self.explaining.fall(claim, now) for claim in self.explaining.claims)
        return now.firm is not None or max(falls) > NOTHING

    def _open(self, groups: Sequence[UnitGroup]) -> None:
        """Remove the units of some groups one by one, and add what was found on all claims so far."""
        new = [unit for group in groups for unit in sorted(group.members) if unit not in self.each]
        n_tokens = len(new) * len(self.explaining.prompt)
        if self.groups and new and self.explaining.room("units inside documents or paragraphs", n_tokens):
            with self.runs.texts_together():
                self._follow(dict(zip(new, self.runs.without([[unit] for unit in new]), strict=True)))
            self.each |= dict(zip(new, self.runs.without([[unit] for unit in new]), strict=True))
        else:
            new = [] if self.groups else list(self.each)
        for number, unit in itertools.product(range(len(self.explaining.claims)), new):
            self.add(number, self.each[unit], "each", [unit])

    def _losing(self, number: int) -> list[int]:
        """The units that lose a claim with their gap kept, the strongest first."""
        order = sorted(self.each, key=lambda unit: -self.fall(number, self.each[unit]))
        return [unit for unit in order if self.explaining.lost(number, self.each[unit])]

    def _cause(self, number: int, single: list[int]) -> IndexSet:
        breaking: list[IndexSet] = [(unit,) for unit in single if self._closed(number, (unit,), self.each[unit])]
        several = len(self.everything) > 1 and self.explaining.lost(number, self.explaining.nothing)
        n_tokens = 2 * len(self.each or self.first) * len(self.explaining.prompt)
        if not breaking and several and self.explaining.room("sets of units", n_tokens):
            with self.runs.step("sets"):
                breaking = self._together(number)
        for members in breaking[:1]:
            self._only(number, members)
        return breaking[0] if breaking else ()

    def _closed(self, number: int, members: Iterable[int], kept: Outcome) -> bool:
        """Whether a set that loses the claim with its gap kept does so with its gap closed."""
        now = self.runs.without([members], "closed")[0]
        lost = bool(self.explaining.lost(number, now))
        self.add(number, now, "breaking" if lost else "each", members, gap="closed")
        if lost:
            self.add(number, kept, "breaking", members)
        return lost

    def _together(self, number: int) -> list[IndexSet]:
        """The smallest set of units that loses the claim, of those that were tried."""
        if self.groups:
            self._open([self.groups[i] for i in self._groups_together(number)])
            single: list[IndexSet] = [(i,) for i in self._losing(number) if self._closed(number, (i,), self.each[i])]
            if single:
                return single
        units = sorted(self.each)
        order = [units[i] for i in self._by_strength(number, [frozenset({unit}) for unit in units])]
        most = min(MOST_TOGETHER, len(self.everything) - 1, len(order))
        found = self._first_lost(number, [tuple(sorted(order[:size])) for size in range(2, most + 1)])
        if found is not None and len(found) > 2:
            strongest = [unit for unit in order if unit in found]
            pairs = [tuple(sorted(pair)) for pair in itertools.combinations(strongest, 2)]
            found = self._first_lost(number, pairs[1:]) or found  # the strongest two were tried
        return [] if found is None else [found]

    def _groups_together(self, number: int) -> list[int]:
        """The groups in which a set is looked for: one that loses the claim alone, or the strongest that do together."""
        outcomes = [now for _, now in self.of_groups]
        n = len(outcomes)
        order = sorted(range(n), key=lambda i: -self.fall(number, outcomes[i]))
        alone = [i for i in order if self.explaining.lost(number, outcomes[i])]
        if alone:
            return alone[:1]
        order = self._by_strength(number, self.first)
        for size in range(2, min(MOST_TOGETHER, n - 1) + 1):
            chosen = order[:size]
            members = frozenset().union(*(self.first[i] for i in chosen))
            (now,) = self.runs.without([members], wants_text=self._may_lose)
            self.add(number, now, "together", sorted(members))
            if self.explaining.lost(number, now):
                return chosen
        return order[:MOST_TOGETHER]

    def _by_strength(self, number: int, sets: Sequence[frozenset[int]]) -> list[int]:
        """Numbers of sets, first those that cost most when they go and least when they alone stay."""
        gone = self.runs.without(sets)
        only = self.runs.without([self.everything - each for each in sets], wants_text=lambda now: False)
        strength = [self.fall(number, a) - self.fall(number, b) for a, b in zip(gone, only, strict=True)]
        return sorted(range(len(sets)), key=lambda i: -strength[i])

    def _first_lost(self, number: int, sets: Sequence[IndexSet]) -> IndexSet | None:
        """The first set without which the claim is lost; a few are removed at a time."""
        for start in range(0, len(sets), AT_ONCE):
            some = sets[start : start + AT_ONCE]
            outcomes = self.runs.without(some, wants_text=self._may_lose)
            for members, now in zip(some, outcomes, strict=True):
                self.add(number, now, "together", members)
            for members, now in zip(some, outcomes, strict=True):
                if self.explaining.lost(number, now) and self._closed(number, members, now):
                    return members
        return None

    def _may_lose(self, now: Outcome) -> bool:
        """Whether any claim may be lost, so that the text that is said instead decides."""
        return any(may_be_lost(claim, self.explaining.fall(claim, now), now.firm) for claim in self.explaining.claims)

    def _only(self, number: int, members: IndexSet) -> None:
        """Add the statement on the run in which only this set of units is left."""
        others = self.everything - set(members)
        if others:
            self.add(number, self.runs.without([others])[0], "only", members, others=True)

    def fall(self, number: int, now: Outcome) -> float:
        return float(self.explaining.fall(self.explaining.claims[number], now))

    def add(self, number: int, now: Outcome, role: str, members: Iterable[int], **named: Any) -> None:
        self.explaining.add(number, now, "units", role, sorted(members), **named)
