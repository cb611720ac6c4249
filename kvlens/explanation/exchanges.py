"""Step 7: in which layers, heads and positions of the prompt the model reads about the cause.

What the prompt without the cause leaves in a set of them takes the place of what the whole prompt leaves there, by an exchange
of :mod:`kvlens.analyses.bias.exchange`. Exchanged is everything before the response, the question included.

- *Layers*: both halves of them first, then the halves of each range that may lose the claim, down to single layers. A range
  that loses nothing, all its layers together, is not divided: about one of them there is no run of its own, and layers whose
  effects cancel are not found. What is said instead is generated for the smallest ranges that may lose it, and then for the
  larger ones of which no part does. Where neither half loses the claim, all layers do, and quarters and eighths of them
  are given back as long as the others lose it. Then the ranges that lose it alone read the whole prompt, and the others do not.
- *Layers one by one*, where they are asked for: then pairs of the strongest, then more of these together, until a set loses the
  claim; then the strongest layers alone read the whole prompt.
- *Heads*, where they are asked for: inside the layers that lose the claim, key-value groups and heads.
- *Positions*, where they are asked for, in all layers and in groups: the cause's own words, the rest of its document, what
  stands between that and the question, the question, and the template's marks behind it. Positions before the cause are equal
  in both prompts. First each group, then pairs and more of them, until a set loses the claim; likewise until a set keeps it
  alone.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

import pandas as pd
from jaxtyping import Bool
from torch import Tensor

from kvlens import KVBias, counterfactuals
from kvlens.analyses.attribution.terms import PositionExchange, Terms
from kvlens.analyses.bias.exchange import (
    HEAD_PART,
    SHIFT_STATE_PART,
    Exchange,
    ExchangedPart,
    HeadExchange,
    LayerExchange,
    heads_with,
    in_one_space,
)
from kvlens.explanation.claims import may_be_lost
from kvlens.explanation.explaining import QUESTION_PLACE, Explaining, Place
from kvlens.explanation.runs import IndexSet, Outcome
from kvlens.texts import token_texts
from kvlens.units import Layout, pieces_of_tokens

MOST_PAIRED, MOST_LAYERS = 5, 8
"""How many of the strongest layers are exchanged in pairs, and how many at most in a set."""
AT_ONCE = 3
BEHIND = ("behind", -1)
POSITION_GROUPS = {
    "cause": "the cause's own words",
    "document": "the rest of its document or message",
    "between": "what stands between that and the question",
    "question": "the question",
    "end": "the marks behind the question",
}
"""The groups of positions, in the prompt's order, and what they are called."""
Name = TypeVar("Name", bound=int | str)
"""Of a layer, of a head by its code, or of a group of positions."""


def places_of(layout: Layout, n_tokens: int) -> list[Place]:
    """What each position of a prompt belongs to. Behind a raw prompt, all that follows is the question."""
    pieces = pieces_of_tokens(layout)
    found: list[Place] = [
        None if piece is None else QUESTION_PLACE if piece in layout.asked else (piece.name, piece.start) for piece in pieces
    ]
    last = max((i for i, place in enumerate(found) if place == QUESTION_PLACE), default=None)
    if last is not None:
        found[last + 1 :] = [BEHIND] * (len(found) - last - 1)
    return found + [BEHIND if layout.asked else QUESTION_PLACE] * (n_tokens - len(found))


def position_groups(own: Bool[Tensor, " pos"], places: Sequence[Place]) -> dict[str, list[int]]:
    """The positions of each group that has any; those before the cause are in none.

    Args:
        own: True at the cause's.
        places: of each position.
    """
    of_cause = own.nonzero().flatten().tolist()
    documents = {places[i] for i in of_cause}
    inside = [i for i, place in enumerate(places[: len(own)]) if place in documents]
    found: dict[str, list[int]] = {name: [] for name in POSITION_GROUPS}
    for i in range(of_cause[0], len(own)):
        place = places[i]
        if bool(own[i]):
            name = "cause"
        elif place in (QUESTION_PLACE, BEHIND):
            name = "question" if place == QUESTION_PLACE else "end"
        else:
            name = "document" if place in documents or (place is None and i < inside[-1]) else "between"
        found[name].append(i)
    return {name: positions for name, positions in found.items() if positions}


def exchange_layers(explaining: Explaining, number: int, cause: tuple[int, ...]) -> int:
    """Add the statements on a claim's layers; returns how many layers there are.

    Args:
        explaining: the explanation.
        number: of the claim.
        cause: units that the other prompt lacks.
    """
    donor, n_layers = explaining.runs.donor(cause), explaining.runs.bias.n_layers
    exchange, members = LayerExchange(explaining.runs.bias, donor), {layer: [layer] for layer in range(n_layers)}
    if explaining.depth in ("units", "ranges"):  # of units alone, layers are asked for later
        _LayerRanges(explaining, number, "layers", exchange, members, cause).find()
        return n_layers
    search = _Layers(explaining, number, "layers", exchange, members, cause)
    search.begin()
    breaking = search.breaking()
    search.keeping()
    if explaining.depth == "heads":
        with explaining.runs.step("heads"):
            _exchange_heads(explaining, number, cause, donor, sorted({layer for each in breaking for layer in each}))
    return n_layers


def _exchange_heads(explaining: Explaining, number: int, cause: tuple[int, ...], donor: KVBias, layers: Sequence[int]) -> None:
    """Exchange each key-value group and each head of some layers."""
    bias = explaining.runs.bias
    exchange = HeadExchange(*in_one_space(bias, donor))
    members = {part.code: [i] for part, i in exchange.number.items() if part.layer in layers}
    shared = [(layer, i) for layer in layers if layer in bias.attention_layers for i in range(bias.n_kv_heads_of(layer))]
    heads = [(layer, heads_with(bias, ExchangedPart(layer, i, SHIFT_STATE_PART))) for layer, i in shared]
    shared_keys = [tuple(ExchangedPart(layer, head, HEAD_PART).code for head in each) for layer, each in heads if len(each) > 1]
    search = _Search(explaining, number, "groups", exchange, members, cause)
    found = search.read([*shared_keys, *((code,) for code in members)], search.may_be_lost)
    search.add("each", shared_keys, found[: len(shared_keys)])
    search.kind = "heads"
    search.add("each", [(code,) for code in members], found[len(shared_keys) :])


def exchange_positions(explaining: Explaining, number: int, cause: tuple[int, ...], places: Sequence[Place]) -> pd.DataFrame:
    """Add the statements on a claim's positions; returns the positions of each group.

    Args:
        explaining: the explanation.
        number: of the claim.
        cause: units that the other prompt lacks.
        places: of :func:`places_of`.
    """
    model, prompt = explaining.model, explaining.runs.prompt
    own = explaining.own[list(cause), :-1].any(dim=0)
    groups = position_groups(own, places)
    explaining.runs.count(2 * len(prompt))
    exchange = PositionExchange(Terms.of_prompt(model, prompt), counterfactuals(model, prompt, own[None]))
    last, shift_state = exchange.n_positions - 1, range(exchange.n_positions, len(exchange.parts))
    members = {name: [*positions, *(shift_state if last in positions else ())] for name, positions in groups.items()}
    search = _Search(explaining, number, "positions", exchange, members, cause)
    search.smallest("each", "together", "breaking", explaining.lost)
    search.smallest("only", "only", "keeping", explaining.said, others=True)
    texts = token_texts(model, explaining.prompt)
    rows = [(name, i, texts[i]) for name, positions in groups.items() for i in positions]
    return pd.DataFrame(rows, columns=["group", "position", "token"])


class _Search(Generic[Name]):
    """Sets of layers, of heads or of groups of positions exchanged, for one claim.

    Args:
        explaining: the explanation.
        number: of the claim.
        kind: what the sets consist of, the column ``about`` of `STATEMENT_COLUMNS`.
        exchange: of the whole prompt's bias for that without the cause.
        members: name of each layer, head or group -> its parts of the exchange.
        cause: units that the other prompt lacks.
    """

    def __init__(
        self,
        explaining: Explaining,
        number: int,
        kind: str,
        exchange: Exchange,
        members: Mapping[Name, Sequence[int]],
        cause: tuple[int, ...],
    ) -> None:
        self.explaining, self.number, self.kind, self.exchange, self.members = explaining, number, kind, exchange, members
        self.claim, self.removed = explaining.claims[number], "+".join(map(str, cause))

    def fall(self, now: Outcome) -> float:
        return self.explaining.fall(self.claim, now)

    def may_be_lost(self, now: Outcome) -> bool:
        return may_be_lost(self.claim, self.fall(now), now.firm)

    def all_but(self, names: Iterable[Name]) -> set[Name]:
        return set(self.members) - set(names)

    def read(self, sets: Iterable[Iterable[Name]], wants_text: Callable[[Outcome], bool] = lambda now: True) -> list[Outcome]:
        """What the model says with each set exchanged; texts only where ``wants_text`` says that they are worth it."""
        parts = [[part for name in names for part in self.members[name]] for names in sets]
        return self.explaining.runs.exchanged(self.exchange, parts, wants_text)

    def run(
        self, role: str, sets: Sequence[tuple[Name, ...]], wants_text: Callable[[Outcome], bool], others: bool = False
    ) -> list[Outcome]:
        """Exchange each set, or everything but it, and add the statements."""
        found = self.read([self.all_but(each) if others else each for each in sets], wants_text)
        self.add(role, sets, found, others)
        return found

    def add(self, role: str, sets: Iterable[Iterable[Name]], found: Sequence[Outcome], others: bool = False) -> None:
        for each, now in zip(sets, found, strict=True):
            self.explaining.add(self.number, now, self.kind, role, each, others=others, removed=self.removed)

    def smallest(
        self, first: str, later: str, last: str, is_found: Callable[[int, Outcome], bool], *, others: bool = False
    ) -> None:
        """Try sets of one, then of more, as statements of two roles; the first that are found get a third."""
        for size in range(1, len(self.members)):
            sets = list(itertools.combinations(self.members, size))
            outcomes = self.run(first if size == 1 else later, sets, lambda now: others or self.may_be_lost(now), others)
            found = [pair for pair in zip(sets, outcomes, strict=True) if is_found(self.number, pair[1])]
            if found:
                names, now = zip(*found, strict=True)
                self.add(last, names, now, others)
                return


class _LayerRanges(_Search[int]):
    """Finds the smallest ranges of layers that lose a claim, by halving, and those that keep it alone."""

    def find(self) -> None:
        """Add the statements."""
        with self.explaining.runs.texts_together():
            tried = self._halved()
            if not any(map(self.may_be_lost, tried.values())):
                tried |= self._given_back()
            promising = sorted((each for each, now in tried.items() if self.may_be_lost(now)), key=len)
            self.read(_smallest(promising))
            others = [self.all_but(each) for each in self._unions(promising)]
            read = self.read(others, lambda now: False)
            self.read([each for each, now in zip(others, read, strict=True) if not self.may_be_lost(now)][:1])
        lost = list[IndexSet]()
        for ranges in (_smallest(promising), promising):
            left = [each for each in ranges if not any(set(other) <= set(each) for other in lost)]
            lost += [each for each, now in zip(left, self.read(left), strict=True) if self.explaining.lost(self.number, now)]
        lost = _smallest(lost)
        for each in tried:
            self.run("each" if len(each) == 1 else "together", [each], lambda now: False)
        self.run("breaking", sorted(lost, key=lambda each: -self.fall(tried[each])), self.may_be_lost)
        self._keep(promising)

    def _halved(self) -> dict[IndexSet, Outcome]:
        """The ranges that were tried, the larger ones first."""
        ranges, tried = _halves(tuple(self.members)), dict[IndexSet, Outcome]()
        while ranges:
            tried |= zip(ranges, self.read(ranges, lambda now: False), strict=True)
            ranges = [half for each in ranges if self.may_be_lost(tried[each]) for half in _halves(each)]
        return tried

    def _given_back(self) -> dict[IndexSet, Outcome]:
        """Sets that were tried where neither half loses the claim: what is left as parts are given back, largest first."""
        left, tried = tuple(self.members), dict[IndexSet, Outcome]()
        for n_parts in (4, 8):
            size = -(-len(self.members) // n_parts)
            for start in range(0, len(self.members), size):
                rest = tuple(layer for layer in left if not start <= layer < start + size)
                if rest and rest != left and rest not in tried:
                    (tried[rest],) = self.read([rest], lambda now: False)
                    left = rest if self.may_be_lost(tried[rest]) else left
        return tried

    def _unions(self, lost: Sequence[IndexSet]) -> list[IndexSet]:
        """The smallest ranges that lose the claim together, then with larger ones, but for all layers."""
        sizes = sorted({len(each) for each in lost})
        unions = [tuple(sorted({i for each in lost if len(each) <= size for i in each})) for size in sizes]
        return [each for each in dict.fromkeys(unions) if len(each) < len(self.members)]

    def _keep(self, lost: Sequence[IndexSet]) -> None:
        """The first union that keeps the claim alone."""
        for each in self._unions(lost):
            (now,) = self.run("only", [each], lambda now: False, others=True)
            if not self.may_be_lost(now) and self.explaining.said(self.number, self.read([self.all_but(each)])[0]):
                self.run("keeping", [each], lambda now: not self.may_be_lost(now), others=True)
                return


def _smallest(sets: Sequence[IndexSet]) -> list[IndexSet]:
    """Those of which no other is a part."""
    return [each for each in sets if not any(set(other) < set(each) for other in sets)]


def _halves(layers: IndexSet) -> list[IndexSet]:
    """Both halves of a range; none of a single layer."""
    half = len(layers) // 2
    return [layers[:half], layers[half:]] if half else []


class _Layers(_Search[int]):
    """Finds which layers lose a claim when they read the other prompt, and which keep it when they alone read this one."""

    def begin(self) -> None:
        """Exchange each layer, and the set that keeps the claim as far as falls tell it, with all texts in one batch."""
        with self.explaining.runs.texts_together():
            falls = [self.fall(now) for now in self.read([(layer,) for layer in self.members], self.may_be_lost)]
            self.order = sorted(self.members, key=lambda layer: -falls[layer])
            others = [self.all_but(each) for each in self._strongest(1)]
            read = self.read(others, lambda now: False)
            keeping = [each for each, now in zip(others, read, strict=True) if not self.may_be_lost(now)]
            self.read(keeping[:1])

    def breaking(self) -> list[IndexSet]:
        """The single layers that lose the claim, the strongest first; else the first set that does."""
        outcomes = self.run("each", [(layer,) for layer in self.members], self.may_be_lost)
        breaking: list[IndexSet] = [(layer,) for layer in self.order if self.explaining.lost(self.number, outcomes[layer])]
        if not breaking:
            pairs = itertools.combinations(self.order[:MOST_PAIRED], 2)
            breaking = self._first_lost([tuple(sorted(pair)) for pair in pairs])
        if not breaking:
            breaking = self._first_lost(self._strongest(3))
        self.run("breaking", breaking, self.may_be_lost)
        return breaking

    def keeping(self) -> None:
        """The first of the strongest layers' sets that keeps the claim alone."""
        sets = self._strongest(1)
        for each, now in zip(sets, self.run("only", sets, lambda now: False, others=True), strict=True):
            if not self.may_be_lost(now) and self.explaining.said(self.number, self.read([self.all_but(each)])[0]):
                self.run("keeping", [each], lambda now: not self.may_be_lost(now), others=True)
                return

    def _first_lost(self, sets: Sequence[IndexSet]) -> list[IndexSet]:
        """The set that loses the claim and by which it falls most; texts are generated for a few at a time."""
        read = dict(zip(sets, self.run("together", sets, lambda now: False), strict=True))
        promising = sorted(filter(lambda each: self.may_be_lost(read[each]), sets), key=lambda each: -self.fall(read[each]))
        for start in range(0, len(promising), AT_ONCE):
            some = promising[start : start + AT_ONCE]
            said = self.run("together", some, self.may_be_lost)
            lost = [each for each, now in zip(some, said, strict=True) if self.explaining.lost(self.number, now)]
            if lost:
                return lost[:1]
        return []

    def _strongest(self, least: int) -> list[IndexSet]:
        return [tuple(sorted(self.order[:size])) for size in range(least, min(MOST_LAYERS, len(self.order)) + 1)]
