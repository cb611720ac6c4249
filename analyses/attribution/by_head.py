"""Through which heads a unit of the prompt acts: parts of the bias exchanged for those of the prompt without the unit.

A head's part is its b_KV and b_D (softmax: its virtual keys, with weights and values), of a recurrent layer the state that the
prompt left in a value head. What belongs to no single head is a part of its own: the shift state of a key-value head (with
grouped queries, of its whole group), and the inputs of a recurrent layer's short convolution.

Exchanging a set of parts and keeping all others is the same as keeping these others alone: there is one kind of row.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from einops import einsum
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import KVBias, KVModel, convert_prompt
from kvlens.checks import checked
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.texts import joined

from ..bias.interventions import Interventions, intervened
from ..bias.one_space import with_references
from ..bias.parts import HEAD, exchangeable, indicators
from ..declaration import PROMPT_OR_CHAT, Columns, Option, analysis
from ..predictions import EFFECT
from ..segments import Progress
from ..sequences import PromptTokens, TextTokens
from .answers import Answer, Positions, Question, Rival
from .units import BY, Spans, Unit

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
    inputs={"prompt": PROMPT_OR_CHAT},
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
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    positions: Positions = "kept",
    on_progress: Progress | None = None,
) -> pd.DataFrame:
    """What each head does for each unit of a prompt, and for the whole prompt against the baseline.

    Args:
        model, prompt, text, by, answer, rival, positions, on_progress: as
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
    donors = [convert_prompt(model, question.baseline()), *(others.select_prompt(i).repeat(1) for i in range(len(units)))]
    parts = exchangeable(bias)
    with question.account.bar(on_progress, "attribution_by_head", len(donors) * (2 * len(parts) + 2) * question.n_read):
        measured = [swapped_heads(question, bias, donor) for donor in donors]
    listed: Sequence[Unit] = [everything, *units]
    whole = torch.stack([each[0] for each in measured]).repeat_interleave(len(parts))
    swap, converse = (torch.cat([each[i] for each in measured]) for i in (1, 2))
    total = swap.view(-1, len(parts)).sum(dim=1).repeat_interleave(len(parts))
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
    """From the first token that is not always there to the last."""
    can_go = (~question.always_there).nonzero().flatten().tolist()
    return (can_go[0], can_go[-1] + 1) if can_go else (0, 0)


class HeadExchange:
    """Sets of parts of a converted prompt exchanged for those of another.

    Args:
        bias: of the prompt.
        other: of the other prompt, a batch of one.
        same_features: whether both are in the same features already.

    Attributes:
        parts: what can be exchanged, in order.
        own, donors: both biases, in the same features.
        at_once: how many rows a pass has room for.
    """

    def __init__(self, bias: KVBias, other: KVBias, *, same_features: bool = False):
        own, donors = (bias, other) if same_features else with_references(bias, other)
        assert donors is not None
        self.own, self.donors = own, donors
        self.parts = exchangeable(own)
        self.at_once = rows_at_once(own)
        self._of_bias, self._of_shift_state = indicators(own, self.parts)

    def biases(self, exchanged: Bool[Tensor, "row part"]) -> KVBias:
        """A batch of biases, a row for each set."""
        chosen = exchanged.to(self._of_bias)
        keep_bias, keep_shift_state = (
            1 - einsum(chosen, of, "row part, part layer head -> row layer head").clamp(max=1)
            for of in (self._of_bias, self._of_shift_state)
        )
        donor = torch.zeros(len(chosen), dtype=torch.long, device=chosen.device)
        return intervened(self.own, Interventions(keep_bias, keep_shift_state, donor, self.donors))


def swapped_heads(
    question: Question, bias: KVBias, other: KVBias
) -> tuple[Float[Tensor, ""], Float[Tensor, " part"], Float[Tensor, " part"]]:
    """(whole, swap, converse): by how much the score falls with all parts from ``other``, with one, and with all but one."""
    exchange = HeadExchange(bias, other)
    one = torch.eye(len(exchange.parts), dtype=torch.bool)
    rows = torch.cat([torch.zeros_like(one[:1]), torch.ones_like(one[:1]), one, ~one])
    found = torch.cat([question.scores_under(exchange.biases(some)) for some in rows.split(exchange.at_once)])
    falls = found[0] - found[1:]
    return falls[0], falls[1 : 1 + len(one)], falls[1 + len(one) :]


def rows_at_once(bias: KVBias) -> int:
    """So many variants of a bias are read in one pass, as there is memory for."""
    group = bias.n_heads // bias.b_KV.shape[-3]  # each row has the part of every query head by itself
    return max(4, min(64, NUMBERS_PER_PASS // (2 * group * bias.num_parameters)))
