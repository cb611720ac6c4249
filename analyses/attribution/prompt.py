"""Which units of a prompt made the model say the answer: their total and their attention-knockout effects, with a null."""

import math
from collections.abc import Callable, Sequence

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVModel
from kvlens.checks import checked
from kvlens.units import Unit, positions_of

from ..declaration import PROMPT_OR_CHAT, Columns, Option, analysis
from ..predictions import EFFECT
from ..registry import ATTRIBUTION_METHODS
from ..sequences import PromptTokens, TextTokens
from .answers import BY, Answer, Positions, Question, Rival, Spans
from .methods import Method, method_of
from .null import SIGNIFICANT, Null, holm, p_values
from .terms import hidden_from_text

FLOOR = 0.1
"""Nats: below so large an effect of the whole prompt, a unit's share of it says nothing."""

COLUMNS = Columns(
    unit=("int64", "from 0, as the prompt has them"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
    unit_text=("str", "of the unit"),
    start=("int64", "position of its first token; BOS has 0 where there is one"),
    stop=("int64", "position behind its last token"),
    total_effect=("float64", f"{EFFECT}; the unit removed, everything recomputed"),
    total_share=(
        "float64",
        f"total_effect over that of the whole prompt against the baseline; NaN where the latter is below {FLOOR} nats",
    ),
    knockout_effect=(
        "float64",
        f"{EFFECT}; the unit knocked out: the text does not read its keys and values, the prompt's own pass is unchanged; with "
        "a KV shift also the next positions, which carry some of them, and the unit's rows of the shift state; in a recurrent "
        "layer, the terms of the unit's tokens taken out of the state, and the inputs of its convolution at the unit's tokens",
    ),
    p_value=("float64", "share of units of unrelated prompts with a total effect as large; NaN without a null"),
    significant=("bool", f"p_value at most {SIGNIFICANT}: each unit by itself"),
    p_adjusted=("float64", "p_value adjusted for the number of units by Holm's method; NaN without a null"),
)


@COLUMNS.document
@checked
@torch.no_grad()
def prompt_attribution(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    method: str | Method = "leave_one_out",
    null: Null | None = None,
    positions: Positions = "kept",
    on_progress: Callable[[float], None] | None = None,
) -> pd.DataFrame:
    """The effect of each unit of a prompt on an answer.

    Args:
        model: linear or softmax.
        prompt: a string, or tokens [pos] with BOS where the model wants one.
        text: what follows the prompt, a string or tokens [pos] without BOS, up to where the answer begins.
        by: the units: ``token``, ``word``, ``sentence``, ``paragraph``, or token ranges.
        answer: whose log-probability is explained: a string, a token, or several tokens, which add up; None for the most
            probable next token.
        rival: another answer, whose log-probability is taken away; None for none.
        method: a name of :data:`kvlens.analyses.registry.ATTRIBUTION_METHODS`, or a method with its options.
        null: where unrelated units come from (:class:`kvlens.analyses.attribution.null.Null`); None leaves p-values out.
        positions: ``kept``: what follows a removed unit stays where it stood; ``closed``: it moves up.
        on_progress: called with the fraction done, in 0..1, about; None shows a progress bar on a terminal if it takes long.

    Returns:
        One row per unit, in the prompt's order:

        {columns}

    Raises:
        KVLensError: tokens that do not fit, ranges that hold BOS or overlap, an unknown name, an answer of no tokens.
    """
    question = Question.of(model, prompt, text, answer, rival, positions)
    units = question.units(by)
    expected = _cost(question, units, null, method_of(method))
    with question.account.bar(on_progress, "prompt_attribution", expected):
        found = method_of(method).explain(question, units)
        baseline = float(question.scores(question.baseline())[0])
        whole = float(question.scores(question.rows([[]]))[0]) if found.whole is None else found.whole
        nothing = torch.full_like(found.effects, float("nan"))
        p = nothing if null is None else p_values(found.effects, null.effects(question, units, found.without))
        return units_table(question, units, found.effects, whole - baseline, p)


def units_table(
    question: Question,
    units: Sequence[Unit],
    effects: Float[Tensor, " unit"],
    of_prompt: float,
    p: Float[Tensor, " unit"],
) -> pd.DataFrame:
    """The table of :func:`prompt_attribution`, with each unit's knockout effect measured.

    Args:
        question: what is explained.
        units, effects: one for each row; total effects.
        of_prompt: the total effect of the whole prompt.
        p: p-values; NaN without a null.
    """
    knockout = knockout_effects(question, units)
    return COLUMNS.frame(
        {
            "unit": range(len(units)),
            "name": [unit.name for unit in units],
            "unit_text": [unit.text for unit in units],
            "start": [unit.start for unit in units],
            "stop": [unit.stop for unit in units],
            "total_effect": effects,
            "total_share": effects / (of_prompt if abs(of_prompt) >= FLOOR else math.nan),
            "knockout_effect": knockout,
            "p_value": p,
            "significant": p <= SIGNIFICANT,
            "p_adjusted": holm(p),
        }
    )


def knockout_effects(question: Question, units: Sequence[Unit]) -> Float[Tensor, " unit"]:
    """Return, for each unit, the score as it is less the score with the unit knocked out."""
    own = positions_of(units, len(question.prompt))
    everything = torch.cat([torch.zeros_like(own[:1]), own])
    hidden = hidden_from_text(question.model, question.prompt, everything)
    question.account.count(len(question.prompt))
    scores = torch.cat([question.scores_under(biases) for biases in hidden])
    return scores[0] - scores[1:]


def _cost(question: Question, units: Sequence[Unit], null: Null | None, method: Method) -> int:
    """Tokens that are read for an answer of one token, about."""
    n_prompt, n_text = len(question.prompt), len(question.text)
    both, longest = n_prompt + n_text, max(unit.stop - unit.start for unit in units)
    behind = sum(both - unit.start for unit in units) // len(units)  # tokens before the unit are read once for all rows
    n_null, n_rows = (0 if null is None else null.n_for(len(units))), getattr(method, "n_subsets", len(units))
    written = longest if null is not None and null.prompts is None else 0
    return (n_rows + n_null) * behind + n_null * written + (len(units) + 5) * n_text + 5 * n_prompt


@analysis(
    COLUMNS,
    "which sentence (word, token) of the prompt made the model say it: effects of removing it, with a null",
    of=prompt_attribution,
    inputs={"prompt": PROMPT_OR_CHAT},
    options={
        "by": BY,
        "method": Option("how effects are found", choices=tuple(ATTRIBUTION_METHODS)),
        "n_null": Option("units of unrelated texts to compare with; 0 for none"),
        "positions": Option("what follows a removed unit stays, or moves up", choices=("kept", "closed")),
    },
)
def _attribution(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    answer: Answer = None,
    rival: Rival = None,
    by: str = "sentence",
    method: str = "leave_one_out",
    n_null: int = 40,
    positions: str = "kept",
) -> pd.DataFrame:
    """:func:`prompt_attribution` with a null of texts that the model writes by itself; 0 leaves it out."""
    null = Null(n_null) if n_null else None
    options: dict = dict(by=by, method=method, null=null, positions=positions)
    return prompt_attribution(model, prompt, text, answer=answer, rival=rival, **options)
