"""Where in the prompt a unit's content is read: single positions' keys and values exchanged for the counterfactual prompt's.

A position behind the unit whose exchange costs something holds what the model wrote there about the unit while it read the
prompt. A model that writes it at several positions, each of which is enough, loses nothing with any one of them: whole less
converse is what a position keeps alone. The shift state, the raw last keys, values and queries that the text's first tokens mix
into their own (of a recurrent layer the inputs of its short convolution), has a row of its own. In a recurrent layer it is a
position's term in the state that is exchanged, kbar_p v_p^T, carried to the end past the tokens of its own prompt. Positions
keep their numbers: the counterfactual prompt is as long, the unit deleted or replaced in place.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import Counterfactuals, KVBias, KVLensError, KVModel, convert_prompt
from kvlens.checks import checked

from ..bias.one_space import in_one_space
from ..bias.parts import OF_SHIFT_STATE, RECURRENT, has_shift_state, recurrent_layers, tensors_of, with_tensors
from ..declaration import Analysis, Columns, Option
from ..inputs import ANSWER, PROMPT, RIVAL, TEXT
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from ..texts import token_texts
from .answers import Answer, Question, Rival
from .by_head import rows_at_once
from .terms import carriers, factors, state_terms, with_states, written
from .units import Spans, Unit, positions_of, units_of

ALL = -1
"""In place of a layer: every one; in place of a position: the shift state, which has none."""

SHIFT_STATES = {*OF_SHIFT_STATE, RECURRENT + "conv"}

Rows = Callable[[Tensor], Callable[[int], tuple[KVBias, KVBias]]]
"""positions -> layer -> two batches of biases, a row for each position: that one swapped, and all others swapped."""

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


@COLUMNS.document
@checked
@torch.no_grad()
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
            not named is deleted.
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
    ranges = [(unit.start, unit.stop) for unit in units]
    strange = next((span for span in replace_by or {} if span not in ranges), None)
    if strange is not None:
        raise KVLensError(f"replace_by: {strange!r} is no unit; the units are {', '.join(map(str, ranges[:8]))}")
    carried = carriers(bias, positions_of(units, len(question.prompt)))
    frames = []
    for number, unit in enumerate(units):
        other = _counterfactual(question, unit, replace_by or {})
        whole, swap, converse = exchanged_positions(question, bias, other, layers)
        parts: list[tuple[str, int]] = [("position", p) for p in range(len(tokens))]
        parts += [("shift_state", ALL)] if has_shift_state(bias) else []
        at = torch.tensor([p for _, p in parts] * len(layers))
        own = (at >= unit.start) & (at < unit.stop)
        behind = (at >= 0) & carried[number][at.clamp(min=0)] & ~own
        frames.append(
            COLUMNS.frame(
                {
                    "unit": [number] * len(at),
                    "unit_text": unit.text,
                    "part": [part for part, _ in parts] * len(layers),
                    "prompt_position": at,
                    "token": [tokens[p] if p != ALL else None for _, p in parts] * len(layers),
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


def _counterfactual(question: Question, unit: Unit, replace_by: Mapping[tuple[int, int], str | Tensor]) -> Counterfactuals:
    span = (unit.start, unit.stop)
    return question.rows([[]], [{span: replace_by[span]}]) if span in replace_by else question.rows([[span]])


def exchanged_positions(
    question: Question, bias: KVBias, other: Counterfactuals, layers: list[int]
) -> tuple[float, Float[Tensor, " row"], Float[Tensor, " row"]]:
    """(whole, swap, converse): by how much the score falls with everything from there, and for every layer with one position
    from there, and with all but one; the shift state, where there is one, comes after the positions."""
    here, there, make = positions_of_both(question, bias, other)
    score = float(question.scores_under(here.repeat(1))[0])
    whole = score - float(question.scores_under(there.repeat(1))[0])
    found: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def measure(layer: int, biases: tuple[KVBias, KVBias]) -> None:
        found[layer].append(score - torch.stack([question.scores_under(each) for each in biases]))

    for positions in torch.arange(len(question.prompt)).split(min(32, rows_at_once(here))):
        of_layer = make(positions)
        for layer in layers:
            measure(layer, of_layer(layer))
    if has_shift_state(bias):
        for layer in layers:
            measure(layer, (with_shift_state(here, there, layer), with_shift_state(there, here, layer)))
    swap, converse = torch.cat([part for layer in layers for part in found[layer]], dim=1)
    return whole, swap, converse


def positions_of_both(question: Question, bias: KVBias, other: Counterfactuals) -> tuple[KVBias, KVBias, Rows]:
    """A prompt's bias and that of a counterfactual prompt, in the same features, and what exchanges positions between them."""
    donor = convert_prompt(question.model, other).select_prompt(0)
    if bias.features is None:
        return bias, donor, _linear_rows(question, bias, donor, other)
    here, there = in_one_space(bias, donor)
    make = _softmax_rows(here, there, len(question.prompt))
    return here, there, make if bias.recurrent is None else _with_states(question, here, other, make)


def _softmax_rows(here: KVBias, there: KVBias, n_positions: int) -> Rows:
    """Weights and values of one position moved from the prompt's keys to the counterfactual's, which lie behind them."""
    half = here.d_phi // 2
    before = half - n_positions  # keys of what the prompt continues

    def make(positions: Tensor) -> Callable[[int], tuple[KVBias, KVBias]]:
        swapped = torch.zeros(len(positions), here.d_phi, dtype=torch.bool, device=here.b_D.device)
        row = torch.arange(len(positions))
        swapped[row, before + positions] = swapped[row, half + before + positions] = True

        def of_layer(layer: int) -> tuple[KVBias, KVBias]:
            which = _layers(here, layer) & swapped[None, :, None]
            return _moved(here, there, which, len(positions)), _moved(there, here, which, len(positions))

        return of_layer

    return make


def _moved(to: KVBias, other: KVBias, which: Tensor, n_rows: int) -> KVBias:
    """A bias of virtual keys, some of which have the weights and values of another."""
    return replace(
        to.repeat(n_rows),
        b_D=torch.where(which, other.b_D[:, None], to.b_D[:, None]),
        b_KV=torch.where(which[..., None], other.b_KV[:, None], to.b_KV[:, None]),
    )


def _with_states(question: Question, here: KVBias, other: Counterfactuals, of_attention: Rows) -> Rows:
    """What ``of_attention`` makes, and the states of the recurrent layers less one position's term, with the other's."""
    own, others = state_terms(question.model, question.prompt), state_terms(question.model, other)
    numbers = torch.tensor(recurrent_layers(here))

    def make(positions: Tensor) -> Callable[[int], tuple[KVBias, KVBias]]:
        chosen = torch.zeros(len(positions), len(question.prompt), dtype=torch.bool)
        chosen[torch.arange(len(positions)), positions] = True
        change = others.of(chosen) - own.of(chosen)
        attention = of_attention(positions)

        def of_layer(layer: int) -> tuple[KVBias, KVBias]:
            meant = ((numbers == layer) | (layer == ALL)).to(change)[:, None, None, None, None]
            swapped, others_swapped = attention(layer)
            return _added(swapped, meant * change), _added(others_swapped, -meant * change)

        return of_layer

    return make


def _added(bias: KVBias, change: Float[Tensor, "recurrent_layer row head d_k d_v"]) -> KVBias:
    """``bias`` with ``change`` added to its states."""
    assert bias.recurrent is not None
    return with_states(bias, bias.recurrent.b_KV + change.to(bias.recurrent.b_KV))


def _linear_rows(question: Question, here: KVBias, there: KVBias, other: Counterfactuals) -> Rows:
    """b_KV and b_D less one position's term, with the counterfactual's; and the other way round."""
    n, model = len(question.prompt), question.model
    own, others = factors(model, question.prompt), factors(model, other)

    def make(positions: Tensor) -> Callable[[int], tuple[KVBias, KVBias]]:
        chosen = torch.zeros(len(positions), n, dtype=torch.bool)
        chosen[torch.arange(len(positions)), positions] = True
        taken, given = written(model, own, chosen), written(model, others, chosen & other.kept.cpu())
        change = given.b_KV - taken.b_KV, given.b_D - taken.b_D

        def of_layer(layer: int) -> tuple[KVBias, KVBias]:
            where = _layers(here, layer).to(here.b_KV)
            rows = [(here.repeat(len(positions)), where), (there.repeat(len(positions)), -where)]
            added = [
                replace(bias, b_KV=bias.b_KV + sign[..., None] * change[0], b_D=bias.b_D + sign * change[1])
                for bias, sign in rows
            ]
            return added[0], added[1]

        return of_layer

    return make


def _layers(bias: KVBias, layer: int) -> Tensor:
    """True at the attention layers that are meant, [layer, 1, 1, 1]."""
    every = torch.tensor(bias.attention_layers, device=bias.b_KV.device)
    return ((every == layer) | (layer == ALL))[:, None, None, None]


def with_shift_state(here: KVBias, there: KVBias, layer: int) -> KVBias:
    """A batch of one: a bias with the shift state of another, in one layer or in all of them."""
    attention, recurrent = torch.tensor(here.attention_layers), torch.tensor(recurrent_layers(here))
    own, others = tensors_of(here), tensors_of(there)
    mixed = {}
    for name in SHIFT_STATES & own.keys():
        numbers = recurrent if name.startswith(RECURRENT) else attention
        meant = ((numbers == layer) | (layer == ALL)).to(own[name].device)
        tensor = own[name][:, None]
        mixed[name] = torch.where(meant.reshape(-1, *[1] * (tensor.dim() - 1)), others[name][:, None], tensor)
    return with_tensors(here.repeat(1), mixed)


ATTRIBUTION_BY_POSITION = Analysis(
    name="attribution_by_position",
    summary="where in the prompt a sentence's content is read: single positions' keys and values swapped",
    function=attribution_by_position,
    columns=COLUMNS,
    inputs={"prompt": PROMPT, "text": TEXT, "answer": ANSWER, "rival": RIVAL},
    options={
        "by": Option("the units", choices=("token", "word", "sentence", "paragraph")),
        "each_layer": Option("also a row for every layer"),
    },
)
