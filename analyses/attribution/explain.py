"""One question, one answer: which units of the prompt it rests on, through which heads, read at which positions.

What is found are *statements* (:mod:`~kvlens.analyses.attribution.verdicts`): each is an intervention that was made, with
what the model says then. A *breaking set* loses the answer when it is exchanged, a *keeping set* keeps it alone. Units are
removed; heads and positions are exchanged for those of the prompt without the first breaking set of units.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool
from torch import Tensor

from kvlens import KVModel, convert_prompt
from kvlens.checks import checked
from kvlens.texts import token_texts

from ..bias.parts import HEAD
from ..declaration import PROMPT_OR_CHAT, Columns, analysis
from ..sequences import PromptTokens, TextTokens
from .answers import Answer, Positions, Question, Read, Rival
from .by_head import HeadExchange
from .by_position import PositionExchange
from .cost import CAP, SHARES
from .kept import Keep, keeping
from .null import Null
from .order import head_orders
from .prompt import units_table
from .search import Asked, CapReached, FoundSet, Runs, sets_of
from .terms import ALL, Terms
from .units import BY, Spans, positions_of
from .verdicts import KEPT, LOST, STATEMENTS, Outcomes, statement, text_of

SHIFT_STATE = "shift_state"
MOST_ALONE = 4
"""Parts of a breaking set that are also kept alone."""

RUN = {
    "p_exchanged": ("float64", "probability of the answer with this one exchanged; NaN where it was not run"),
    "verdict_exchanged": ("str", "what became of the answer; missing where it was not run"),
    "p_alone": ("float64", "probability of the answer with all others exchanged; NaN where it was not run"),
    "verdict_alone": ("str", "what became of the answer; missing where it was not run"),
    "breaking": ("bool", "in a breaking set"),
    "keeping": ("bool", "in a keeping set"),
}
HEAD_COLUMNS = Columns(
    layer=("int64", "from 0"),
    head=("int64", f"{HEAD}; key-value head of a shift state; -1: a convolution"),
    part=("str", "``head``, ``shift_state`` or ``convolution``"),
    code=("str", "as statements name it, such as ``0.1``"),
    **RUN,
)
POSITION_COLUMNS = Columns(
    prompt_position=("int64", "from 0; -1: the shift state"),
    token=("str", "at the position; missing for the shift state"),
    code=("str", f"as statements name it: the position, or ``{SHIFT_STATE}``"),
    **RUN,
    in_unit=("bool", "whether the position is one of the removed units'"),
)


@dataclass(frozen=True)
class Explained:
    """What :func:`explain` found.

    Attributes:
        answer, rival: as text. Where no rival is given, it is the most probable other first token without the units of
            ``cause`` (with the prompt, where there are none).
        p_answer, p_rival: their probabilities with the whole prompt, without the units of ``cause`` (None where there are
            none), and without the prompt: after BOS alone, the text in its place.
        statements: what was found, a row for each intervention that was made, with the columns of
            :mod:`kvlens.analyses.attribution.verdicts`.
        units: effects of all units, as `prompt_attribution` returns them.
        heads, positions: of the units of ``cause``: what was run of single heads and positions (`HEAD_COLUMNS`,
            `POSITION_COLUMNS`); empty where there are none.
        reference: what the answer is measured against: the rival, or the word that is first where the answer is not, as text;
            None where the answer is first.
        cause: the first breaking set of units, by number; empty where none was found.
        searched: of ``units``, ``heads`` and ``positions`` those whose sets were searched to the end, before the cap.
        answer_tokens, rival_tokens: the two answers as token ids.
        rival_given: whether effects are on how far the answer lies above the rival; otherwise they are on the answer alone.
        unprompted: the most probable first token without the prompt, as text; None where it is that of the answer or rival.
        p_unprompted: its probabilities, likewise.
        unrelated: (k, n): k of n unrelated units in the place of the unit with the largest effect did as much; None where no
            null was asked for.
        n_passes: passes over prompt and text that would have read as many tokens as this did, the null left out.
    """

    answer: str
    rival: str
    p_answer: tuple[float, float | None, float]
    p_rival: tuple[float, float | None, float]
    statements: pd.DataFrame
    units: pd.DataFrame
    heads: pd.DataFrame
    positions: pd.DataFrame
    reference: str | None
    cause: tuple[int, ...]
    searched: frozenset[str]
    answer_tokens: tuple[int, ...] = ()
    rival_tokens: tuple[int, ...] = ()
    rival_given: bool = False
    unprompted: str | None = None
    p_unprompted: tuple[float, float | None, float] | None = None
    unrelated: tuple[int, int] | None = None
    n_passes: float = 0.0

    @property
    def score(self) -> str:
        """What effects are differences of, in words."""
        return f"log p({self.answer!r})" + (f" - log p({self.rival!r})" if self.rival_given else "")

    def sets(self, about: str, role: str) -> list[list[str]]:
        """The sets of one kind, as codes."""
        rows = self.statements[(self.statements["about"] == about) & (self.statements["role"] == role)]
        return [parts.split("+") for parts in rows["parts"]]


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
    null: Null | None = None,
    keep: Keep = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Explained:
    """Explain an answer: the smallest sets of units, heads and positions that lose it, and those that keep it alone.

    It reads at most units + 2 + `kvlens.analyses.attribution.cost.CAP` times as many tokens as prompt and text have. A search
    that would read more ends there, and ``searched`` says so.

    Args:
        model, prompt, text, by, answer, rival: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`. Without a
            rival, effects are those on the answer alone.
        null: also puts unrelated units in the place of the unit with the largest effect, and counts how many do as much; None
            leaves this out. It chooses no words.
        keep: a file in which scores are kept as they are measured, and from which the same explanation resumes after an
            interruption (:mod:`kvlens.analyses.attribution.kept`). It stays until you delete it. The model may have no hooks.
        on_progress: called with a description and the fraction done, in 0..1.

    Raises:
        KVLensError: as :func:`kvlens.analyses.attribution.prompt.prompt_attribution`; a file to keep scores in that is
            damaged, has those of another explanation, or is in use by another process; hooks on a model whose scores are kept.
    """
    question = Question.of(model, prompt, text, answer, rival)
    what = dict(by=by, answer=question.answer, rival=question.rival, null=null)
    with keeping(keep, model, prompt=question.prompt, text=question.text, **what):
        return _Explaining(question, by, on_progress or (lambda description, done: None)).explained(null)


@dataclass
class _Explaining:
    """The steps of one explanation, and the statements so far."""

    question: Question
    by: str | Spans
    tell: Callable[[str, float], None]
    rows: list[dict[str, Any]] = field(default_factory=list)
    searched: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.outcomes = Outcomes(self.question)
        self.units = self.question.units(self.by)
        self.own = positions_of(self.units, len(self.question.prompt))
        self.a_pass = self.question.account.n_tokens_per_pass
        self.start = self.question.account.n_tokens
        self.a_reading = len(self.question.text) + len(self.question.answer) - 1

    def explained(self, null: Null | None) -> Explained:
        question = self.question
        cause = self._units()
        table = self._units_table()
        heads = positions = pd.DataFrame()
        if cause:
            deleted = question.rows(self.own[list(cause)].any(dim=0)[None])
            read, other = Terms.of_prompt(question.model, question.prompt), convert_prompt(question.model, deleted)
            question.account.count(2 * len(question.prompt))
            heads = self._heads(HeadExchange(question, read.bias, other), cause)
            positions = self._positions(PositionExchange(question, read, deleted), cause)
        return self._found(cause, table, heads, positions, null)

    def _left(self, step: int, per_row: int) -> int:
        """Rows of so many tokens for which this step still has room."""
        several = [tokens for tokens in (self.question.answer, self.question.rival) if tokens is not None and len(tokens) > 1]
        at_end = 3 * (1 + len(several)) + 1  # the probabilities that are shown
        allowed = (len(self.units) + 2 + CAP * SHARES[step] - at_end) * self.a_pass
        return max(0, int(allowed - (self.question.account.n_tokens - self.start)) // per_row)

    def _add(self, now: Any, about: str, role: str, parts: Iterable[object], **named: Any) -> None:
        self.rows.append(statement(self.outcomes, now, about, role, parts, **named))

    # --- units -------------------------------------------------------------------------------------------------------

    def _read_units(self, deleted: Bool[Tensor, "row unit"], positions: Positions = "kept") -> Read:
        question = replace(self.question, positions=positions)
        return question.reads_after(question.rows((deleted.double() @ self.own.double()) > 0))

    def _units(self) -> tuple[int, ...]:
        """Each unit, the breaking and keeping sets; returns the first breaking set."""
        n = len(self.units)
        self.tell("removing units of the prompt", 0.0)
        runs = self.unit_runs = Runs(self.outcomes, n, self._read_units, n + 1)
        self.each = runs.of([[unit] for unit in range(n)])
        nothing = runs.of([range(n)])[0]
        for unit, now in enumerate(self.each):
            self._add(now, "units", "each", [unit])
        self._add(nothing, "units", "none", [], others=True)
        runs.left = self._left(0, self.a_pass)
        self.tell("searching sets of units", 0.2)
        order = sorted(range(n), key=lambda unit: self.each[unit].log_p)
        breaking, ended = [FoundSet((unit,), True) for unit in order if runs.verdict([unit]).name == LOST], True
        if 2 * n <= runs.left and n > 1:
            alone = runs.of([_all_but(n, unit) for unit in range(n)])
            order = sorted(range(n), key=lambda unit: -alone[unit].log_p)
        if not breaking:
            breaking, ended = sets_of(runs, order, keeping=False)
        for way, each in enumerate(breaking):
            self._set(runs, "units", "breaking", each, way)
            self._again(runs, each.parts, way)
        self._closed([each.parts for each in breaking[:2]])
        if runs.verdict(range(n)).name != KEPT and n > 1:
            keeping_sets, to_end = sets_of(runs, order, keeping=True)
            ended = ended and to_end
            for way, each in enumerate(keeping_sets):
                ended = self._keeping_units(runs, each, way) and ended
        if ended:
            self.searched.add("units")
        return breaking[0].parts if breaking else ()

    def _keeping_units(self, runs: Runs, each: FoundSet, way: int) -> bool:
        """A keeping set of units is one only if it keeps the answer with each other unit too; returns whether that was run."""
        others = [unit for unit in range(runs.n_parts) if unit not in each.parts]
        asked = Asked(runs, True, frozenset(others))
        together = [(*each.parts, unit) for unit in others]
        try:
            kept = asked.holds(together)
        except CapReached:
            self._set(runs, "units", "alone", each, way)
            return False
        self._set(runs, "units", "keeping" if all(kept) else "alone", each, way)
        losing = [parts for parts, holds in zip(together, kept, strict=True) if not holds]
        if losing:
            worst = min(losing, key=asked.effect)
            now = runs.found[asked.exchanged(worst)]
            self._add(now, "units", "together", [*each.parts, worst[-1]], others=True, way=way)
        return True

    def _again(self, runs: Runs, parts: Sequence[int], way: int) -> None:
        """The smallest larger set that was run and keeps the answer."""
        larger = [
            each for each in runs.found if each > set(parts) and len(each) < runs.n_parts and runs.verdict(each).name == KEPT
        ]
        if larger:
            each = min(larger, key=lambda each: (len(each), sorted(each)))
            self._add(runs.found[each], "units", "again", sorted(each), way=way)

    def _closed(self, sets: list[tuple[int, ...]]) -> None:
        """The same units removed with what follows moved up."""
        everything = any(len(each) == len(self.units) for each in sets)
        if not sets or (everything and not bool(self.question.always_there.any())):
            return
        rows = torch.zeros(len(sets), len(self.units), dtype=torch.bool)
        for row, parts in enumerate(sets):
            rows[row, list(parts)] = True
        for way, now in enumerate(self.outcomes.under(self._read_units(rows, "closed"))):
            self._add(now, "units", "breaking", sets[way], way=way, positions="closed")

    def _set(self, runs: Runs, about: str, role: str, found: FoundSet, way: int, **named: Any) -> None:
        others, codes = role != "breaking", named.pop("codes", range(runs.n_parts))
        now = runs.found[Asked(runs, others, frozenset()).exchanged(found.parts)]
        parts = [codes[part] for part in found.parts]
        self._add(now, about, role, parts, others=others, way=way, smallest=found.smallest, **named)

    def _units_table(self) -> pd.DataFrame:
        whole, nothing = self.outcomes.whole, self.unit_runs.found[frozenset(range(len(self.units)))]
        against = self.question.rival is not None

        def score(now: Any) -> float:
            return now.log_p - now.log_p_reference if against else now.log_p

        effects = score(whole) - torch.tensor([score(now) for now in self.each], dtype=torch.float64)
        p = torch.full_like(effects, math.nan)
        return units_table(self.question, self.units, effects, score(whole) - score(nothing), p)

    # --- heads and positions -----------------------------------------------------------------------------------------

    def _heads(self, exchange: HeadExchange, cause: tuple[int, ...]) -> pd.DataFrame:
        self.tell("exchanging heads", 0.45)
        n, orders = len(exchange.parts), head_orders(self.outcomes, exchange)
        runs = Runs(self.outcomes, n, exchange.read, self._left(1, self.a_reading), exchange.at_once)
        if 4 * n <= runs.left:
            runs.of([*([part] for part in range(n)), *(_all_but(n, part) for part in range(n))])
        else:
            runs.of([part] for part in orders[0][: runs.left // 8])
        codes = [part.code for part in exchange.parts]
        in_sets = self._sets(runs, "heads", orders, codes, cause)
        return HEAD_COLUMNS.frame(
            {
                "layer": [part.layer for part in exchange.parts],
                "head": [part.head for part in exchange.parts],
                "part": [part.kind for part in exchange.parts],
                "code": codes,
                **_run(runs, in_sets),
            }
        )

    def _positions(self, exchange: PositionExchange, cause: tuple[int, ...]) -> pd.DataFrame:
        self.tell("exchanging positions", 0.75)
        n, first = len(exchange.parts), min(self.units[unit].start for unit in cause)
        runs = Runs(self.outcomes, n, exchange.read, self._left(2, self.a_reading), exchange.at_once)
        changed = [part for part in range(n) if part >= first]  # what precedes the units is the same in both prompts
        at_once = max(1, math.ceil(4 * len(changed) / max(1, runs.left)))
        blocks = [changed[start : start + at_once] for start in range(0, len(changed), at_once)]
        orders: list[list[int]] = [changed, changed]
        if 2 * len(blocks) <= runs.left:
            exchanged, alone = runs.of(blocks), runs.of([sorted(set(range(n)) - set(block)) for block in blocks])
            by_effect = (
                sorted(range(len(blocks)), key=lambda i: exchanged[i].log_p),
                sorted(range(len(blocks)), key=lambda i: -alone[i].log_p),
            )
            orders = [[part for i in order for part in blocks[i]] for order in by_effect]
        codes = [SHIFT_STATE if part == ALL else str(part) for part in exchange.parts]
        in_sets = self._sets(runs, "positions", orders, codes, cause)
        tokens = token_texts(self.question.model, self.question.prompt)
        deleted = self.own[list(cause)].any(dim=0)
        return POSITION_COLUMNS.frame(
            {
                "prompt_position": exchange.parts,
                "token": [None if part == ALL else tokens[part] for part in exchange.parts],
                "code": codes,
                **_run(runs, in_sets),
                "in_unit": [part != ALL and bool(deleted[part]) for part in exchange.parts],
            }
        )

    def _sets(
        self, runs: Runs, about: str, orders: Sequence[list[int]], codes: list[str], cause: tuple[int, ...]
    ) -> tuple[set[int], set[int]]:
        """Search both kinds of sets and state them; returns the parts of each kind."""
        named: dict[str, Any] = dict(removed=cause, codes=codes)
        members, ended = [], True
        for keeping_sets, order in zip((False, True), orders, strict=True):
            found, to_end = sets_of(runs, order, keeping=keeping_sets)
            ended = ended and to_end
            if not keeping_sets:  # all that were run and lose it alone, not just disjoint sets
                single = sorted(
                    (x for x in runs.found if len(x) == 1 and runs.verdict(x).name == LOST), key=lambda x: runs.found[x].log_p
                )
                found = [*(FoundSet(tuple(x), True) for x in single), *(x for x in found if len(x.parts) > 1)]
            for way, each in enumerate(found):
                self._set(runs, about, "keeping" if keeping_sets else "breaking", each, way, **named)
                if not keeping_sets and 1 < len(each.parts) <= MOST_ALONE and len(each.parts) <= runs.left:
                    runs.of([_all_but(runs.n_parts, part) for part in each.parts])
                    for part in each.parts:
                        self._set(runs, about, "alone", FoundSet((part,), False), way, **named)
            members.append({part for each in found for part in each.parts})
        if ended:
            self.searched.add(about)
        return members[0], members[1]

    # --- the result --------------------------------------------------------------------------------------------------

    def _found(
        self, cause: tuple[int, ...], units: pd.DataFrame, heads: pd.DataFrame, positions: pd.DataFrame, null: Null | None
    ) -> Explained:
        question = self.question
        self.tell("reading probabilities", 0.97)
        deleted = torch.zeros(3 if cause else 2, len(question.prompt), dtype=torch.bool)
        deleted[1] = ~question.always_there
        if cause:
            deleted[2] = self.own[list(cause)].any(dim=0)
        prompts = question.rows(deleted)
        first = question.reads_after(prompts)(question.text, 1)[:, 0]
        other = question.rival if question.rival is not None else _nearest(first[2 if cause else 0], question.answer)
        alone = first[1].argmax()[None].cpu()
        named = [question.answer, other, *([] if int(alone) in (int(question.answer[0]), int(other[0])) else [alone])]
        p = [_probabilities(question, prompts, first, tokens) for tokens in named]
        texts = [text_of(question.model, question.text, tokens.tolist()) for tokens in named]
        each = [(x[0], x[2] if cause else None, x[1]) for x in p]
        n_passes, reference = question.account.n_passes, self.outcomes.reference
        return Explained(
            texts[0],
            texts[1],
            each[0],
            each[1],
            STATEMENTS.frame({name: [row[name] for row in self.rows] for name in STATEMENTS.dtypes}),
            units,
            heads,
            positions,
            None if reference is None else text_of(question.model, question.text, reference.tolist()),
            cause,
            frozenset(self.searched),
            tuple(question.answer.tolist()),
            tuple(other.tolist()),
            rival_given=question.rival is not None,
            unprompted=texts[2] if len(named) > 2 else None,
            p_unprompted=each[2] if len(named) > 2 else None,
            unrelated=None if null is None else self._unrelated(null, units),
            n_passes=n_passes,
        )

    def _unrelated(self, null: Null, units: pd.DataFrame) -> tuple[int, int]:
        """How many unrelated units, in the place of the unit with the largest effect, have an effect as large."""
        self.tell("comparing with unrelated texts", 0.98)
        largest = int(units["total_effect"].abs().idxmax())
        effects = null.effects(self.question, [self.units[largest]])
        return int((effects.abs() >= abs(units["total_effect"][largest])).sum()), len(effects)


@analysis(
    STATEMENTS,
    "which sets of sentences, heads and positions lose or keep the answer: interventions that were made",
    inputs={"prompt": PROMPT_OR_CHAT},
    options={"by": BY},
)
@checked
def explanation(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    answer: Answer = None,
    rival: Rival = None,
    by: str | Spans = "sentence",
) -> pd.DataFrame:
    """The statements of :func:`explain`, for many prompts.

    Args:
        model, prompt, text, answer, rival, by: as :func:`explain`.

    Returns:
        One row per intervention:

        {columns}
    """
    return explain(model, prompt, text, answer=answer, rival=rival, by=by).statements


def _all_but(n: int, part: int) -> list[int]:
    return [other for other in range(n) if other != part]


def _run(runs: Runs, in_sets: tuple[set[int], set[int]]) -> dict[str, Any]:
    """The columns `RUN`."""
    n = runs.n_parts
    exchanged = [runs.found.get(frozenset([part])) for part in range(n)]
    alone = [runs.found.get(frozenset(_all_but(n, part))) for part in range(n)]
    columns: dict[str, Any] = {}
    for name, found in (("exchanged", exchanged), ("alone", alone)):
        columns[f"p_{name}"] = [math.nan if now is None else now.p for now in found]
        columns[f"verdict_{name}"] = [None if now is None else runs.outcomes.verdict(now).name for now in found]
    return {
        **columns,
        "breaking": [part in in_sets[0] for part in range(n)],
        "keeping": [part in in_sets[1] for part in range(n)],
    }


def _nearest(logits: Tensor, answer: Tensor) -> Tensor:
    """The most probable first token that is not the answer's."""
    return logits.index_fill(0, answer[:1].to(logits.device), -torch.inf).argmax()[None].cpu()


def _probabilities(question: Question, prompts: Any, first: Tensor, tokens: Tensor) -> list[float]:
    """p(tokens) after each prompt; those of several tokens are read, that of one token is in the first logits."""
    if len(tokens) == 1:
        return first.double().softmax(dim=-1)[:, int(tokens)].tolist()
    asked = Question.of(question.model, question.prompt, question.text, tokens)
    return asked.scores(prompts).exp().tolist()
