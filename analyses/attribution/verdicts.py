"""What an intervention does to an answer: lost, kept, or changed; and the statements of what was found.

A statement is a row of `STATEMENTS`, an intervention that was made. Every sentence, page and file is written from them.

With p the answer's probability with the whole prompt and p' under the intervention,

    lost:     p' < p / 2, or the answer is overtaken by a word against which its log-odds fell by at least ln 4
    kept:     the answer is still first, and p' >= p / 2
    changed:  neither

(Without the ln 4, a near-tie decides: unrelated text "loses" an answer that was hardly first.) The probability of an answer of
several tokens is their product, it is first where each of its tokens is, and it is overtaken at the first token that is not.
Against a *reference*, which is a rival that was given, or the word that is first where the answer is not, p is the answer's
probability among the two, and "first" means before the reference. An answer that is behind its reference with the whole prompt
cannot be overtaken; it is *gained* where p' > 2 p, or where it gets ahead and its log-odds rose by at least ln 4.

Within `TIE` nats of a bound a verdict is "at the bound": rounding decides it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvlens import KVModel
from kvlens.texts import joined, stripped, token_texts

from ..declaration import Columns
from .answers import Question, Read
from .kept import recalled

LOST, KEPT, CHANGED, GAINED = "lost", "kept", "changed", "gained"
HALF, OVERTAKEN, TIE = math.log(2), math.log(4), 1e-3
"""Nats: the fall that loses an answer, the fall of the log-odds that counts as overtaken, and the width of a bound."""


class Outcome(NamedTuple):
    """What the model says under one intervention; log-probabilities in nats.

    Attributes:
        log_p: of the answer.
        log_p_reference: of the reference; NaN without one.
        lead: how far the answer is above the next word, at the token where this is least.
        overtaken: the largest x such that, at the first token of the answer that is not first, some word is x above it and its
            log-odds against that word fell by ln 4 + x; negative where there is no such word.
        said: the most probable word there, where the answer is not first; -1 elsewhere.
        said_at: number of that token of the answer.
        log_p_said: of that word, behind the tokens of the answer that stand before it.
    """

    log_p: float
    log_p_reference: float
    lead: float
    overtaken: float
    said: float
    said_at: float
    log_p_said: float

    @property
    def p(self) -> float:
        """Of the answer."""
        return math.exp(self.log_p)

    @property
    def p_reference(self) -> float:
        """Of the reference; NaN without one."""
        return math.exp(self.log_p_reference)

    @property
    def p_said(self) -> float:
        """Of the word that is said instead; NaN where the answer is first."""
        return math.exp(self.log_p_said) if self.said >= 0 else math.nan


class Verdict(NamedTuple):
    """What became of an answer, and whether it is within `TIE` of a bound."""

    name: str
    at_bound: bool


def verdict_of(whole: Outcome, now: Outcome, half: float = HALF) -> Verdict:
    """What became of the answer, as the module defines it."""
    below: float = -math.inf
    if math.isnan(whole.log_p_reference):
        fall, ahead, overtaken = whole.log_p - now.log_p, now.lead, now.overtaken
    else:
        odds, odds_now = whole.log_p - whole.log_p_reference, now.log_p - now.log_p_reference
        fall = _log_share(odds) - _log_share(odds_now)
        ahead, overtaken = odds_now, min(-odds_now, odds - odds_now - OVERTAKEN)
        if odds <= 0:
            below = max(-fall - HALF, min(odds_now, odds_now - odds - OVERTAKEN))
            ahead, overtaken = math.inf, -math.inf
    lost, kept = max(fall - half, overtaken), min(ahead, half - fall)
    if below > 0 or abs(below) <= TIE:
        return Verdict(GAINED if below > 0 else KEPT, abs(below) <= TIE)
    if lost > 0:
        return Verdict(LOST, lost <= TIE)
    return Verdict(KEPT if kept >= 0 else CHANGED, -lost <= TIE or abs(kept) <= TIE)


def _log_share(odds: float) -> float:
    """log sigmoid."""
    return -math.log1p(math.exp(-odds)) if odds > 0 else odds - math.log1p(math.exp(odds))


@dataclass
class Outcomes:
    """Reads outcomes of interventions on a question's prompt.

    Args:
        question: what is asked.
    """

    question: Question

    @cached_property
    def _whole_log_p(self) -> Float[Tensor, "answer_pos d_vocab"]:
        """With the whole prompt."""
        answer = self.question.answer
        return self._log_p(self.question.reads_after(self.question.rows([[]])), answer)[0]

    @cached_property
    def reference(self) -> Tensor | None:
        """Token ids of the rival, or of the word that is first where the answer is not; None where the answer is first."""
        if self.question.rival is not None:
            return self.question.rival
        answer = self.question.answer.cpu()
        wrong = (self._whole_log_p.argmax(dim=-1) != answer).nonzero()[:, 0]
        if not len(wrong):
            return None
        at = int(wrong[0])
        return torch.cat([answer[:at], self._whole_log_p[at].argmax()[None]])

    @cached_property
    def whole(self) -> Outcome:
        """With the whole prompt."""
        return Outcome(*self._figures(self._whole_log_p[None], None)[0].tolist())

    def under(self, read: Read) -> list[Outcome]:
        """Of each row of a reading, one intervention each."""
        assert self.whole is not None  # read first, whether or not this reading is recalled
        found = recalled(lambda: self._figures(self._log_p(read, self.question.answer), read), self.question.account)
        return [Outcome(*row) for row in found.tolist()]

    def verdict(self, outcome: Outcome) -> Verdict:
        """Against the whole prompt."""
        return verdict_of(self.whole, outcome)

    def _log_p(self, read: Read, answer: Int[Tensor, " answer_pos"]) -> Float[Tensor, "row answer_pos d_vocab"]:
        """Of every word at each of the answer's tokens, in float64."""
        return read(torch.cat([self.question.text, answer[:-1]]), len(answer)).double().log_softmax(dim=-1).cpu()

    def _figures(self, log_p: Float[Tensor, "row answer_pos d_vocab"], read: Read | None) -> Float[Tensor, "row field"]:
        """The fields of `Outcome`."""
        answer, rows = self.question.answer.cpu(), torch.arange(len(log_p))
        which = answer[None, :, None].expand(len(log_p), -1, -1)
        own = log_p.gather(-1, which)  # [row, answer_pos, 1]
        whole = self._whole_log_p[None]
        margin = (log_p - own).scatter(-1, which, -torch.inf)
        before = whole - whole.gather(-1, which[:1])
        at = (margin.amax(dim=-1) > 0).double().argmax(dim=-1)  # 0 where every token is first
        first = margin[rows, at]
        overtaken = torch.minimum(first, first - before[0, at] - OVERTAKEN).amax(dim=-1)
        lead, best = -margin.amax(dim=(-1, -2)), first.argmax(dim=-1)
        up_to = own[..., 0].cumsum(dim=-1)
        log_p_said = up_to[rows, at] - own[rows, at, 0] + log_p[rows, at, best]
        said = torch.where(lead < 0, best, -1).double()
        reference = self._of_reference(log_p, up_to, read)
        return torch.stack([up_to[:, -1], reference, lead, overtaken, said, at.double(), log_p_said], dim=1)

    def _of_reference(
        self, log_p: Float[Tensor, "row answer_pos d_vocab"], up_to: Float[Tensor, "row answer_pos"], read: Read | None
    ) -> Float[Tensor, " row"]:
        """Log-probability of the reference, from the answer's reading where its tokens are read there."""
        reference, answer = self.reference, self.question.answer.cpu()
        if reference is None:
            return torch.full((len(log_p),), math.nan, dtype=torch.float64)
        reference = reference.cpu()
        n = len(reference) - 1
        if n < len(answer) and torch.equal(reference[:-1], answer[:n]):
            return log_p[:, n, reference[-1]] + (up_to[:, n - 1] if n else 0.0)
        read = read or self.question.reads_after(self.question.rows([[]]))
        found = self._log_p(read, reference)
        return found.gather(-1, reference[None, :, None].expand(len(found), -1, -1)).sum(dim=(1, 2))


STATEMENTS = Columns(
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
    """One row of `STATEMENTS`."""
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


def text_of(model: KVModel, text: Tensor, tokens: list[int]) -> str:
    """Tokens as they read behind a text."""
    return stripped(joined(token_texts(model, torch.cat([text, torch.tensor(tokens, device=text.device)]))[len(text) :]))
