"""One question, one answer: which unit of the prompt made the model say it, through which heads, read at which positions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import Counterfactuals, KVModel, logits_after
from kvlens.checks import checked
from kvlens.errors import warn

from ..bias.parts import part_name
from ..sequences import PromptTokens, TextTokens, begins_with_bos
from ..texts import joined, token_texts
from .answers import Answer, Question, Rival
from .by_head import attribution_by_head
from .by_position import attribution_by_position
from .cost import QUICK_HEADS, cost_of
from .kept import Keep, keeping
from .methods import Method, method_of
from .null import FEWEST, SIGNIFICANT, Null, enough_for
from .prompt import prompt_attribution
from .units import Spans, units_of

NEEDED, SUFFICIENT = 0.1, 0.5
"""Shares of a unit's total effect: what a head's swap must cost to be named, and what it must keep alone."""
STABLE = 0.9
"""Of unrelated texts in the unit's place: with so many the leading head must be the same for its lead to count as stable."""


@dataclass(frozen=True)
class Explained:
    """What :func:`explain` found.

    Attributes:
        answer, rival: as text.
        p_answer, p_rival: probabilities of the answer and of its rival with the whole prompt, without the unit that matters
            most (None where no unit is significant, adjusted for the number of units), and without the prompt: after BOS alone,
            the text in its place. Where no rival is given, it is the most probable other first token without that unit (with
            the prompt, where no unit is significant).
        units, heads, positions: the tables of `prompt_attribution`, and of that unit those of `attribution_by_head` and
            `attribution_by_position`; empty where no unit is significant.
        unit: number of that unit, or None.
        answer_tokens, rival_tokens: the two answers as token ids.
        testable: whether there were enough unrelated units for any of these to be significant.
        unprompted: the most probable first token without the prompt, as text; None where it is that of the answer or rival.
        p_unprompted: its probabilities, likewise.
    """

    answer: str
    rival: str
    p_answer: tuple[float, float | None, float]
    p_rival: tuple[float, float | None, float]
    units: pd.DataFrame
    heads: pd.DataFrame
    positions: pd.DataFrame
    unit: int | None
    answer_tokens: tuple[int, ...] = ()
    rival_tokens: tuple[int, ...] = ()
    testable: bool = True
    unprompted: str | None = None
    p_unprompted: tuple[float, float | None, float] | None = None

    def needed(self) -> list[str]:
        """Heads whose swap alone costs a significant share of the whole effect, such as "L0H2", the strongest first, at most
        three."""
        return self._named(self.heads["swap"] / self.heads["whole"], NEEDED, self.heads["p_value"])

    def sufficient(self) -> list[str]:
        """Heads that alone keep most of the effect when all others are swapped, likewise."""
        return self._named(1 - self.heads["converse"] / self.heads["whole"], SUFFICIENT, self.heads["p_value_alone"])

    def unstable_lead(self) -> tuple[str, float] | None:
        """The head whose swap costs most, and the share of unrelated texts in the unit's place with which it costs most too;
        None where that share is at least `STABLE`, and where the unit lowers the answer's probability."""
        first = self.heads.loc[self.heads["swap"].idxmax()]
        if first["whole"] <= 0 or first["leads"] >= STABLE:
            return None
        return part_name(int(first["layer"]), int(first["head"])), float(first["leads"])

    def _named(self, share: pd.Series, least: float, p: pd.Series) -> list[str]:
        rows = self.heads.loc[share[(share >= least) & (p <= SIGNIFICANT)].nlargest(3).index]
        return [part_name(layer, head) for layer, head in zip(rows["layer"], rows["head"], strict=True)]


@checked
@torch.no_grad()
def explain(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    by: str | Spans = "sentence",
    answer: Answer = None,
    rival: Rival = None,
    method: str | Method = "leave_one_out",
    null: Null | None = None,
    quick: bool = False,
    keep: Keep = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Explained:
    """Explain an answer: effects of all units, and of the one that matters most the heads and positions.

    Args:
        model, prompt, text, by, answer, rival, method: as
            :func:`kvlens.analyses.attribution.prompt.prompt_attribution`. Without a rival, effects are those on the answer
            alone, and the most probable other first token is shown beside it.
        null: None takes units of texts that the model writes by itself. A unit is significant where its adjusted p-value is at
            most 0.05: of prompts that have nothing to do with the answer, at most one in twenty has any such unit. A warning
            says where the null has too few units for that. Heads are compared with at most 40 units, each by itself.
        quick: compare only the eight heads with the largest effects with unrelated units, which is what takes longest where
            there are many heads; the others have no p-value.
        keep: a file in which scores are kept as they are measured, and from which the same explanation resumes after an
            interruption (:mod:`kvlens.analyses.attribution.kept`). It stays until you delete it. The model may have no hooks.
        on_progress: called with a description and the fraction done, in 0..1; :mod:`kvlens.analyses.attribution.cost` says
            beforehand what there is to read.

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`; a file to keep scores in that is
            damaged, has those of another explanation, or is in use by another process; hooks on a model whose scores are kept.
    """
    question = Question.of(model, prompt, text, answer, rival)
    null = Null() if null is None else null
    what = dict(by=by, answer=question.answer, rival=question.rival, method=method, null=null, quick=quick)
    with keeping(keep, model, prompt=question.prompt, text=question.text, **what):
        return _explained(question, by, method, null, quick, on_progress)


def _explained(
    question: Question,
    by: str | Spans,
    method: str | Method,
    null: Null,
    quick: bool,
    on_progress: Callable[[str, float], None] | None,
) -> Explained:
    model = question.model
    n_tested = QUICK_HEADS if quick else None
    cost = cost_of(question, units_of(model, question.prompt, by), null, method_of(method), n_tested)

    def part(description: str, before: int, tokens: int) -> Callable[[float], None]:
        tell = on_progress or (lambda description, done: None)
        return lambda done: tell(description, (before + done * tokens) / cost.total)

    asked = dict(answer=question.answer, rival=question.rival)
    units = prompt_attribution(
        model,
        question.prompt,
        question.text,
        by=by,
        method=method,
        null=null,
        on_progress=part("removing units of the prompt", 0, cost.units),
        **asked,  # type: ignore[arg-type]
    )
    n_null = null.n_for(len(units))
    testable = n_null >= enough_for(len(units))
    if not testable:
        warn(
            f"explain: with {n_null} unrelated units none of {len(units)} units can be significant: give coarser units, or a "
            f"null of {enough_for(len(units))} units"
        )
    ranked = units[units["p_adjusted"] <= SIGNIFICANT].sort_values("total_effect", ascending=False, key=abs)
    chosen = None if ranked.empty else int(ranked.index[0])
    unit = [] if chosen is None else [(int(units["start"][chosen]), int(units["stop"][chosen]))]
    everything = (int(begins_with_bos(model, question.prompt)), len(question.prompt))
    prompts = question.rows([[], [everything], *([unit] if unit else [])])
    first = logits_after(model, prompts, question.text)[:, 0]
    other = question.rival if question.rival is not None else _nearest(first[2 if unit else 0], question.answer)
    alone = first[1].argmax()[None].cpu()
    named = [question.answer, other, *([] if int(alone) in (int(question.answer[0]), int(other[0])) else [alone])]
    p = [_probabilities(question, prompts, first, tokens) for tokens in named]
    heads = positions = pd.DataFrame()
    if chosen is not None:
        heads = attribution_by_head(
            model,
            question.prompt,
            question.text,
            by=unit,
            null=replace(null, n_units=min(n_null, FEWEST)),
            n_tested=n_tested,
            on_progress=part("exchanging heads", cost.units, cost.heads),
            **asked,  # type: ignore[arg-type]
        )
        heads = heads[heads["unit"] == 0].reset_index(drop=True)
        part("exchanging positions", cost.units + cost.heads, cost.positions)(0.0)
        positions = attribution_by_position(model, question.prompt, question.text, by=unit, **asked)  # type: ignore[arg-type]
    behind = len(question.text)
    texts = [joined(token_texts(model, torch.cat([question.text, each]))[behind:]).strip() for each in named]
    with_and_without = [(each[0], each[2] if unit else None, each[1]) for each in p]
    of_answer, of_rival = (tuple(tokens.tolist()) for tokens in (question.answer, other))
    said = (texts[0], texts[1], with_and_without[0], with_and_without[1])
    unprompted = (texts[2], with_and_without[2]) if len(named) > 2 else (None, None)
    return Explained(*said, units, heads, positions, chosen, of_answer, of_rival, testable, *unprompted)


def _nearest(logits: Float[Tensor, " d_vocab"], answer: Int[Tensor, " answer_pos"]) -> Int[Tensor, "1"]:
    """The most probable first token that is not the answer's."""
    return logits.index_fill(0, answer[:1].to(logits.device), -torch.inf).argmax()[None].cpu()


def _probabilities(
    question: Question, prompts: Counterfactuals, first: Float[Tensor, "row d_vocab"], tokens: Int[Tensor, " answer_pos"]
) -> list[float]:
    """p(tokens) after each prompt; those of several tokens are read, that of one token is in the first logits."""
    if len(tokens) == 1:
        return first.double().softmax(dim=-1)[:, int(tokens)].tolist()
    asked = Question.of(question.model, question.prompt, question.text, tokens)
    return asked.scores(prompts).exp().tolist()
