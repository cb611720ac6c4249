"""Through which heads a unit of the prompt acts: parts of the bias exchanged for those of the prompt without the unit.

A head's part is its b_KV and b_D (softmax: its virtual keys, with weights and values) and its shift state, which belongs to a
key-value head: with grouped queries the swap of one query head takes the shift state of its whole group along. In a recurrent
layer of a hybrid model a head is a value head, its part the state that the prompt left there; the inputs of the layer's short
convolution belong to no head and have a row of their own.

Unrelated units, put where the unit stands, say two things more. A head's *null* is its swap between the prompt with an
unrelated unit and the prompt without it: what this head does for text that has nothing to do with the answer. And they are
other counterfactuals than the deletion: how often a head leads when its part comes from a prompt with an unrelated unit
(resample ablation) says whether the ranking depends on that choice.
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, convert_prompt
from kvlens.checks import Within, checked

from ..bias.interventions import Interventions, intervened
from ..bias.one_space import with_references
from ..bias.parts import exchangeable, indicators
from ..declaration import Analysis, Columns, Option
from ..inputs import ANSWER, PROMPT, RIVAL, TEXT
from ..passes import MEMORY_PER_PASS
from ..predictions import EFFECT
from ..sequences import PromptTokens, TextTokens
from ..texts import joined
from .answers import Answer, Positions, Question, Rival
from .null import SIGNIFICANT, Null
from .units import Spans, Unit, units_of

COLUMNS = Columns(
    unit=("int64", "from 0; -1: the whole prompt, against the baseline"),
    unit_text=("str", "of the unit"),
    start=("int64", "position of its first token"),
    stop=("int64", "position behind its last token"),
    layer=("int64", "from 0"),
    head=("int64", "query head; value head of a recurrent layer, where -1 is the inputs of its short convolution"),
    swap=("float64", f"{EFFECT}; this head's part from the prompt without the unit"),
    converse=("float64", f"{EFFECT}; the parts of all other heads from there"),
    whole=("float64", f"{EFFECT}; all of them from there, which is the unit's total effect"),
    sum_over_heads=("float64", "of swap, nats"),
    interaction=("float64", "whole - sum_over_heads: what heads do together alone, nats"),
    p_value=("float64", "share of unrelated units for which this head's swap is as large; NaN without a null, and for unit -1"),
    significant=("bool", f"p_value at most {SIGNIFICANT}"),
    p_value_alone=(
        "float64",
        "share of unrelated units of which this head's part alone keeps as much of the effect (whole - converse); NaN likewise",
    ),
    leads=(
        "float64",
        "share of unrelated units, put in the unit's place as the counterfactual, with which this head's swap is the largest "
        "of all: near 1 or 0 where the ranking is stable; NaN without a null, and for unit -1",
    ),
)
WHOLE_PROMPT = -1
ROUNDING = 1e-6
"""Nats: effects of heads that differ by less are alike."""


@COLUMNS.document
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
    null: Null | None = None,
    n_tested: Annotated[int, Within(1)] | None = None,
    positions: Positions = "kept",
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """What each head does for each unit of a prompt, and for the whole prompt against the baseline.

    Args:
        model, prompt, text, by, answer, rival, positions: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.
        null: where unrelated units come from (:class:`kvlens.analyses.attribution.null.Null`); None leaves p-values and the
            ranking's stability out.
        n_tested: of each unit, so many heads are compared with the null: those whose swap changes the answer most, or that
            keep most of the effect alone; the others have no p-value, and `leads` is among those compared. None: all heads.
        on_progress: called with the fraction done, in 0..1.

    Returns:
        One row per unit (the whole prompt first), layer and head:

        {columns}

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`.
    """
    question = Question.of(model, prompt, text, answer, rival, positions)
    units = units_of(model, question.prompt, by)
    bias = convert_prompt(model, question.prompt)
    everything = Unit(joined(unit.text for unit in units), question.n_always_there, len(question.prompt))
    tell = on_progress or (lambda done: None)
    measured = [swapped_heads(question, bias, convert_prompt(model, question.baseline()))]
    deleted = question.rows([[(unit.start, unit.stop)] for unit in units])
    others = convert_prompt(model, deleted)
    measured += [swapped_heads(question, bias, row_of(others, i)) for i in range(len(units))]
    pairs = torch.tensor(exchangeable(bias))
    listed: Sequence[Unit] = [everything, *units]
    n_pairs = len(pairs)
    whole = torch.stack([each[0] for each in measured]).repeat_interleave(n_pairs)
    swap, converse = (torch.cat([each[i] for each in measured]) for i in (1, 2))
    total = swap.view(-1, n_pairs).sum(dim=1).repeat_interleave(n_pairs)
    p, p_alone, leads = torch.full((3, len(listed), n_pairs), float("nan"), dtype=torch.float64)
    for number, unit in enumerate(units if null is not None else (), start=1):
        assert null is not None
        swaps, alone = swap.view(-1, n_pairs)[number], (whole - converse).view(-1, n_pairs)[number]
        tested = _largest(swaps, alone, n_tested or n_pairs)

        def part(done: float, before: int = number - 1) -> None:
            tell((before + done) / len(units))

        unrelated, unrelated_alone, resampled = unrelated_swaps(question, bias, unit, null, tested, part)
        p[number, tested] = head_p_values(swaps[tested], unrelated)
        p_alone[number, tested] = head_p_values(alone[tested], unrelated_alone)
        leads[number, tested] = torch.bincount(resampled.argmax(dim=1), minlength=len(tested)).double() / len(resampled)
    return COLUMNS.frame(
        {
            "unit": torch.arange(WHOLE_PROMPT, len(units)).repeat_interleave(n_pairs),
            "unit_text": [unit.text for unit in listed for _ in range(n_pairs)],
            "start": [unit.start for unit in listed for _ in range(n_pairs)],
            "stop": [unit.stop for unit in listed for _ in range(n_pairs)],
            "layer": pairs[:, 0].repeat(len(listed)),
            "head": pairs[:, 1].repeat(len(listed)),
            "swap": swap,
            "converse": converse,
            "whole": whole,
            "sum_over_heads": total,
            "interaction": whole - total,
            "p_value": p.flatten(),
            "significant": p.flatten() <= SIGNIFICANT,
            "p_value_alone": p_alone.flatten(),
            "leads": leads.flatten(),
        }
    )


def _largest(swap: Float[Tensor, " part"], alone: Float[Tensor, " part"], n: int) -> Int[Tensor, " tested"]:
    """The parts of largest swap and those of largest effect alone, in turn, the swap first; in ascending order."""
    by_swap, by_alone = (x.abs().argsort(descending=True, stable=True).argsort() for x in (swap, alone))
    return torch.minimum(2 * by_swap, 2 * by_alone + 1).argsort(stable=True)[:n].sort().values


def row_of(biases: KVBias, index: int) -> KVBias:
    """One prompt of a batch, as a batch of one."""
    return biases.select_prompt(index).repeat(1)


def head_p_values(effects: Float[Tensor, " part"], unrelated: Float[Tensor, "null part"]) -> Float[Tensor, " part"]:
    """Two-sided, each head against what the same head does for unrelated units; effects within rounding count as equal."""
    larger = (unrelated.abs() >= effects.abs() - ROUNDING).double().sum(dim=0)
    return (1.0 + larger) / (1.0 + len(unrelated))


def unrelated_swaps(
    question: Question,
    bias: KVBias,
    unit: Unit,
    null: Null,
    which: Int[Tensor, " part"],
    on_progress: Callable[[float], None],
) -> tuple[Float[Tensor, "null part"], Float[Tensor, "null part"], Float[Tensor, "null part"]]:
    """For unrelated units in the unit's place: swap and whole - converse from a prompt with one to that without it, and the
    swap from the prompt itself to a prompt with one."""
    span = (unit.start, unit.stop)
    new = null.drawn(question, [unit] * null.n_for(1))
    without = convert_prompt(question.model, question.rows([[span]]))
    swaps, alone, resampled = [], [], []
    for some in torch.arange(len(new)).split(max(1, rows_at_once(bias) // 2)):
        with_them = convert_prompt(question.model, question.rows([[]] * len(some), [{span: new[i]} for i in some.tolist()]))
        for i in range(len(some)):
            whole, swap, converse = swapped_heads(question, with_them.select_prompt(i), without, which)
            swaps.append(swap)
            alone.append(whole - converse)
            resampled.append(swapped_heads(question, bias, row_of(with_them, i), which, converse=False)[1])
            on_progress(len(swaps) / len(new))
    return torch.stack(swaps), torch.stack(alone), torch.stack(resampled)


def swapped_heads(
    question: Question, bias: KVBias, other: KVBias, which: Int[Tensor, " part"] | None = None, *, converse: bool = True
) -> tuple[Float[Tensor, ""], Float[Tensor, " part"], Float[Tensor, " part_or_none"]]:
    """(whole, swap, converse): by how much the score falls with all heads' parts from ``other``, one head's, all but one's.

    ``which`` of the heads, all by default; the last are left out on request.
    """
    own, donors = with_references(bias, other)
    assert donors is not None
    every = exchangeable(own)
    parts = every if which is None else [every[i] for i in which.tolist()]
    n = len(parts)
    keep_bias, keep_shift_state = (
        torch.cat([torch.ones_like(part[:1]), torch.zeros_like(part[:1]), 1.0 - part, part[: len(part) if converse else 0]])
        for part in indicators(own, parts)
    )
    scores, at_once = [], rows_at_once(own)
    for bias_rows, shift_rows in zip(keep_bias.split(at_once), keep_shift_state.split(at_once), strict=True):
        donor = torch.zeros(len(bias_rows), dtype=torch.long, device=bias_rows.device)
        scores.append(question.scores_under(intervened(own, Interventions(bias_rows, shift_rows, donor, donors))))
    found = torch.cat(scores)
    falls = found[0] - found
    return falls[1], falls[2 : 2 + n], falls[2 + n :]


def rows_at_once(bias: KVBias) -> int:
    """So many variants of a bias are read in one pass, as there is memory for."""
    group = bias.n_heads // bias.b_KV.shape[-3]  # each row has the part of every query head by itself
    return max(4, min(64, MEMORY_PER_PASS // (8 * group * bias.num_parameters)))


def _by_head(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    answer: Answer = None,
    rival: Rival = None,
    by: str = "sentence",
    n_null: int = 0,
    positions: Positions = "kept",
) -> pd.DataFrame:
    """:func:`attribution_by_head` with a null of texts that the model writes by itself; 0 leaves it out."""
    null = Null(n_null) if n_null else None
    return attribution_by_head(model, prompt, text, by=by, answer=answer, rival=rival, null=null, positions=positions)


ATTRIBUTION_BY_HEAD = Analysis(
    name="attribution_by_head",
    summary="through which heads a sentence (word, token) of the prompt acts: parts of the bias swapped",
    function=_by_head,
    columns=COLUMNS,
    inputs={"prompt": PROMPT, "text": TEXT, "answer": ANSWER, "rival": RIVAL},
    options={
        "by": Option("the units", choices=("token", "word", "sentence", "paragraph")),
        "n_null": Option("units of unrelated texts to compare each head with; 0 for none"),
        "positions": Option("what follows a deleted unit stays, or moves up", choices=("kept", "closed")),
    },
)
