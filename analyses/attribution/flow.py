"""What the model says with parts of a cause switched off: the edges and switches of a drawn flow, units -> position -> head.

The parts that are drawn are the heads and positions of an explanation's sets. Every row is one intervention on what the text
reads, measured by a forward pass: the bias of the prompt, in which something comes from the bias of the prompt without the
units of ``found.cause``, everything recomputed. What that is:

    what a head of ``heads`` holds, or anything holds at a position of ``positions``        (``inside`` false: switches)
    what the heads of ``heads`` hold at the positions of ``positions``                      (``inside`` true: edges)

or, where ``others`` is true, everything but that. With s the score that is explained, ``effect`` is s(prompt) - s(row), in
nats: positive where what is exchanged raises s. Effects of different parts do not add up.

Which rows there are: switches for every subset of the parts drawn, everything at once, and for every edge its part
exchanged, and all others.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel
from kvlens.checks import checked

from ..declaration import Columns
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from .answers import Question, Read, Rival
from .by_head import HeadExchange
from .by_position import PositionExchange
from .explain import SHIFT_STATE, Explained
from .terms import Terms
from .units import Unit, positions_of
from .verdicts import Outcome, Outcomes, said

MOST_PARTS = 7
"""Heads and positions that are drawn: every subset of them takes a pass over the text."""

COLUMNS = Columns(
    heads=("str", "such as ``0.1+1.3`` (layer.head; ``0.s1``: a shift state, ``0.c``: a convolution); empty for none"),
    positions=("str", f"such as ``38+41``, or ``{SHIFT_STATE}``; empty for none"),
    inside=("bool", "of these heads, only what they hold at these positions; where one of the two is empty, of all"),
    others=("bool", "everything but that is exchanged"),
    effect=("float64", f"{EFFECT}; by this intervention"),
    p_answer=("float64", "probability of the answer under it"),
    p_rival=("float64", "of its rival"),
    verdict=("str", "what became of the answer (:mod:`~kvlens.analyses.attribution.verdicts`)"),
    says=("str", "what the model says instead, where the answer is not first; missing elsewhere"),
    p_says=("float64", "its probability"),
)


class State(NamedTuple):
    """One intervention; the fields are those of `COLUMNS`."""

    heads: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()
    inside: bool = False
    others: bool = False


@COLUMNS.document
@checked
@torch.no_grad()
def answer_flow(
    model: KVModel, prompt: PromptTokens, text: TextTokens, found: Explained, *, rival: Rival = None
) -> pd.DataFrame:
    """What the model says with the parts of an explanation's sets switched off, in every combination.

    Args:
        model, prompt, text, rival: as they were given to :func:`kvlens.analyses.attribution.explain.explain`.
        found: what that returned. Where no units lose the answer there is nothing to draw, and the table has no rows.

    Returns:
        One row per intervention, the unchanged prompt first:

        {columns}

    Raises:
        KVLensError: tokens that do not fit.
    """
    question = Question.of(model, prompt, text, torch.tensor(found.answer_tokens), rival)
    measured = _Measured(question, torch.tensor(found.rival_tokens), Outcomes(question))
    if found.cause:
        _measure(measured, found)
    states, outcomes, now = measured.states, measured.outcomes, measured.now
    log_p = torch.cat(measured.log_p) if states else torch.zeros(0, 2, dtype=torch.float64)
    fall = log_p[:1] - log_p
    return COLUMNS.frame(
        {
            "heads": ["+".join(state.heads) for state in states],
            "positions": ["+".join(state.positions) for state in states],
            "inside": [state.inside for state in states],
            "others": [state.others for state in states],
            "effect": fall[:, 0] if question.rival is None else fall[:, 0] - fall[:, 1],
            "p_answer": log_p[:, 0].exp(),
            "p_rival": log_p[:, 1].exp(),
            "verdict": [outcomes.verdict(each).name for each in now],
            "says": [said(outcomes, each) for each in now],
            "p_says": [each.p_said for each in now],
        }
    )


def parts_drawn(found: Explained) -> tuple[list[str], list[str]]:
    """The heads and the positions of the sets: of breaking sets first, then of keeping sets; at most `MOST_PARTS`."""
    chosen: dict[tuple[str, str], None] = {}
    for role in ("breaking", "keeping"):
        sets = {about: found.sets(about, role) for about in ("heads", "positions")}
        for pair in itertools.zip_longest(*sets.values(), fillvalue=[]):
            members = [[(about, code) for code in codes] for about, codes in zip(sets, pair, strict=True)]
            chosen.update(dict.fromkeys(part for both in itertools.zip_longest(*members) for part in both if part is not None))
    kept = [*chosen][:MOST_PARTS]
    order = {about: getattr(found, about)["code"].tolist() for about in ("heads", "positions")}
    heads, positions = (
        sorted((code for kind, code in kept if kind == about), key=order[about].index) for about in ("heads", "positions")
    )
    return heads, positions


@dataclass
class _Measured:
    """What the model says under each intervention so far, and the log-probabilities of the answer and of the rival."""

    question: Question
    rival: Int[Tensor, " rival_pos"]
    outcomes: Outcomes
    now: list[Outcome] = field(default_factory=list)
    states: list[State] = field(default_factory=list)
    log_p: list[Float[Tensor, "row 2"]] = field(default_factory=list)

    def add(self, states: Sequence[State], exchange: HeadExchange, exchanged: list[list[str]]) -> None:
        """Read under new interventions: for each state the codes of what is exchanged."""
        codes = [part.code for part in exchange.parts]
        rows = torch.tensor([[code in each for code in codes] for each in exchanged])
        for start in range(0, len(states), exchange.at_once):
            read = _once(exchange.read(rows[start : start + exchange.at_once]))
            self.now += self.outcomes.under(read)
            self.log_p.append(self.question.log_p(read, [self.question.answer, self.rival]))
        self.states.extend(states)


def _once(read: Read) -> Read:
    """The same reading, of which each text is read once."""
    found: dict[tuple[tuple[int, ...], int], Tensor] = {}

    def again(text: Tensor, n_last: int) -> Tensor:
        key = tuple(text.tolist()), n_last
        if key not in found:
            found[key] = read(text, n_last)
        return found[key]

    return again


def _measure(measured: _Measured, found: Explained) -> None:
    question, table = measured.question, found.units
    units = [Unit("", row.unit_text, row.start, row.stop) for row in table.itertuples()]
    gone = positions_of(units, len(question.prompt))[list(found.cause)].any(dim=0)
    of_position = PositionExchange(question, Terms.of_prompt(question.model, question.prompt), question.rows(gone[None]))
    question.account.count(2 * len(question.prompt))
    heads, positions = parts_drawn(found)

    def exchange(own: KVBias, donors: KVBias) -> HeadExchange:
        return HeadExchange(question, own, donors, same_features=True)

    def with_positions(chosen: Sequence[str], onto_other: bool) -> KVBias:
        which = [SHIFT_STATE if part < 0 else str(part) for part in of_position.parts]
        return of_position.biases(torch.tensor([[code in chosen for code in which]]), onto_other=onto_other)

    here, there = of_position.own, of_position.donor
    every = [part.code for part in exchange(here, there.repeat(1)).parts]
    for off in _subsets(positions):
        states = [State(of_heads, off) for of_heads in _subsets(heads)]
        own = with_positions(off, False).select_prompt(0)
        measured.add(states, exchange(own, there.repeat(1)), [list(state.heads) for state in states])
    rest = [State(others=True), *(State((head,), others=True) for head in heads)]
    measured.add(rest, exchange(here, there.repeat(1)), [[c for c in every if c not in state.heads] for state in rest])
    for position in positions:
        for others, own in ((False, here), (True, there)):
            edges = [State((head,), (position,), True, others) for head in heads]
            alone = [State((), (position,), False, True)] if others else []
            codes = [every] * len(alone) + [[head] for head in heads]
            if edges or alone:
                measured.add([*alone, *edges], exchange(own, with_positions([position], others)), codes)


def _subsets(codes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All subsets, the empty one first."""
    return itertools.chain.from_iterable(itertools.combinations(codes, n) for n in range(len(codes) + 1))
