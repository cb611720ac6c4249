"""Through which heads, and where in the prompt, a unit of it acts: parts of the bias from the prompt without the unit.

*Heads.* A head's part is its b_KV and b_D (softmax: its virtual keys, with weights and values), of a recurrent layer the state
that the prompt left in a value head. What belongs to no single head is a part of its own: the shift state of a key-value head
(with grouped queries, of its whole group), and the inputs of a recurrent layer's short convolution.

*Positions.* A position behind the unit whose exchange costs something holds what the model wrote there about the unit while it
read the prompt. A model that writes it at several positions, each of which is enough, loses nothing with any one of them: whole
less converse is what a position keeps alone. The shift state, the raw last keys, values and queries that the text's first
tokens mix into their own (of a recurrent layer the inputs of its short convolution), has a row of its own. In a recurrent layer
it is a position's term in the state that is exchanged, kbar_p v_p^T, carried to the end past the tokens of its own prompt.
Positions keep their numbers: the counterfactual prompt is as long, the unit removed or replaced in place.

Both are one measure (:func:`swaps`) of two exchanges: a part swapped, and its converse, everything swapped but the part.
"""

from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from einops import rearrange, reduce
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import Counterfactuals, KVLensError, KVModel, convert_prompt
from kvlens.checks import checked
from kvlens.texts import joined, token_texts
from kvlens.units import Unit, positions_of

from ..bias.exchange import HEAD, Exchange, HeadExchange, exchangeable, in_one_space
from ..declaration import PROMPT_OR_CHAT, TEXT_IF_ANY, Columns, Option, analysis
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from .answers import BY, Answer, Positions, Question, Rival, Spans
from .terms import ALL, PositionExchange, Terms, carriers

COLUMNS = Columns(
    unit=("int64", "from 0; -1: the whole prompt, against the baseline"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
    unit_text=("str", "of the unit"),
    start=("int64", "position of its first token"),
    stop=("int64", "position behind its last token"),
    layer=("int64", "from 0"),
    head=("int64", f"{HEAD}; key-value head of a shift state; -1: a convolution"),
    part=("str", "``head``, ``shift_state`` (of a key-value head) or ``convolution`` (its inputs, of a recurrent layer)"),
    swap=("float64", f"{EFFECT}; this part from the prompt without the unit"),
    converse=("float64", f"{EFFECT}; all other parts from there"),
    whole=("float64", f"{EFFECT}; all of them from there, which is the unit's total effect"),
    sum_over_heads=("float64", "of swap over all parts, nats"),
    interaction=("float64", "whole - sum_over_heads: what parts do together alone, nats"),
)
WHOLE_PROMPT = -1


@analysis(
    COLUMNS,
    "through which heads a sentence (word, token) of the prompt acts: parts of the bias swapped",
    cost="the prompt twice, and without each unit; the text twice for each head and shift state, and that once more for "
    "each unit",
    inputs={"prompt": PROMPT_OR_CHAT, "text": TEXT_IF_ANY},
    options={
        "by": BY,
        "positions": Option("what follows a removed unit stays, or moves up", choices=("kept", "closed")),
    },
)
@checked
@torch.no_grad()
def attribution_by_head(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens | None = None,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    positions: Positions = "kept",
) -> pd.DataFrame:
    """What each head does for each unit of a prompt, and for the whole prompt against the baseline.

    Args:
        model, prompt, text, by, answer, rival, positions: as
            :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.

    Returns:
        One row per unit (the whole prompt first), layer and part:

        {columns}

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.
    """
    question = Question.of(model, prompt, text, answer, rival, positions)
    units = question.units(by)
    bias = convert_prompt(model, question.prompt)
    everything = Unit("the whole prompt", joined(unit.text for unit in units), *_whole(question))
    others = convert_prompt(model, question.rows([[(unit.start, unit.stop)] for unit in units]))
    nothing = convert_prompt(model, question.baseline()).select_prompt(0)
    donors = [nothing, *(others.select_prompt(i) for i in range(len(units)))]
    parts = exchangeable(bias)
    with question.account.bar("attribution_by_head", len(donors) * (2 * len(parts) + 2) * question.n_read):
        measured = [swaps(question, [HeadExchange(*in_one_space(bias, donor))]) for donor in donors]
    listed: Sequence[Unit] = [everything, *units]
    wholes, *falls = zip(*measured, strict=True)
    swap, converse = map(torch.cat, falls)
    whole = torch.tensor(wholes, dtype=torch.float64).repeat_interleave(len(parts))
    total = reduce(swap, "(unit part) -> unit", "sum", part=len(parts)).repeat_interleave(len(parts))
    return COLUMNS.frame(
        {
            "unit": torch.arange(WHOLE_PROMPT, len(units)).repeat_interleave(len(parts)),
            "name": [unit.name for unit in listed for _ in parts],
            "unit_text": [unit.text for unit in listed for _ in parts],
            "start": [unit.start for unit in listed for _ in parts],
            "stop": [unit.stop for unit in listed for _ in parts],
            "layer": [part.layer for part in parts] * len(listed),
            "head": [part.head for part in parts] * len(listed),
            "part": [part.kind for part in parts] * len(listed),
            "swap": swap,
            "converse": converse,
            "whole": whole,
            "sum_over_heads": total,
            "interaction": whole - total,
        }
    )


def _whole(question: Question) -> tuple[int, int]:
    """The range from the first token that is not always there to the last."""
    can_go = (~question.always_there).nonzero().flatten().tolist()
    return (can_go[0], can_go[-1] + 1) if can_go else (0, 0)


POSITIONS = Columns(
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
    POSITIONS,
    "where in the prompt a sentence's content is read: single positions' keys and values swapped",
    cost="the prompt once, and without each unit; for each unit the text twice for every position of the prompt, and four "
    "times more; as often again for every layer with each_layer",
    inputs={"prompt": PROMPT_OR_CHAT, "text": TEXT_IF_ANY},
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
    text: TextTokens | None = None,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    replace_by: Mapping[tuple[int, int], str | Tensor] | None = None,
    each_layer: bool = False,
) -> pd.DataFrame:
    """What each position of the prompt holds of each unit.

    Args:
        model, prompt, text, by, answer, rival: as
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
    with question.account.bar("attribution_by_position", expected):
        frames = [
            _of_unit(number, unit, PositionExchange(read, other), question, layers, carried[number], tokens)
            for number, (unit, other) in enumerate(zip(units, others, strict=True))
        ]
    return pd.concat(frames, ignore_index=True)


def _of_unit(
    number: int,
    unit: Unit,
    exchange: PositionExchange,
    question: Question,
    layers: list[int],
    carried: Bool[Tensor, " pos"],
    tokens: Sequence[str],
) -> pd.DataFrame:
    whole, swap, converse = swaps(question, [exchange.in_layer(layer) for layer in layers])
    parts = list(exchange.parts)
    at = torch.tensor(parts * len(layers))
    own = (at >= unit.start) & (at < unit.stop)
    return POSITIONS.frame(
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
    """The prompts in each of which a unit is replaced, or removed where no replacement is named.

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


def swaps(
    question: Question, exchanges: Sequence[Exchange]
) -> tuple[float, Float[Tensor, " exchange_and_part"], Float[Tensor, " exchange_and_part"]]:
    """(whole, swap, converse): by how much the score falls with everything exchanged, and for each of several exchanges of the
    same prompts with each part exchanged, and with all but each."""
    one = torch.eye(len(exchanges[0].parts), dtype=torch.bool)
    rows = torch.cat([torch.zeros_like(one[:1]), one])
    scores = [question.scores_under(biases) for exchange in exchanges for biases in exchange.batches(rows, rows)]
    exchanged, kept = rearrange(torch.cat(scores), "(exchange side row) -> side exchange row", side=2, row=len(rows))
    own = exchanged[0, 0]
    return float(own - kept[0, 0]), own - exchanged[:, 1:].flatten(), own - kept[:, 1:].flatten()
