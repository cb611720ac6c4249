"""What an explanation found, as tables: the response, its claims, the units, and every run as a statement (step 8)."""

import json
import math
from dataclasses import dataclass
from typing import TypeVar

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from kvlens.analyses.declaration import TABLE_WIDTH, Columns
from kvlens.explanation.by_unit import UnitSearch
from kvlens.explanation.citations import CITATION_COLUMNS, SENTENCE_COLUMNS, by_sentence, citations_of, marked
from kvlens.explanation.claims import NOT_KNOWN, needs_account, places_of_words
from kvlens.explanation.explaining import SEPARATOR, Explaining
from kvlens.explanation.runs import Outcome

CLAIM_COLUMNS = Columns(
    claim=("int64", "from 0, in the response's order"),
    text=("str", "as the response has it"),
    start=("int64", "its first token in the response"),
    stop=("int64", "behind its last token"),
    nats=("float64", "by which it falls when all units are gone"),
    p=("float64", "its probability with the whole prompt, what stands before it given"),
    asked=(
        "float64",
        "the mean log-probability of its tokens as the whole response, nats; NaN where what heads the page had not to be "
        "chosen (:mod:`~kvlens.explanation.heading`)",
    ),
    cause=("str", "units by number, such as ``3`` or ``2+5``: the first set that loses it; empty where none was found"),
)
UNIT_COLUMNS = Columns(
    unit=("int64", "from 0"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
    unit_text=("str", "of the unit"),
    start=("int64", "position of its first token in the prompt"),
    stop=("int64", "behind its last token"),
    effect=("float64", "by which the heading claim falls without it, nats; NaN where it was not removed by itself"),
    response_effect=("float64", "by which the whole response falls without it, nats; likewise"),
    verdict=("str", "on the heading claim without it; without its group where it was not removed by itself"),
    says=(
        "str",
        "what is said then: the response where no token differs, or at near ties alone; missing where it was not generated",
    ),
    is_cause=("bool", "in the heading claim's cause"),
    group=("str", "the units that it was removed together with, such as ``0+1+4``, where nothing changes; empty: with none"),
    alone=("bool", "whether it was removed by itself"),
)
EFFECT_COLUMNS = Columns(
    unit=("int64", "from 0"),
    word=("int64", "of the response, from 0"),
    text=("str", "the word"),
    effect=(
        "float64",
        "by which the word falls without the unit, nats, the words before it given; NaN where it was not removed by itself",
    ),
)
WORD_COLUMNS = Columns(
    word=("int64", "from 0"),
    text=("str", "the word, or a mark"),
    nats=("float64", "by which it falls when all units are gone"),
    claim=("int64", "the claim that it belongs to; -1: none"),
    start=("int64", "its first character in the response"),
    stop=("int64", "behind its last"),
    account=("str", "of a content word, why it is there: :mod:`~kvlens.explanation.citations`; empty: of others"),
)
STATEMENT_COLUMNS = Columns(
    claim=("int64", "which claim it is about"),
    about=("str", "``units``, ``layers``, ``groups`` (key-value groups), ``heads`` or ``positions``: what the set consists of"),
    role=(
        "str",
        "``none``: no unit is left; ``group``: units removed together, where nothing changes; ``each``: one unit, layer or "
        "group of positions; ``together``: a set; ``breaking``: the set loses the claim "
        "(of units: with its gap kept and closed); ``only``: the set alone is kept; ``keeping``: it alone keeps the claim; "
        "``telling``: all units that have a word without a source; ``switched``: units that somebody left out (``kvlens app``)",
    ),
    parts=("str", "the set: units or layers by number, heads such as ``23.4``, groups of ``positions``, joined by ``+``"),
    others=("bool", "everything but the set is exchanged"),
    gap=("str", "``kept``: what follows removed units stays where it stood; ``closed``: it moves up"),
    removed=("str", "units missing in the prompt that layers or positions are exchanged with; empty for units"),
    verdict=("str", "what becomes of the claim (:mod:`~kvlens.explanation.claims`)"),
    kept_words=("str", "its content words that are still said, where it is ``partly``"),
    nats=("float64", "by which the claim falls"),
    p_before=("float64", "its probability with the whole prompt, what stands before it given"),
    p_after=("float64", "under the intervention"),
    says=("str", "the whole text that is said instead; missing where there is no firm difference, or it was not generated"),
)
POSITION_COLUMNS = Columns(
    group=("str", "``cause``, ``document``, ``between``, ``question`` or ``end``"),
    position=("int64", "in the prompt"),
    token=("str", "there"),
)
COST_COLUMNS = Columns(
    step=("str", "``answer``, ``units``, ``sets``, ``layers``, ``heads``, ``positions`` or ``switched``"),
    passes=("int64", "through the model; some have several rows"),
    tokens=("int64", "that these read, rows that had ended left out"),
)

TABLES = {
    "claims": CLAIM_COLUMNS,
    "units": UNIT_COLUMNS,
    "effects": EFFECT_COLUMNS,
    "words": WORD_COLUMNS,
    "statements": STATEMENT_COLUMNS,
    "positions": POSITION_COLUMNS,
    "citations": CITATION_COLUMNS,
    "cost": COST_COLUMNS,
}
"""The tables of an explanation."""


def listing_tables(made: type["Findings"]) -> type["Findings"]:
    """Decorator that lists the columns of all tables at the end of the class' docstring."""
    lines = [made.__doc__ or ""]
    for name, columns in TABLES.items():
        lines += ["", f"The columns of ``{name}``:", "", *columns.table(TABLE_WIDTH - 4)]
    made.__doc__ = "\n    ".join(lines)
    return made


@listing_tables
@dataclass(frozen=True)
class Findings:
    """What :func:`kvlens.explain` found.

    Attributes:
        always_there: what is in no unit, so that no run is without it, in words: the question, BOS, ...
        question: what the model was asked, or the text that it continues.
        tokens: what the model read before its response, [pos].
        n_prompt: how many of these the page takes for the prompt: up to a chat's last message, or to the text.
        response: what the model answers.
        response_tokens: its tokens, [pos].
        cut_after: how many tokens these are where the model would have gone on; None where it ended by itself, and of a given
            answer.
        claims: its claims, `CLAIM_COLUMNS`; the whole response as one where no word depends on the units.
        about: the number of the claim that heads the page.
        is_whole: whether that claim is the whole response.
        units: `UNIT_COLUMNS`, in the prompt's order; documents' names are among them where the response has a word of them.
        effects: `EFFECT_COLUMNS`.
        words: `WORD_COLUMNS`.
        citations: what each word of the response rests on, `CITATION_COLUMNS`.
        documents: the documents and messages by name, as the model read them; ``citations`` counts their characters.
        cause: the heading claim's cause, by number of units; empty where none was found.
        statements: `STATEMENT_COLUMNS`, a row for each intervention and claim.
        positions: `POSITION_COLUMNS`, of each group that was exchanged; empty unless asked for.
        without: what the model says without any unit; None where that has no firm difference.
        n_layers: how many layers the model has; 0 where none were exchanged.
        cost: what each step took, `COST_COLUMNS`.
        left_out: what the budget left no room for.
    """

    always_there: tuple[str, ...]
    question: str
    tokens: Int[Tensor, " pos"]
    n_prompt: int
    response: str
    response_tokens: Int[Tensor, " response_pos"]
    cut_after: int | None
    claims: pd.DataFrame
    about: int
    is_whole: bool
    units: pd.DataFrame
    effects: pd.DataFrame
    words: pd.DataFrame
    citations: pd.DataFrame
    documents: dict[str, str]
    cause: tuple[int, ...]
    statements: pd.DataFrame
    positions: pd.DataFrame
    without: str | None
    n_layers: int
    cost: pd.DataFrame
    left_out: tuple[str, ...] = ()

    @property
    def claim(self) -> str:
        """The heading claim's text."""
        return str(self.claims["text"][self.about])

    @property
    def named(self) -> str:
        """The heading claim as sentences name it."""
        return "the answer" if self.is_whole else repr(self.claim)

    @property
    def marked(self) -> str:
        """The response with a mark behind the words that have one: numbers of sources, which ``follows from`` may precede, or
        ``follows``, ``memory`` or ``?``; :mod:`~kvlens.explanation.citations` says which account has which."""
        return marked(self.response, self.citations)

    @property
    @SENTENCE_COLUMNS.document
    def by_sentence(self) -> pd.DataFrame:
        """What each sentence of the response rests on:

        {columns}
        """
        return by_sentence(self.response, self.words, self.citations)

    def rows(self, about: str, *roles: str) -> pd.DataFrame:
        """The heading claim's statements of some roles."""
        table = self.statements
        return table[(table["claim"] == self.about) & (table["about"] == about) & table["role"].isin(roles)]

    @property
    def n_tokens(self) -> int:
        """How many tokens the model read."""
        return int(self.cost["tokens"].sum())

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name."""
        return {name: getattr(self, name) for name in TABLES}

    def to_json(self) -> str:
        """Return everything as JSON."""
        names = "always_there question response marked documents cut_after about is_whole without n_layers n_tokens left_out"
        plain = {name: getattr(self, name) for name in names.split()}
        frames = self.tables() | {"by_sentence": self.by_sentence}
        tables = {name: json.loads(table.to_json(orient="records")) for name, table in frames.items()}
        return json.dumps(
            plain | {"response_tokens": self.response_tokens.tolist()} | {"cause": list(self.cause)} | tables,
            ensure_ascii=False,
            indent=1,
        )


_Made = TypeVar("_Made", bound=Findings)


def found_by(
    made: type[_Made],
    explaining: Explaining,
    search: UnitSearch,
    heading: int,
    causes: list[tuple[int, ...]],
    n_layers: int,
    positions: pd.DataFrame,
) -> _Made:
    """The tables of an explanation whose steps were taken.

    Args:
        made: the class of what is returned.
        explaining: the explanation.
        search: the removals of its units.
        heading: the number of the claim that heads the page.
        causes: of each claim, by number of units.
        n_layers: how many layers the model has, where they were exchanged.
        positions: of each group that was exchanged.
    """
    statements, citations = pd.DataFrame(explaining.rows), citations_of(explaining)
    return made(
        always_there=explaining.read.always_there,
        question=explaining.read.question,
        tokens=explaining.prompt,
        n_prompt=explaining.read.n_prompt,
        response=explaining.response.text,
        response_tokens=explaining.response.tokens,
        cut_after=explaining.cut_after,
        claims=_table_of_claims(explaining, causes),
        about=heading,
        is_whole=explaining.is_whole,
        units=_table_of_units(explaining, search, heading, causes[heading]),
        effects=_table_of_effects(explaining, search.each),
        words=_table_of_words(explaining, citations),
        citations=citations,
        documents=explaining.read.documents,
        cause=causes[heading],
        statements=STATEMENT_COLUMNS.frame({name: statements[name].tolist() for name in statements}),
        positions=POSITION_COLUMNS.frame({name: positions.get(name, []) for name in POSITION_COLUMNS}),
        without=explaining.nothing.text,
        n_layers=n_layers,
        cost=_table_of_cost(explaining),
        left_out=tuple(explaining.left_out),
    )


def _table_of_claims(explaining: Explaining, causes: list[tuple[int, ...]]) -> pd.DataFrame:
    return CLAIM_COLUMNS.frame(
        {
            "claim": range(len(explaining.claims)),
            "text": [claim.text for claim in explaining.claims],
            "start": [claim.start for claim in explaining.claims],
            "stop": [claim.stop for claim in explaining.claims],
            "nats": [claim.nats for claim in explaining.claims],
            "p": [float(explaining.log_p[claim.start : claim.stop].sum().exp()) for claim in explaining.claims],
            "asked": [explaining.asked.get(claim[1:3], math.nan) for claim in explaining.claims],
            "cause": [SEPARATOR.join(map(str, cause)) for cause in causes],
        }
    )


def _table_of_units(explaining: Explaining, search: UnitSearch, heading: int, cause: tuple[int, ...]) -> pd.DataFrame:
    claim, units, each = explaining.claims[heading], range(len(explaining.units)), search.each
    group_of = {unit: group for group in search.together for unit in group}
    nearest_run = {unit: each.get(unit) or search.together.get(group_of.get(unit, ())) for unit in units}
    return UNIT_COLUMNS.frame(
        {
            "unit": units,
            "name": [unit.name for unit in explaining.units],
            "unit_text": [unit.text for unit in explaining.units],
            "start": [unit.start for unit in explaining.units],
            "stop": [unit.stop for unit in explaining.units],
            "effect": [explaining.fall(claim, each[unit]) if unit in each else math.nan for unit in units],
            "response_effect": [float(each[unit].falls.sum()) if unit in each else math.nan for unit in units],
            "verdict": [NOT_KNOWN if now is None else explaining.of(claim, now).name for now in nearest_run.values()],
            "says": [
                None if now is None else explaining.response.text if now.firm is None else now.text
                for now in nearest_run.values()
            ],
            "is_cause": [unit in cause for unit in units],
            "group": [SEPARATOR.join(map(str, group_of.get(unit, ()))) for unit in units],
            "alone": [unit in each for unit in units],
        }
    )


def _table_of_effects(explaining: Explaining, each: dict[int, Outcome]) -> pd.DataFrame:
    words = explaining.response.words
    missing = [math.nan] * len(words)
    return EFFECT_COLUMNS.frame(
        {
            "unit": [unit for unit in range(len(explaining.units)) for _ in words],
            "word": [*range(len(words))] * len(explaining.units),
            "text": [word.text for word in words] * len(explaining.units),
            "effect": [
                effect
                for unit in range(len(explaining.units))
                for effect in (explaining.of_words(each[unit].falls) if unit in each else missing)
            ],
        }
    )


def _table_of_words(explaining: Explaining, citations: pd.DataFrame) -> pd.DataFrame:
    words, places = explaining.response.words, places_of_words(explaining.response)
    spans = list(zip(citations["response_start"], citations["response_stop"], citations["account"], strict=True))
    accounts = [
        next((account for first, last, account in spans if first <= start < stop <= last), "")
        if needs_account(word, explaining.response.text, start, stop)
        else ""
        for word, (start, stop) in zip(words, places, strict=True)
    ]
    return WORD_COLUMNS.frame(
        {
            "word": range(len(words)),
            "text": [word.text for word in words],
            "nats": explaining.of_words(explaining.nothing.falls),
            "claim": [
                next((i for i, c in enumerate(explaining.claims) if c.start <= word.start < c.stop), -1) for word in words
            ],
            "start": [start for start, _ in places],
            "stop": [stop for _, stop in places],
            "account": accounts,
        }
    )


def _table_of_cost(explaining: Explaining) -> pd.DataFrame:
    spent = explaining.runs.spent
    passes, tokens = ([each[i] for each in spent.values()] for i in (0, 1))
    return COST_COLUMNS.frame({"step": list(spent), "passes": passes, "tokens": tokens})
