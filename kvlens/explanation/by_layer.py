"""Which layers read the cause: what the prompt without it leaves in a layer takes the place of what the whole prompt leaves.

Exchanged is everything before the response, the question included. Single layers come first, then pairs of the strongest, then
more of these together, until a set loses the claim; then the strongest layers alone read the whole prompt, and the others do
not. Inside the layers that lose it, key-value groups and heads, where they are asked for.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvlens.analyses.attribution.by_head import HeadExchange
from kvlens.analyses.bias.parts import HEAD_PART, Part
from kvlens.explanation.explained import SEPARATOR
from kvlens.explanation.runs import Outcome
from kvlens.explanation.verdicts import may_be_lost

MOST_PAIRED, MOST_LAYERS = 5, 8
"""Pairs of so many of the strongest layers, and sets of up to so many."""
AT_ONCE = 3
Set = tuple[int, ...]


def exchange_layers(explaining: Any, number: int, cause: Set) -> int:
    """Add the statements on a claim's layers; returns how many layers there are.

    Args:
        explaining: the explanation.
        number: of the claim.
        cause: units that the other prompt lacks.
    """
    donor = explaining.runs.donor(cause)
    layers = _Layers(explaining, number, donor, SEPARATOR.join(map(str, cause)))
    layers.begin()
    breaking = layers.breaking()
    layers.keeping()
    if explaining.depth == "heads":
        layers.heads(sorted({layer for each in breaking for layer in each}))
    return layers.n


class _Layers:
    """Exchanges of layers, for one claim."""

    def __init__(self, explaining: Any, number: int, donor: Any, removed: str) -> None:
        self.explaining, self.number, self.donor, self.removed = explaining, number, donor, removed
        self.claim, self.n = explaining.claims[number], explaining.runs.bias.n_layers

    def fall(self, now: Outcome) -> float:
        return float(now.falls[self.claim.start : self.claim.stop].sum())

    def may_be_lost(self, now: Outcome) -> bool:
        return may_be_lost(self.claim, self.fall(now), now.firm)

    def begin(self) -> None:
        """Each layer exchanged, and the set that keeps the claim, as far as falls say which: their texts in one batch."""
        runs, singles = self.explaining.runs, [(layer,) for layer in range(self.n)]
        with runs.texts_together():
            falls = [self.fall(now) for now in runs.layers(self.donor, singles, self.may_be_lost)]
            self.order = sorted(range(self.n), key=lambda layer: -falls[layer])
            others = [set(range(self.n)) - set(each) for each in self._strongest(1)]
            read = runs.layers(self.donor, others, lambda now: False)
            keeping = [each for each, now in zip(others, read, strict=True) if not self.may_be_lost(now)]
            runs.layers(self.donor, keeping[:1])

    def run(self, role: str, sets: Sequence[Set], *, others: bool = False, texts: bool = True) -> list[Outcome]:
        """Each set exchanged, or everything but it; texts only where the claim may be lost, or only where it may be kept."""
        everything = set(range(self.n))
        exchanged = [everything - set(each) if others else each for each in sets]

        def worth_a_text(now: Outcome) -> bool:
            return texts and self.may_be_lost(now) != others

        outcomes: list[Outcome] = self.explaining.runs.layers(self.donor, exchanged, worth_a_text)
        self._add("layers", role, sets, outcomes, others)
        return outcomes

    def _add(
        self, about: str, role: str, sets: Iterable[Iterable[object]], outcomes: Sequence[Outcome], others: bool = False
    ) -> None:
        for each, now in zip(sets, outcomes, strict=True):
            self.explaining.add(self.number, now, about, role, each, others=others, removed=self.removed)

    def first_lost(self, sets: Sequence[Set]) -> list[Set]:
        """The set that loses the claim and by which it falls most; texts are generated for a few at a time."""
        outcomes = self.run("together", sets, texts=False)
        read = dict(zip(sets, outcomes, strict=True))
        promising = sorted(filter(lambda each: self.may_be_lost(read[each]), sets), key=lambda each: -self.fall(read[each]))
        for start in range(0, len(promising), AT_ONCE):
            some = promising[start : start + AT_ONCE]
            said = self.run("together", some)
            lost = [each for each, now in zip(some, said, strict=True) if self.explaining.lost(self.number, now)]
            if lost:
                return lost[:1]
        return []

    def breaking(self) -> list[Set]:
        """The single layers that lose the claim, the strongest first; else the first set that does."""
        outcomes = self.run("each", [(layer,) for layer in range(self.n)])
        breaking: list[Set] = [(layer,) for layer in self.order if self.explaining.lost(self.number, outcomes[layer])]
        if not breaking:
            pairs = itertools.combinations(self.order[:MOST_PAIRED], 2)
            breaking = self.first_lost([tuple(sorted(pair)) for pair in pairs])
        if not breaking:
            breaking = self.first_lost(self._strongest(3))
        self.run("breaking", breaking)
        return breaking

    def keeping(self) -> None:
        """The first of the strongest layers' sets that keeps the claim alone."""
        sets = self._strongest(1)
        for each, now in zip(sets, self.run("only", sets, others=True, texts=False), strict=True):
            if self.may_be_lost(now):
                continue
            exchanged = set(range(self.n)) - set(each)
            if self.explaining.said(self.number, self.explaining.runs.layers(self.donor, [exchanged])[0]):
                self.run("keeping", [each], others=True)
                return

    def _strongest(self, least: int) -> list[Set]:
        return [tuple(sorted(self.order[:size])) for size in range(least, min(MOST_LAYERS, self.n) + 1)]

    def heads(self, layers: Sequence[int]) -> None:
        """Each key-value group and each head of some layers exchanged."""
        bias = self.explaining.runs.bias
        exchange = HeadExchange(bias, self.donor.repeat(1))
        of_layer = [i for i, part in enumerate(exchange.parts) if part.layer in layers]
        groups: dict[tuple[int, int], list[int]] = {}
        for i in of_layer:
            part = exchange.parts[i]
            if part.kind == HEAD_PART and part.layer in bias.attention_layers and part.head < bias.first_state_head(part.layer):
                size = bias.first_state_head(part.layer) // bias.n_kv_heads_of(part.layer)
                groups.setdefault((part.layer, part.head // size), []).append(i)
        several = [members for members in groups.values() if len(members) > 1]
        sets = [*several, *([i] for i in of_layer)]
        rows = torch.zeros(len(sets), len(exchange.parts), dtype=torch.bool)
        for row, members in enumerate(sets):
            rows[row, members] = True
        readings = (exchange.biases(some) for some in rows.split(exchange.at_once))
        outcomes = self.explaining.runs.under(readings, self.may_be_lost)

        def codes(members: Sequence[int]) -> list[str]:
            return [Part(*exchange.parts[i]).code for i in members]

        named = list(map(codes, sets))
        self._add("groups", "each", named[: len(several)], outcomes[: len(several)])
        self._add("heads", "each", named[len(several) :], outcomes[len(several) :])
