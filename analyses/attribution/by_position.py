"""Where in the prompt a unit's content is read: single positions' keys and values exchanged for the counterfactual prompt's.

A position behind the unit whose exchange costs something holds what the model wrote there about the unit while it read the
prompt. A model that writes it at several positions, each of which is enough, loses nothing with any one of them: whole less
converse is what a position keeps alone. The shift state, the raw last keys, values and queries that the text's first tokens mix
into their own (of a recurrent layer the inputs of its short convolution), has a row of its own. In a recurrent layer it is a
position's term in the state that is exchanged, kbar_p v_p^T, carried to the end past the tokens of its own prompt. Positions
keep their numbers: the counterfactual prompt is as long, the unit removed or replaced in place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import Counterfactuals, KVBias, KVLensError, KVModel
from kvlens.checks import checked
from kvlens.texts import token_texts

from ..bias.one_space import in_one_space
from ..bias.parts import RECURRENT, has_shift_state, tensors_of, with_tensors
from ..declaration import PROMPT_OR_CHAT, Columns, Option, analysis
from ..predictions import EFFECT
from ..segments import Progress
from ..sequences import PromptTokens, TextTokens
from .answers import Answer, Question, Rival
from .by_head import rows_at_once
from .terms import ALL, SHIFT_STATES, Terms, carriers, in_layer
from .units import BY, Spans, Unit, positions_of

COLUMNS = Columns(
    unit=("int64", "from 0"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
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
    inputs={"prompt": PROMPT_OR_CHAT},
    options={
        "by": BY,
        "each_layer": Option("also a row for every layer"),
    },
)
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
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """What each position of the prompt holds of each unit.

    Args:
        model, prompt, text, by, answer, rival, on_progress: as
            :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.
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
    units = question.units(by)
    read = Terms.of_prompt(model, question.prompt)
    tokens = token_texts(model, question.prompt)
    layers = [ALL, *(range(model.cfg.n_layers) if each_layer else ())]
    others = without_each(question, units, replace_by or {})
    carried = carriers(read.bias, positions_of(units, len(question.prompt)))
    expected = len(units) * 2 * len(layers) * len(question.prompt) * question.n_read
    with question.account.bar(on_progress, "attribution_by_position", expected):
        frames = [
            _of_unit(number, unit, PositionExchange(read, other), question, layers, carried[number], tokens)
            for number, (unit, other) in enumerate(zip(units, others, strict=True))
        ]
    return pd.concat(frames, ignore_index=True)


def _of_unit(
    number: int,
    unit: Unit,
    exchange: "PositionExchange",
    question: Question,
    layers: list[int],
    carried: Bool[Tensor, " pos"],
    tokens: Sequence[str],
) -> pd.DataFrame:
    whole, swap, converse = exchanged_positions(question, exchange, layers)
    parts = exchange.parts
    at = torch.tensor(parts * len(layers))
    own = (at >= unit.start) & (at < unit.stop)
    return COLUMNS.frame(
        {
            "unit": [number] * len(at),
            "name": unit.name,
            "unit_text": unit.text,
            "part": ["shift_state" if p == ALL else "position" for p in parts] * len(layers),
            "prompt_position": at,
            "token": [None if p == ALL else tokens[p] for p in parts] * len(layers),
            "layer": torch.tensor(layers).repeat_interleave(len(parts)),
            "swap": swap,
            "converse": converse,
            "in_unit": own,
            "in_shift_window": (at >= 0) & carried[at.clamp(min=0)] & ~own,
            "whole": whole,
        }
    )


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
    question: Question, exchange: "PositionExchange", layers: list[int]
) -> tuple[float, Float[Tensor, " row"], Float[Tensor, " row"]]:
    """(whole, swap, converse): by how much the score falls with everything exchanged, and for every layer with one part
    exchanged, and with all but one (in this layer; everything in the others)."""
    score, one = question.scores_under, torch.eye(len(exchange.parts), dtype=torch.bool)
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
        read: of the prompt.
        other: the counterfactual prompt, a single row.

    Attributes:
        parts: positions, then `ALL` for the shift state where there is one.
        own, donor: both biases, in the same features.
        at_once: how many rows a pass has room for.
    """

    def __init__(self, read: Terms, other: Counterfactuals):
        self.n_positions = read.n_positions
        self.parts = [*range(self.n_positions), *([ALL] if has_shift_state(read.bias) else [])]
        there = Terms.of_prompt(read.model, other)
        self.own, self.donor = in_one_space(read.bias, there.bias)  # the other prompt's keys lie behind the prompt's
        behind = read.bias.d_phi + there.first_key
        self._sides = replace(read, bias=self.own), replace(there, bias=self.donor, first_key=behind)
        self.at_once = min(32, rows_at_once(self.own))

    def biases(self, chosen: Bool[Tensor, "row part"], layer: int = ALL, onto_other: bool = False) -> KVBias:
        """A batch of biases: the prompt's with the chosen parts of the other prompt, or the other way round."""
        here, there = self._sides[::-1] if onto_other else self._sides
        positions, whole = chosen[:, : self.n_positions], here.bias.repeat(len(chosen))
        taken, given, tensors = here.of(positions, layer), there.of(positions, layer), tensors_of(whole)
        mixed = {name: tensors[name] + (given[name] - taken[name]).to(tensors[name]) for name in taken}
        own, others, shift_states = tensors_of(here.bias), tensors_of(there.bias), chosen[:, self.n_positions :].any(dim=1)
        for name in own.keys() & set(SHIFT_STATES):
            numbers = here.bias.recurrent.layers if name.startswith(RECURRENT) else here.bias.attention_layers
            meant = in_layer(numbers, layer)[:, None] & shift_states[None]
            meant = meant.reshape(*meant.shape, *[1] * (own[name].dim() - 1)).to(own[name].device)
            mixed[name] = torch.where(meant, others[name][:, None], own[name][:, None])
        return with_tensors(whole, mixed)
