"""Through which heads a unit of the prompt acts: parts of the bias exchanged for those of the prompt without the unit.

A head's part is its b_KV and b_D (softmax: its virtual keys, with weights and values) and its shift state, which belongs to a
key-value head: with grouped queries the swap of one query head takes the shift state of its whole group along.
"""

from collections.abc import Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import HookedKVTransformer, KVBias, convert_prompt
from kvlens.signature import checked

from ..bias.interventions import Interventions, intervened
from ..bias.one_space import with_references
from ..declaration import Analysis, Columns, Field, Option
from ..inputs import ANSWER, PROMPT, TEXT
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from .answers import Answer, Positions, Question, Rival
from .units import Spans, Unit, units_of

COLUMNS = Columns(
    unit=("int64", "from 0; -1: the whole prompt, against the baseline"),
    text=("str", "of the unit"),
    start=("int64", "position of its first token"),
    stop=("int64", "position behind its last token"),
    layer=("int64", "from 0"),
    head=("int64", "query head"),
    swap=("float64", f"{EFFECT}; this head's part from the prompt without the unit"),
    converse=("float64", f"{EFFECT}; the parts of all other heads from there"),
    whole=("float64", f"{EFFECT}; all of them from there, which is the unit's total effect"),
    sum_over_heads=("float64", "of swap, nats"),
    interaction=("float64", "whole - sum_over_heads: what heads do together alone, nats"),
)
WHOLE_PROMPT = -1


@COLUMNS.document
@checked
@torch.no_grad()
def attribution_by_head(
    model: HookedKVTransformer,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    positions: Positions = "kept",
) -> pd.DataFrame:
    """What each head does for each unit of a prompt, and for the whole prompt against the baseline.

    Args:
        model, prompt, text, by, answer, rival, positions: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.

    Returns:
        One row per unit (the whole prompt first), layer and head:

        {columns}

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.
    """
    question = Question.of(model, prompt, text, answer, rival, positions)
    units = units_of(model, question.prompt, by)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    bias = convert_prompt(model, question.prompt)
    everything = Unit("".join(unit.text for unit in units), question.n_always_there, len(question.prompt))
    measured = [swapped_heads(question, bias, convert_prompt(model, question.baseline()))]
    deleted = question.rows([[(unit.start, unit.stop)] for unit in units])
    others = convert_prompt(model, deleted)
    measured += [swapped_heads(question, bias, row_of(others, i)) for i in range(len(units))]
    pairs = torch.cartesian_prod(torch.arange(n_layers), torch.arange(n_heads))
    listed: Sequence[Unit] = [everything, *units]
    n_pairs = len(pairs)
    whole = torch.stack([each[0] for each in measured]).repeat_interleave(n_pairs)
    swap, converse = (torch.cat([each[i] for each in measured]) for i in (1, 2))
    total = swap.view(-1, n_pairs).sum(dim=1).repeat_interleave(n_pairs)
    return COLUMNS.frame(
        {
            "unit": torch.arange(WHOLE_PROMPT, len(units)).repeat_interleave(n_pairs),
            "text": [unit.text for unit in listed for _ in range(n_pairs)],
            "start": [unit.start for unit in listed for _ in range(n_pairs)],
            "stop": [unit.stop for unit in listed for _ in range(n_pairs)],
            "layer": pairs[:, 0].repeat(len(listed)),
            "head": pairs[:, 1].repeat(len(listed)),
            "swap": swap,
            "converse": converse,
            "whole": whole,
            "sum_over_heads": total,
            "interaction": whole - total,
        }
    )


def row_of(biases: KVBias, index: int) -> KVBias:
    """One prompt of a batch, as a batch of one."""
    return biases.select_prompt(index).repeat(1)


def swapped_heads(
    question: Question, bias: KVBias, other: KVBias
) -> tuple[Float[Tensor, ""], Float[Tensor, " head_of_model"], Float[Tensor, " head_of_model"]]:
    """(whole, swap, converse): by how much the score falls with all heads' parts from ``other``, one head's, all but one's."""
    own, donors = with_references(bias, other)
    assert donors is not None
    n_layers, n_heads = own.n_layers, own.n_heads
    n = n_layers * n_heads
    alone = 1.0 - torch.eye(n).view(n, n_layers, n_heads)
    ends = torch.stack([torch.ones(n_layers, n_heads), torch.zeros(n_layers, n_heads)])
    keep = torch.cat([ends, alone, 1.0 - alone]).to(own.b_KV)
    scores = []
    for rows in keep.split(64):
        donor = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        scores.append(question.scores_under(intervened(own, Interventions(rows, rows, donor, donors))))
    found = torch.cat(scores)
    falls = found[0] - found
    return falls[1], falls[2 : 2 + n], falls[2 + n :]


ATTRIBUTION_BY_HEAD = Analysis(
    name="attribution_by_head",
    summary="through which heads a sentence (word, token) of the prompt acts: parts of the bias swapped",
    function=attribution_by_head,
    columns=COLUMNS,
    inputs={"prompt": PROMPT, "text": TEXT, "answer": ANSWER, "rival": Field("rival", required=False)},
    options={
        "by": Option("the units", choices=("token", "word", "sentence", "paragraph")),
        "positions": Option("what follows a deleted unit stays, or moves up", choices=("kept", "closed")),
    },
)
