"""Statements: interventions that were made, one row each, from which every sentence, page and file is written."""

from collections.abc import Iterable
from typing import Any

import torch

from kvlens import KVModel

from ..declaration import Columns
from ..texts import joined, stripped, token_texts
from .verdicts import Outcome, Outcomes

COLUMNS = Columns(
    about=("str", "``units``, ``heads`` or ``positions``: what the set consists of"),
    role=(
        "str",
        "``each``: one unit; ``breaking``: a set that loses the answer when it is exchanged (every single part that was run "
        "and does, then larger sets); ``keeping``: a set that keeps it alone; ``alone``: units that keep it alone, but not "
        "together with each other unit, or one part of a breaking set; ``together``: with one more unit; ``none``: nothing is "
        "kept; ``again``: a larger set than a breaking one, which keeps the answer",
    ),
    way=("int64", "number of the set that it is about, from 0"),
    removed=(
        "str",
        "units missing in the prompt that parts are exchanged with, such as ``2+5``; empty where units are removed",
    ),
    parts=(
        "str",
        "the set: units by number, heads such as ``0.1`` (``0.s1``: a shift state, ``0.c``: a convolution), positions, "
        "``shift_state``; joined by ``+``",
    ),
    others=("bool", "everything but the set is exchanged"),
    positions=("str", "``kept``: what follows removed tokens stays where it stood; ``closed``: it moves up"),
    smallest=("bool", "a breaking or keeping set of which all smaller sets were run, and none is one"),
    p_before=("float64", "probability of the answer with the whole prompt"),
    p_after=("float64", "under the intervention"),
    p_reference_before=("float64", "of the rival, or of the word that is first where the answer is not; NaN without one"),
    p_reference_after=("float64", "under the intervention"),
    says=("str", "what the model says instead, where the answer is not first; missing elsewhere"),
    p_says=("float64", "its probability"),
    verdict=("str", "``lost``, ``kept``, ``changed`` or ``gained`` (:mod:`~kvlens.analyses.attribution.verdicts`)"),
    at_bound=("bool", "within 1e-3 nats of where the verdict changes"),
)
SEPARATOR = "+"


def statement(
    outcomes: Outcomes,
    now: Outcome,
    about: str,
    role: str,
    parts: Iterable[object],
    *,
    others: bool = False,
    removed: Iterable[int] = (),
    way: int = 0,
    smallest: bool = False,
    positions: str = "kept",
) -> dict[str, Any]:
    """One row of `COLUMNS`."""
    whole, verdict = outcomes.whole, outcomes.verdict(now)
    return {
        "about": about,
        "role": role,
        "way": way,
        "removed": SEPARATOR.join(map(str, removed)),
        "parts": SEPARATOR.join(map(str, parts)),
        "others": others,
        "positions": positions,
        "smallest": smallest,
        "p_before": whole.p,
        "p_after": now.p,
        "p_reference_before": whole.p_reference,
        "p_reference_after": now.p_reference,
        "says": said(outcomes, now),
        "p_says": now.p_said,
        "verdict": verdict.name,
        "at_bound": verdict.at_bound,
    }


def said(outcomes: Outcomes, now: Outcome) -> str | None:
    """What the model says instead of the answer; None where that is first."""
    if now.said < 0:
        return None
    question = outcomes.question
    return text_of(question.model, question.text, [*question.answer[: int(now.said_at)].tolist(), int(now.said)])


def text_of(model: KVModel, text: torch.Tensor, tokens: list[int]) -> str:
    """Tokens as they read behind a text."""
    return stripped(joined(token_texts(model, torch.cat([text, torch.tensor(tokens, device=text.device)]))[len(text) :]))
