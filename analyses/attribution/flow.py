"""What the model says with parts of a cause switched off: the edges of a drawn flow, unit -> position -> head -> answer.

Every row is one intervention on what the text reads, measured by a forward pass. Let P' be the prompt without the units of
``removed``, everything recomputed, and P'' the prompt that also lacks ``unit``. The text reads the bias of P', in which one
*part* comes from the bias of P'':

    part: what the heads of ``heads`` (where it is empty, all) hold of ``position`` (where it is empty, of all)

or, where ``others`` is true, everything but that part. With s the score that is explained, ``effect`` is s(P) - s(row), in
nats: what the answer loses. The total effect of a unit less the effect with ``others`` is what the part keeps alone. Effects of
different parts do not add up: two heads that each suffice have small effects one by one, and a large one together.

A head's part includes its shift state, as in :mod:`~kvlens.analyses.attribution.by_head`; the shift state also has a row of its
own among the positions, as in :mod:`~kvlens.analyses.attribution.by_position`.

Which rows there are: every unit removed, and pairs of the `MOST_PAIRED` with the largest effects; and of each of the (at most
`MOST_UNITS`) significant units every head, its leading heads in pairs, its leading positions, each of these in each leading
head, and each leading head with one of the other significant units removed.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import Counterfactuals, KVBias, KVModel, convert_prompt, logits_after
from kvlens.checks import checked

from ..bias.interventions import Interventions, intervened
from ..bias.one_space import with_references
from ..bias.parts import exchangeable, indicators
from ..declaration import Columns
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from .answers import Question, Read, Rival
from .by_head import rows_at_once
from .by_position import ALL, exchanged_positions, positions_of_both, with_shift_state
from .explain import Explained
from .null import SIGNIFICANT
from .units import Unit, positions_of

MOST_UNITS, MOST_PAIRED, MOST_POSITIONS, MOST_HEADS = 4, 4, 4, 6
NOTICEABLE = 0.01
"""Of a unit's total effect: positions with smaller effects are left out."""
SHIFT_STATE = "shift_state"
"""In ``position``: the shift state, which belongs to none."""

COLUMNS = Columns(
    removed=("str", "numbers of the units that are removed from the prompt, such as ``2+5``; empty for none"),
    unit=("int64", "the unit that is also missing where the part comes from; -1 where no part is exchanged"),
    position=("str", f"of the part, from 0, or ``{SHIFT_STATE}``; empty for all"),
    heads=("str", "of the part, such as ``0.1+1.3`` (layer.head; head -1: a recurrent layer's convolution); empty for all"),
    others=("bool", "everything but the part is exchanged"),
    effect=("float64", f"{EFFECT}; by this intervention"),
    p_answer=("float64", "probability of the answer under it"),
    p_rival=("float64", "of its rival"),
    n_passes=("float64", "passes over prompt and text that the whole table took, the same in every row"),
)


Head = tuple[int, int]


class State(NamedTuple):
    """One intervention; the fields are those of `COLUMNS`."""

    removed: tuple[int, ...] = ()
    unit: int = -1
    position: str = ""
    heads: tuple[Head, ...] = ()
    others: bool = False


@COLUMNS.document
@checked
@torch.no_grad()
def answer_flow(
    model: KVModel, prompt: PromptTokens, text: TextTokens, found: Explained, *, rival: Rival = None
) -> pd.DataFrame:
    """What the model says with units, heads and positions switched off, one at a time and the leading ones in pairs.

    Args:
        model, prompt, text, rival: as they were given to :func:`kvlens.analyses.attribution.explain.explain`.
        found: what that returned. Where no unit is significant there is nothing to draw, and the table has no rows.

    Returns:
        One row per intervention, the unchanged prompt first:

        {columns}

    Raises:
        KVLensError: tokens that do not fit.
    """
    question = Question.of(model, prompt, text, torch.tensor(found.answer_tokens), rival)
    measured = _Measured(question, torch.tensor(found.rival_tokens))
    if found.unit is not None:
        _measure(measured, found)
    log_p = torch.cat(measured.log_p) if measured.log_p else torch.zeros(0, 2, dtype=torch.float64)
    return COLUMNS.frame(
        {
            "removed": ["+".join(map(str, state.removed)) for state in measured.states],
            "unit": [state.unit for state in measured.states],
            "position": [state.position for state in measured.states],
            "heads": ["+".join(f"{layer}.{head}" for layer, head in state.heads) for state in measured.states],
            "others": [state.others for state in measured.states],
            "effect": measured.effects(log_p),
            "p_answer": log_p[:, 0].exp(),
            "p_rival": log_p[:, 1].exp(),
            "n_passes": [question.account.n_passes] * len(measured.states),
        }
    )


@dataclass
class _Measured:
    """The log-probabilities of the answer and of the rival under each intervention so far."""

    question: Question
    rival: Int[Tensor, " rival_pos"]
    states: list[State] = field(default_factory=list)
    log_p: list[Float[Tensor, "row 2"]] = field(default_factory=list)

    def add(self, states: Sequence[State], read: Read) -> Float[Tensor, " row"]:
        """Read under new interventions; return their effects."""
        self.states.extend(states)
        self.log_p.append(self.question.log_p(read, [self.question.answer, self.rival]))
        return self.effects(self.log_p[-1])

    def total(self, unit: int) -> float:
        """The total effect of a unit that was removed, in nats."""
        return float(self.effects(self.log_p[0])[self.states.index(State((unit,)))])

    def effects(self, log_p: Float[Tensor, "row 2"]) -> Float[Tensor, " row"]:
        """By how much the score is below that of the unchanged prompt, which was read first."""
        if not self.log_p:
            return log_p[:, 0]
        fall = self.log_p[0][0] - log_p
        return fall[:, 0] if self.question.rival is None else fall[:, 0] - fall[:, 1]


def _measure(measured: _Measured, found: Explained) -> None:
    question, table = measured.question, found.units
    units = [Unit(row.unit_text, row.start, row.stop) for row in table.itertuples()]
    own = positions_of(units, len(question.prompt))
    by_size = table["total_effect"].abs().sort_values(ascending=False, kind="stable").index.tolist()
    shown = [unit for unit in by_size if table["p_adjusted"][unit] <= SIGNIFICANT][:MOST_UNITS]
    pairs = [_pair(*both) for both in itertools.combinations(by_size[:MOST_PAIRED], 2)]
    removed = [(), *((unit,) for unit in range(len(units))), *pairs]
    prompts = question.rows(torch.stack([own[list(each)].any(dim=0) for each in removed]))
    measured.add(
        [State(each) for each in removed],
        lambda text, n: logits_after(question.model, prompts, text, n, on_tokens=question.account.count),
    )
    lacking = [(), *((unit,) for unit in shown), *(_pair(*both) for both in itertools.combinations(shown, 2))]
    converted = convert_prompt(question.model, question.rows(torch.stack([own[list(each)].any(dim=0) for each in lacking])))
    question.account.count(len(lacking) * len(question.prompt))
    biases = {each: converted.select_prompt(row) for row, each in enumerate(lacking)}
    for unit in shown:
        heads = _measure_heads(measured, unit, biases[()], biases[(unit,)])
        for other in shown:
            if other != unit:
                own_bias, donors = with_references(biases[(other,)], biases[_pair(other, unit)].repeat(1))
                assert donors is not None
                _exchange(measured, [State((other,), unit, heads=(head,)) for head in heads], own_bias, donors)
        other = question.rows([[(units[unit].start, units[unit].stop)]])
        if unit == found.unit:
            known = found.positions[found.positions["layer"] == ALL]
            of_positions = [torch.tensor(known[name].to_numpy()) for name in ("swap", "converse")]
        else:
            of_positions = [*exchanged_positions(question, biases[()], other, [ALL])[1:]]
        _measure_positions(measured, unit, heads, biases[()], other, *of_positions)


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _measure_heads(measured: _Measured, unit: int, bias: KVBias, donor: KVBias) -> list[Head]:
    """Every head by itself, and all others; the leading ones, which are returned, in pairs."""
    own, donors = with_references(bias, donor.repeat(1))
    assert donors is not None
    heads = exchangeable(own)
    alone = [State((), unit, heads=(head,)) for head in heads]
    states = [State((), unit), *alone, *(state._replace(others=True) for state in alone)]
    whole, swap, converse = _exchange(measured, states, own, donors).split([1, len(heads), len(heads)])
    size = torch.maximum(swap.abs(), (whole - converse).abs())
    leading = [heads[i] for i in size.argsort(descending=True, stable=True)[:MOST_HEADS].tolist()]
    if len(leading) > 1:
        pairs = [State((), unit, heads=tuple(sorted(both))) for both in itertools.combinations(leading, 2)]
        _exchange(measured, pairs, own, donors)
    return leading


def _measure_positions(
    measured: _Measured,
    unit: int,
    heads: list[Head],
    bias: KVBias,
    other: Counterfactuals,
    swap: Float[Tensor, " row"],
    converse: Float[Tensor, " row"],
) -> None:
    """The leading positions, and the shift state where it is one of them, in all heads and in each of the leading ones."""
    question, whole = measured.question, measured.total(unit)
    size = torch.maximum(swap.abs(), (whole - converse).abs())
    order = size.argsort(descending=True, stable=True)[:MOST_POSITIONS]
    here, there, make = positions_of_both(question, bias, other)
    question.account.count(4 * len(question.prompt))  # the prompt and the counterfactual one were read twice
    for position in order[size[order] >= NOTICEABLE * abs(whole)].tolist():
        if position == len(question.prompt):
            name, with_it = SHIFT_STATE, (with_shift_state(here, there, ALL), with_shift_state(there, here, ALL))
        else:
            name, with_it = str(position), make(torch.tensor([position]))(ALL)
        for others, own, donors in ((False, here, with_it[0]), (True, there, with_it[1])):
            states = [State((), unit, name, which, others) for which in ((), *((head,) for head in heads))]
            _exchange(measured, states, own, donors, those=True)


def _exchange(
    measured: _Measured, states: Sequence[State], own: KVBias, donors: KVBias, *, those: bool = False
) -> Float[Tensor, " row"]:
    """Read the text under ``own``, the heads of each state exchanged for those of ``donors``; return the effects.

    Args:
        measured: what was read so far.
        states: whose heads are exchanged, all where there are none; where a state says ``others``, all but these.
        own, donors: a bias, and a batch of one other, in the same features.
        those: exchange the heads themselves all the same: ``donors`` differs by the part that stays.
    """
    heads, at_once = exchangeable(own), rows_at_once(own)
    of_head = indicators(own, heads)
    effects = []
    for some in (states[start : start + at_once] for start in range(0, len(states), at_once)):
        meant = torch.tensor([[not state.heads or head in state.heads for head in heads] for state in some])
        others = torch.tensor([state.others and not those for state in some])
        exchanged = (meant != others[:, None]).to(own.b_KV)
        keep_bias, keep_shift_state = (
            1 - einsum(exchanged, of, "row part, part layer head -> row layer head").clamp(max=1) for of in of_head
        )
        donor = torch.zeros(len(some), dtype=torch.long, device=exchanged.device)
        biases = intervened(own, Interventions(keep_bias, keep_shift_state, donor, donors))
        effects.append(measured.add(some, measured.question.reads_under(biases)))
    return torch.cat(effects)
