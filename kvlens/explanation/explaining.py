"""An explanation in the making: what the steps share, and what the searches for units, layers and positions add to."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvlens import KVModel
from kvlens.arguments import Positions
from kvlens.explanation.claims import (
    GONE,
    SAID,
    Claim,
    Verdict,
    claim_of,
    claims_of,
    is_content,
    needs_account,
    normal,
    places_of_words,
    verdict,
    words_in,
)
from kvlens.explanation.runs import ExplanationProgress, Outcome, Runs
from kvlens.texts import Response, Word
from kvlens.units import Layout, Unit, positions_of

SEPARATOR = "+"
"""What stands between the members of a set."""
Place = tuple[str, int] | None
"""What a position belongs to: a message or document, the question, or what follows it; None for marks in front."""
QUESTION_PLACE = ("question", -1)


class DocumentSpan(NamedTuple):
    """Characters of a document: what a unit is of.

    Attributes:
        document: its name.
        start, stop: without white space around it.
    """

    document: str
    start: int
    stop: int


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt, read and cut.

    Attributes:
        tokens: [pos].
        units: what is removed.
        unit_places: the characters of each in its document.
        documents: the documents and messages by name.
        places: what each position belongs to.
        always_there: what is in no unit, in words.
        question: a chat's question, and the text that follows the prompt.
        n_prompt: how many tokens come before what the template writes for the answer, or before the text.
        layout: the prompt before it was cut.
        names: of documents; units where the response has a word of them.
    """

    tokens: Tensor
    units: list[Unit]
    unit_places: list[DocumentSpan]
    documents: dict[str, str]
    places: list[Place]
    always_there: tuple[str, ...]
    question: str
    n_prompt: int
    layout: Layout
    names: list[Unit]


@dataclass(frozen=True)
class StatementRow:
    """What one run says about one claim: a row of `STATEMENT_COLUMNS`, which say what each attribute is."""

    claim: int
    about: str
    role: str
    parts: str
    others: bool
    gap: Positions
    removed: str
    verdict: str
    kept_words: str
    nats: float
    p_before: float
    p_after: float
    says: str | None


@dataclass
class Explaining:
    """An explanation in the making.

    Attributes:
        model, depth, budget: as of :func:`kvlens.explain`.
        read: the prompt.
        is_continuation: whether the response continues a text and is no reply to a chat.
        tell, say: its ``on_progress`` and ``on_found``. An exception that they raise stops a run.
        hear: called with the response so far, token by token; None for nobody, for whom it is not made into text either.
        wanted: its ``about``.
        expected: the number of the claim that will head the page, unless words that depend on no unit do.
        rows: the statements so far.
        left_out: what the budget left no room for.
        asked: the score of each claim that may head the page, by the tokens at which it starts and stops.
        response, cut_after: what the model answers, and where it is cut off, as `Findings`.
        log_p: the log-probability of each of its tokens, [pos].
        nothing: what it says without any unit.
        untold: what it says without all units that have a word without a source; None where none has one, or all have.
        question: content words of what is in no unit.
        claims, is_whole: the response's claims, and whether that is the whole response as one.
    """

    model: KVModel
    read: ReadPrompt
    is_continuation: bool = False
    depth: str = "units"
    budget: int | None = None
    tell: Callable[[str, float], None] = lambda what, done: None
    say: Callable[[str], None] = lambda line: None
    hear: Callable[[str], None] | None = None
    wanted: str | None = None
    expected: int = 0
    rows: list[StatementRow] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    asked: dict[tuple[int, int], float] = field(default_factory=dict)
    response: Response = field(init=False)
    cut_after: int | None = field(init=False)
    log_p: Float[Tensor, " pos"] = field(init=False)
    nothing: Outcome = field(init=False)
    untold: Outcome | None = None
    question: frozenset[str] = field(init=False)
    claims: list[Claim] = field(init=False)
    is_whole: bool = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = self.read.tokens
        self.work = ExplanationProgress(self.tell)
        self.runs = Runs(
            self.model,
            self.prompt[:-1],
            self.prompt[-1:],
            torch.tensor([place == QUESTION_PLACE for place in self.read.places[:-1]], device=self.prompt.device),
            self.is_continuation,
            self.work.count,
        )

    @property
    def units(self) -> list[Unit]:
        """What is removed."""
        return self.read.units

    @property
    def own(self) -> Bool[Tensor, "unit pos"]:
        """True at the positions of each unit."""
        return positions_of(self.units, len(self.prompt))

    def room(self, what: str, n_tokens: int) -> bool:
        """Whether the budget has room for a step; what it has none for is left out."""
        if self.budget is None or self.runs.n_tokens + n_tokens <= self.budget:
            return True
        if what not in self.left_out:
            self.left_out.append(what)
        return False

    # --- claims -------------------------------------------------------------------------------------------------------

    def find_claims(self, nothing: Outcome) -> None:
        """Find the words of the response that fall without all units; the whole response where none does."""
        falls = self.of_words(nothing.falls)
        self.question = self._question_words()
        self.claims = claims_of(self.response, falls, self.question)
        self.is_whole = not self.claims
        if self.is_whole:
            self.claims = [claim_of(self.response, 0, len(falls), sum(falls), self.question)]

    def _question_words(self) -> frozenset[str]:
        """Content words of what is in no unit."""
        in_unit = self.own.any(dim=0)
        kept = (word for word in self.prompt_words if not bool(in_unit[word.start : word.stop].any()))
        return frozenset(normal(word.text) for word in kept if is_content(word))

    @cached_property
    def prompt_words(self) -> tuple[Word, ...]:
        """The words of the prompt, with the text that follows it."""
        return Response.of(self.model, self.prompt[:0], self.prompt).words

    def of_words(self, falls: Float[Tensor, " pos"]) -> list[float]:
        return [float(falls[word.start : word.stop].sum()) for word in self.response.words]

    def words_lost(self) -> list[Claim]:
        """Words in no claim that need an account, and are lost without all units; each as a claim."""
        return [word for word in self._words_in_none(self.claims) if self.of(word, self.nothing).name in GONE]

    def words_without_source(self) -> list[Claim]:
        """Words that need an account, not said without all units, and in no claim that fewer lose; each as a claim."""
        sourced = {row.claim for row in self.rows if (row.about, row.role, row.gap) == ("units", "breaking", "kept")}
        words = self._words_in_none([claim for number, claim in enumerate(self.claims) if number in sourced])
        return [word for word in words if self.of(word, self.nothing).name not in SAID]

    def _words_in_none(self, claims: Iterable[Claim]) -> list[Claim]:
        """Words in none of some claims that need an account and are not the question's; each as a claim."""
        words, places, claims = self.response.words, places_of_words(self.response), list(claims)
        return [
            claim_of(self.response, i, i + 1, nats, self.question)
            for i, nats in enumerate(self.of_words(self.nothing.falls))
            if needs_account(words[i], self.response.text, *places[i])
            and normal(words[i].text) not in self.question
            and not any(claim.start <= words[i].start < claim.stop for claim in claims)
        ]

    @cached_property
    def words_of_units(self) -> list[frozenset[str]]:
        """The words of each unit, as claims are compared."""
        return [words_in(unit.text) for unit in self.units]

    def is_told(self, word: Claim) -> bool:
        """Whether a unit has a word of the response."""
        return any(not words.isdisjoint(word.words) for words in self.words_of_units)

    def with_claim(self, claim: Claim) -> int:
        """The number of a claim that is added to the others."""
        self.claims.append(claim)
        self.add(len(self.claims) - 1, self.nothing, "units", "none", range(len(self.units)))
        return len(self.claims) - 1

    # --- statements ---------------------------------------------------------------------------------------------------

    def lost(self, number: int, now: Outcome) -> bool:
        return self.of(self.claims[number], now).name in GONE

    def said(self, number: int, now: Outcome) -> bool:
        return self.of(self.claims[number], now).name in SAID

    def fall(self, claim: Claim, now: Outcome) -> float:
        return float(now.falls[claim.start : claim.stop].sum())

    def of(self, claim: Claim, now: Outcome) -> Verdict:
        return verdict(claim, now.falls, now.differs, now.firm, now.words)

    def add(
        self,
        number: int,
        now: Outcome,
        kind: str,
        role: str,
        parts: Iterable[object],
        *,
        others: bool = False,
        gap: Positions = "kept",
        removed: str = "",
    ) -> None:
        """Add the statement of a run on a claim."""
        claim = self.claims[number]
        found, before = self.of(claim, now), float(self.log_p[claim.start : claim.stop].sum())
        self.rows.append(
            StatementRow(
                number,
                kind,
                role,
                SEPARATOR.join(map(str, parts)),
                others,
                gap,
                removed,
                found.name,
                " ".join(found.kept),
                found.fall,
                math.exp(before),
                math.exp(before - found.fall),
                now.text,
            )
        )
