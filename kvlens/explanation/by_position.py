"""Which positions of the prompt hold what the model reads there about the cause.

What the prompt without the cause leaves at some positions, in all layers, takes the place of what the whole prompt leaves
there. Positions are exchanged in groups: the cause's own words, the rest of its document, what stands between that and the
question, the question, and the template's marks behind it. Positions before the cause are equal in both prompts. First each
group, then pairs and more of them, until a set loses the claim; likewise until a set keeps it alone.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens import counterfactuals
from kvlens.analyses.attribution.by_position import PositionExchange
from kvlens.analyses.attribution.terms import Terms
from kvlens.explanation.runs import Outcome
from kvlens.explanation.verdicts import may_be_lost
from kvlens.texts import token_texts
from kvlens.units import Layout, pieces_of_tokens

Place = tuple[str, int] | None
"""What a position is a part of: a message or document, the question, or what follows it; None for marks in front."""
QUESTION, BEHIND = ("question", -1), ("behind", -1)
GROUPS = {
    "cause": "the cause's own words",
    "document": "the rest of its document or message",
    "between": "what stands between that and the question",
    "question": "the question",
    "end": "the marks behind the question",
}
"""The groups of positions, in the prompt's order, and what they are called."""


def places_of(layout: Layout, n_tokens: int) -> list[Place]:
    """What each position of a prompt is a part of. Behind a raw prompt, all that follows is the question."""
    pieces = pieces_of_tokens(layout)
    found: list[Place] = [
        None if piece is None else QUESTION if piece in layout.asked else (piece.name, piece.start) for piece in pieces
    ]
    last = max((i for i, place in enumerate(found) if place == QUESTION), default=None)
    if last is not None:
        found[last + 1 :] = [BEHIND] * (len(found) - last - 1)
    return found + [BEHIND if layout.asked else QUESTION] * (n_tokens - len(found))


def position_groups(own: Bool[Tensor, " pos"], places: Sequence[Place]) -> dict[str, list[int]]:
    """The positions of each group that has any; those before the cause are in none.

    Args:
        own: True at the cause's.
        places: of each position.
    """
    of_cause = own.nonzero().flatten().tolist()
    documents = {places[i] for i in of_cause}
    inside = [i for i, place in enumerate(places[: len(own)]) if place in documents]
    found: dict[str, list[int]] = {name: [] for name in GROUPS}
    for i in range(of_cause[0], len(own)):
        place = places[i]
        if bool(own[i]):
            name = "cause"
        elif place in (QUESTION, BEHIND):
            name = "question" if place == QUESTION else "end"
        else:
            name = "document" if place in documents or (place is None and i < inside[-1]) else "between"
        found[name].append(i)
    return {name: positions for name, positions in found.items() if positions}


def exchange_positions(explaining: Any, number: int, cause: tuple[int, ...], places: Sequence[Place]) -> pd.DataFrame:
    """Add the statements on a claim's positions; returns the positions of each group.

    Args:
        explaining: the explanation.
        number: of the claim.
        cause: units that the other prompt lacks.
        places: of :func:`places_of`.
    """
    own = explaining.own[list(cause), :-1].any(dim=0)
    groups = position_groups(own, places)
    search = _Positions(explaining, number, groups, own, "+".join(map(str, cause)))
    search.breaking()
    search.keeping()
    texts = token_texts(explaining.model, explaining.prompt)
    rows = [(name, i, texts[i]) for name, positions in groups.items() for i in positions]
    return pd.DataFrame(rows, columns=["group", "position", "token"])


class _Positions:
    """Exchanges of groups of positions, for one claim."""

    def __init__(self, explaining: Any, number: int, groups: dict[str, list[int]], own: Tensor, removed: str) -> None:
        self.explaining, self.number, self.groups, self.removed = explaining, number, groups, removed
        self.claim = explaining.claims[number]
        model, prompt = explaining.model, explaining.runs.prompt
        explaining.runs.count(2 * len(prompt))
        self.exchange = PositionExchange(Terms.of_prompt(model, prompt), counterfactuals(model, prompt, own[None]))

    def run(self, role: str, sets: Sequence[tuple[str, ...]], *, others: bool = False) -> list[Outcome]:
        """Each set exchanged, or every group but it."""
        exchanged = [set(self.groups) - set(names) if others else set(names) for names in sets]
        chosen = torch.stack([self.mask(names) for names in exchanged])

        def worth_a_text(now: Outcome) -> bool:
            fall = float(now.falls[self.claim.start : self.claim.stop].sum())
            return others or may_be_lost(self.claim, fall, now.firm)

        readings = (self.exchange.biases(some) for some in chosen.split(self.exchange.at_once))
        outcomes: list[Outcome] = self.explaining.runs.under(readings, worth_a_text)
        self._add(role, sets, outcomes, others)
        return outcomes

    def mask(self, names: set[str]) -> Bool[Tensor, " part"]:
        """True at the groups' positions, and at the shift state if the last position is among them."""
        chosen = torch.zeros(len(self.exchange.parts), dtype=torch.bool)
        chosen[[i for name in names for i in self.groups[name]]] = True
        chosen[self.exchange.n_positions :] = chosen[self.exchange.n_positions - 1]
        return chosen

    def breaking(self) -> None:
        """The first sets that lose the claim, and are none smaller."""
        self._smallest("each", self.explaining.lost, others=False)

    def keeping(self) -> None:
        """The first sets that keep it alone."""
        self._smallest("only", self.explaining.said, others=True)

    def _smallest(self, role: str, asks: Any, *, others: bool) -> None:
        for size in range(1, len(self.groups)):
            sets = list(itertools.combinations(self.groups, size))
            outcomes = self.run(role if size == 1 or others else "together", sets, others=others)
            found = [pair for pair in zip(sets, outcomes, strict=True) if asks(self.number, pair[1])]
            if found:
                names, now = zip(*found, strict=True)
                self._add("keeping" if others else "breaking", names, now, others)
                return

    def _add(self, role: str, sets: Sequence[tuple[str, ...]], outcomes: Sequence[Outcome], others: bool) -> None:
        for names, now in zip(sets, outcomes, strict=True):
            self.explaining.add(self.number, now, "positions", role, names, others=others, removed=self.removed)
