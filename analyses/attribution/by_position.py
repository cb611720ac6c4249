"""Where in the prompt a unit's content is read: single positions' keys and values exchanged for the counterfactual prompt's.

A position behind the unit whose exchange costs something holds what the model wrote there about the unit while it read the
prompt. A model that writes it at several positions, each of which is enough, loses nothing with any one of them: whole less
converse is what a position keeps alone. The shift state, the raw last keys, values and queries that the text's first tokens mix
into their own (of a recurrent layer the inputs of its short convolution), has a row of its own. In a recurrent layer it is a
position's term in the state that is exchanged, kbar_p v_p^T, carried to the end past the tokens of its own prompt. Positions
keep their numbers: the counterfactual prompt is as long, the unit removed or replaced in place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import Counterfactuals, KVBias, KVLensError, KVModel, convert_prompt, weights_unchanged
from kvlens.checks import checked

from ..bias.one_space import in_one_space
from ..bias.parts import RECURRENT, has_shift_state, recurrent_layers, tensors_of, with_tensors
from ..declaration import Columns, Option, analysis
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from ..texts import token_texts
from .answers import Answer, Question, Read, Rival
from .by_head import rows_at_once
from .terms import SHIFT_STATES, carriers, factors, state_terms, with_states, written
from .units import BY, Spans, Unit, positions_of, units_of

ALL = -1
"""In place of a layer: every one; in place of a position: the shift state, which has none."""

Rows = Callable[[Bool[Tensor, "row pos"], int, bool], KVBias]
"""(chosen positions, layer, onto the other prompt) -> a batch of biases, of the prompt or of the other prompt, with the chosen
positions of the other one."""

COLUMNS = Columns(
    unit=("int64", "from 0"),
    unit_text=("str", "of the unit"),
    part=("str", "``position``, or ``shift_state``"),
    prompt_position=("int64", "from 0; -1 for the shift state"),
    token=("str", "at the position; missing for the shift state"),
    layer=("int64", "from 0; -1: all layers at once"),
    swap=("float64", f"{EFFECT}; this position's keys and values from the counterfactual prompt"),
    converse=("float64", f"{EFFECT}; everything from there but this position's keys and values (in this layer)"),
    in_unit=("bool", "whether the position is one of the unit's"),
    in_shift_window=("bool", "whether it lies behind the unit and carries the unit's shifted keys or values"),
    whole=("float64", f"{EFFECT}; everything from there, which is the unit's total effect"),
)


@analysis(
    COLUMNS,
    "where in the prompt a sentence's content is read: single positions' keys and values swapped",
    options={
        "by": BY,
        "each_layer": Option("also a row for every layer"),
    },
)
@checked
@torch.no_grad()
@weights_unchanged()
def attribution_by_position(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    replace_by: Mapping[tuple[int, int], str | Tensor] | None = None,
    each_layer: bool = False,
) -> pd.DataFrame:
    """What each position of the prompt holds of each unit.

    Args:
        model, prompt, text, by, answer, rival: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.
        replace_by: token range of a unit -> what stands there in the counterfactual prompt, of as many tokens; a unit that is
            not named is removed.
        each_layer: also a row for every layer, in addition to those of all layers at once.

    Returns:
        One row per unit, layer (all at once first) and position, then the shift state's where the model shifts:

        {columns}

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`; a replacement of another length, or of
            tokens that are no unit.
    """
    question = Question.of(model, prompt, text, answer, rival)
    units = units_of(model, question.prompt, by)
    bias = convert_prompt(model, question.prompt)
    tokens = token_texts(model, question.prompt)
    layers = [ALL, *(range(model.cfg.n_layers) if each_layer else ())]
    others = without_each(question, units, replace_by or {})
    carried = carriers(bias, positions_of(units, len(question.prompt)))
    frames = []
    for number, (unit, other) in enumerate(zip(units, others, strict=True)):
        exchange = PositionExchange(question, bias, other)
        whole, swap, converse = exchanged_positions(exchange, layers)
        parts = exchange.parts
        at = torch.tensor(parts * len(layers))
        own = (at >= unit.start) & (at < unit.stop)
        behind = (at >= 0) & carried[number][at.clamp(min=0)] & ~own
        frames.append(
            COLUMNS.frame(
                {
                    "unit": [number] * len(at),
                    "unit_text": unit.text,
                    "part": ["shift_state" if p == ALL else "position" for p in parts] * len(layers),
                    "prompt_position": at,
                    "token": [None if p == ALL else tokens[p] for p in parts] * len(layers),
                    "layer": torch.tensor(layers).repeat_interleave(len(parts)),
                    "swap": swap,
                    "converse": converse,
                    "in_unit": own,
                    "in_shift_window": behind,
                    "whole": whole,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def without_each(
    question: Question, units: Sequence[Unit], replace_by: Mapping[tuple[int, int], str | Tensor]
) -> list[Counterfactuals]:
    """For each unit the prompt in which it is replaced, or removed where no replacement is named.

    Raises:
        KVLensError: a replacement of another length, or of tokens that are no unit.
    """
    spans = [(unit.start, unit.stop) for unit in units]
    strange = next((span for span in replace_by if span not in spans), None)
    if strange is not None:
        raise KVLensError(f"replace_by: {strange!r} is no unit; the units are {', '.join(map(str, spans[:8]))}")
    return [
        question.rows([[]], [{span: replace_by[span]}]) if span in replace_by else question.rows([[span]]) for span in spans
    ]


def exchanged_positions(
    exchange: "PositionExchange", layers: list[int]
) -> tuple[float, Float[Tensor, " row"], Float[Tensor, " row"]]:
    """(whole, swap, converse): by how much the score falls with everything exchanged, and for every layer with one part
    exchanged, and with all but one (in this layer; everything in the others)."""
    score, one = exchange.question.scores_under, torch.eye(len(exchange.parts), dtype=torch.bool)
    own, everything = (float(score(bias.repeat(1))[0]) for bias in (exchange.own, exchange.donor))
    found = [
        own - torch.cat([score(exchange.biases(some, layer, kept)) for some in one.split(exchange.at_once)])
        for kept in (False, True)
        for layer in layers
    ]
    swap, converse = torch.cat(found).split(len(layers) * len(one))
    return own - everything, swap, converse


class PositionExchange:
    """Sets of positions of a converted prompt, and its shift state, exchanged for those of a counterfactual prompt.

    Args:
        question: what is asked.
        bias: of the prompt.
        other: the counterfactual prompt, a single row.

    Attributes:
        parts: positions, then `ALL` for the shift state where there is one.
        own, donor: both biases, in the same features.
        at_once: how many rows a pass has room for.
    """

    def __init__(self, question: Question, bias: KVBias, other: Counterfactuals):
        self.question, self.n_positions = question, len(question.prompt)
        self.parts = [*range(self.n_positions), *([ALL] if has_shift_state(bias) else [])]
        donor = convert_prompt(question.model, other).select_prompt(0)
        if bias.features is None:
            self.own, self.donor = bias, donor
            self._rows = _linear_rows(question, self.own, self.donor, other)
        else:
            self.own, self.donor = in_one_space(bias, donor)
            rows = _softmax_rows(self.own, self.donor, self.n_positions)
            self._rows = rows if bias.recurrent is None else _with_states(question, self.own, other, rows)
        self.at_once = min(32, rows_at_once(self.own))

    def biases(self, chosen: Bool[Tensor, "row part"], layer: int = ALL, onto_other: bool = False) -> KVBias:
        """A batch of biases: the prompt's with the chosen parts of the other prompt, or the other way round."""
        made = self._rows(chosen[:, : self.n_positions], layer, onto_other)
        sides = (self.donor, self.own) if onto_other else (self.own, self.donor)
        return with_shift_states(made, *sides, chosen[:, self.n_positions :].any(dim=1), layer)

    def read(self, exchanged: Bool[Tensor, "row part"]) -> Read:
        """Reads a text with each set exchanged in all layers; a set of more than half is what it leaves, put into the other
        prompt's bias."""
        most = exchanged.sum(dim=1) * 2 > len(self.parts)
        back = torch.cat([torch.where(~most)[0], torch.where(most)[0]]).argsort()
        rows = ((exchanged[~most], False), (~exchanged[most], True))
        stacked = [tensors_of(self.biases(chosen, onto_other=side)) for chosen, side in rows if len(chosen)]
        mixed = {name: torch.cat([each[name] for each in stacked], dim=1)[:, back] for name in stacked[0]}
        return self.question.reads_under(with_tensors(self.own.repeat(len(exchanged)), mixed))


def _softmax_rows(here: KVBias, there: KVBias, n_positions: int) -> Rows:
    """Weights and values of chosen positions moved from one prompt's keys to the other's, which lie behind them."""
    half = here.d_phi // 2
    before = half - n_positions  # keys of what the prompt continues

    def make(chosen: Tensor, layer: int, onto_other: bool) -> KVBias:
        of_one = torch.nn.functional.pad(chosen, (before, 0))
        swapped = torch.cat([of_one, of_one], dim=1).to(here.b_D.device)
        which = _layers(here, layer) & swapped[None, :, None]
        return _moved(there, here, which, len(chosen)) if onto_other else _moved(here, there, which, len(chosen))

    return make


def _moved(to: KVBias, other: KVBias, which: Tensor, n_rows: int) -> KVBias:
    """A bias of virtual keys, some of which have the weights and values of another."""
    return replace(
        to.repeat(n_rows),
        b_D=torch.where(which, other.b_D[:, None], to.b_D[:, None]),
        b_KV=torch.where(which[..., None], other.b_KV[:, None], to.b_KV[:, None]),
    )


def _with_states(question: Question, here: KVBias, other: Counterfactuals, of_attention: Rows) -> Rows:
    """What ``of_attention`` makes, and the states of the recurrent layers with the chosen positions' terms exchanged."""
    own, others = state_terms(question.model, question.prompt), state_terms(question.model, other)
    numbers = torch.tensor(recurrent_layers(here))

    def make(chosen: Tensor, layer: int, onto_other: bool) -> KVBias:
        change = (others.of(chosen) - own.of(chosen)) * (-1 if onto_other else 1)
        meant = ((numbers == layer) | (layer == ALL)).to(change)[:, None, None, None, None]
        bias = of_attention(chosen, layer, onto_other)
        assert bias.recurrent is not None
        return with_states(bias, bias.recurrent.b_KV + (meant * change).to(bias.recurrent.b_KV))

    return make


def _linear_rows(question: Question, here: KVBias, there: KVBias, other: Counterfactuals) -> Rows:
    """b_KV and b_D less the chosen positions' terms, with the other prompt's."""
    model = question.model
    own, others = factors(model, question.prompt), factors(model, other)

    def make(chosen: Tensor, layer: int, onto_other: bool) -> KVBias:
        taken, given = written(model, own, chosen), written(model, others, chosen & other.kept.cpu())
        bias = (there if onto_other else here).repeat(len(chosen))
        where = _layers(here, layer).to(here.b_KV) * (-1 if onto_other else 1)
        b_kv, b_d = given.b_KV - taken.b_KV, given.b_D - taken.b_D
        return replace(bias, b_KV=bias.b_KV + where[..., None] * b_kv, b_D=bias.b_D + where * b_d)

    return make


def _layers(bias: KVBias, layer: int) -> Tensor:
    """True at the attention layers that are meant, [layer, 1, 1, 1]."""
    every = torch.tensor(bias.attention_layers, device=bias.b_KV.device)
    return ((every == layer) | (layer == ALL))[:, None, None, None]


def with_shift_states(bias: KVBias, here: KVBias, there: KVBias, exchanged: Bool[Tensor, " row"], layer: int) -> KVBias:
    """A batch of biases with the shift state of ``here``, or where exchanged of ``there``, in one layer or in all of them."""
    attention, recurrent = torch.tensor(here.attention_layers), torch.tensor(recurrent_layers(here))
    own, others = tensors_of(here), tensors_of(there)
    mixed = {}
    for name in own.keys() & set(SHIFT_STATES):
        numbers = recurrent if name.startswith(RECURRENT) else attention
        meant = ((numbers == layer) | (layer == ALL))[:, None] & exchanged[None]
        tensor = own[name][:, None]
        meant = meant.reshape(*meant.shape, *[1] * (tensor.dim() - 2)).to(tensor.device)
        mixed[name] = torch.where(meant, others[name][:, None], tensor)
    return with_tensors(bias, mixed)
