"""`explain`: the claims of a response, the units of the prompt they rest on, and the layers that read those."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVLensError, KVModel, weights_unchanged
from kvlens.units import Unit

from ..declaration import Columns
from .claims import Claim, claims_of, content_words, whole_response
from .response import Response
from .runs import Outcome, Runs
from .verdicts import FIRM, GONE, SAID, Verdict, verdict

MOST_TOGETHER, MOST_PAIRED = 5, 5
"""Sets of the strongest units up to so many, and pairs of so many."""
MOST_LAYERS = 8
"""Sets of the strongest layers up to so many."""
MOST_TOKENS = 64
"""Of a response that the model writes."""
SEPARATOR = "+"

CLAIMS = Columns(
    claim=("int64", "from 0, in the response's order"),
    text=("str", "as the response has it"),
    start=("int64", "its first token in the response"),
    stop=("int64", "behind its last token"),
    nats=("float64", "by which it falls when all units are gone"),
    p=("float64", "its probability with the whole prompt, what stands before it given"),
    cause=("str", "units by number, such as ``3`` or ``2+5``: the first set that loses it; empty where none was found"),
)
UNITS = Columns(
    unit=("int64", "from 0"),
    name=("str", "such as ``minutes.txt, sentence 5``"),
    unit_text=("str", "of the unit"),
    start=("int64", "position of its first token in the prompt"),
    stop=("int64", "behind its last token"),
    effect=("float64", "by which the heading claim falls without it, nats"),
    response_effect=("float64", "by which the whole response falls without it, nats"),
    verdict=("str", "on the heading claim without it"),
    is_cause=("bool", "in the heading claim's cause"),
)
EFFECTS = Columns(
    unit=("int64", "from 0"),
    word=("int64", "of the response, from 0"),
    text=("str", "the word"),
    effect=("float64", "by which the word falls without the unit, nats; the words before it given"),
)
STATEMENTS = Columns(
    claim=("int64", "which claim it is about"),
    about=("str", "``units`` or ``layers``: what the set consists of"),
    role=(
        "str",
        "``none``: no unit is left; ``each``: one unit or layer; ``together``: a set; ``breaking``: the set loses the claim (of "
        "units: with its gap kept and closed); ``only``: the set alone is kept; ``keeping``: it alone keeps the claim",
    ),
    parts=("str", "the set: units by number, or layers, joined by ``+``"),
    others=("bool", "everything but the set is exchanged"),
    positions=("str", "``kept``: what follows removed units stays where it stood; ``closed``: it moves up"),
    removed=("str", "units missing in the prompt that layers are exchanged with; empty for units"),
    verdict=("str", "what becomes of the claim (:mod:`~kvlens.analyses.explanation.verdicts`)"),
    kept_words=("str", "its content words that are still said, where it is ``partly``"),
    nats=("float64", "by which the claim falls"),
    p_before=("float64", "its probability with the whole prompt, what stands before it given"),
    p_after=("float64", "under the intervention"),
    says=("str", "the whole text that is said instead; missing where there is no firm difference, or it was not generated"),
)


@dataclass(frozen=True)
class Explained:
    """What :func:`explain` found.

    Attributes:
        asked: the text that is in no unit and follows them: the question, with a chat's marks.
        response: what the model answers.
        claims: its claims, `CLAIMS`; the whole response as one where no word depends on the units.
        about: the number of the claim that heads the page.
        is_whole: whether that claim is the whole response.
        units: `UNITS`.
        effects: `EFFECTS`.
        cause: the heading claim's cause, by number of units; empty where none was found.
        statements: `STATEMENTS`, a row for each intervention and claim.
        without: what the model says without any unit; None where that has no firm difference.
        n_layers: how many layers were tried one by one; 0 where none were.
        n_tokens: how many tokens the model read.
    """

    asked: str
    response: str
    claims: pd.DataFrame
    about: int
    is_whole: bool
    units: pd.DataFrame
    effects: pd.DataFrame
    cause: tuple[int, ...]
    statements: pd.DataFrame
    without: str | None
    n_layers: int
    n_tokens: int

    @property
    def claim(self) -> str:
        """The heading claim's text."""
        return str(self.claims["text"][self.about])

    def rows(self, about: str, *roles: str) -> pd.DataFrame:
        """The heading claim's statements of some roles."""
        table = self.statements
        return table[(table["claim"] == self.about) & (table["about"] == about) & table["role"].isin(roles)]

    def to_json(self) -> str:
        """Everything, as JSON."""
        plain = {name: getattr(self, name) for name in ("asked", "response", "about", "is_whole", "without", "n_layers", "n_tokens")}
        tables = {name: json.loads(getattr(self, name).to_json(orient="records")) for name in TABLES}
        return json.dumps(plain | {"cause": list(self.cause)} | tables, ensure_ascii=False, indent=1)

    def __str__(self) -> str:
        from .sentences import in_words

        return in_words(self)

    __repr__ = __str__


TABLES = ("claims", "units", "effects", "statements")


@torch.no_grad()
@weights_unchanged()
def explain_tokens(
    model: KVModel,
    prompt: Tensor,
    units: Sequence[Unit],
    *,
    about: str | None = None,
    answer: Tensor | None = None,
    depth: str = "layers",
    tell: Callable[[str, float], None] = lambda what, done: None,
) -> Explained:
    """The steps, on tokens."""
    return _Explaining(model, prompt, list(units), depth, tell).explained(about, answer)


@dataclass
class _Explaining:
    """The steps of one explanation, and the statements so far."""

    model: KVModel
    prompt: Tensor
    units: list[Unit]
    depth: str
    tell: Callable[[str, float], None]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        own = torch.zeros(len(self.units), len(self.prompt), dtype=torch.bool)
        for row, unit in enumerate(self.units):
            own[row, unit.start : unit.stop] = True
        self.own = own
        self.runs = Runs(self.model, self.prompt[:-1], self.prompt[-1:], own[:, :-1])

    def explained(self, about: str | None, answer: Tensor | None) -> Explained:
        self.tell("the model answers", 0.0)
        tokens = self.runs.answer(MOST_TOKENS) if answer is None else answer
        response = self.response = Response.of(self.model, self.prompt, tokens)
        self.log_p = self.runs.begin(response)
        self._claims()
        self.tell("removing units", 0.1)
        each = self._each_unit()
        heading = self._heading(about)
        causes = [self._cause(number, each) for number in range(len(self.claims))]
        layers = 0
        if causes[heading] and self.depth != "units":
            self.tell("exchanging layers", 0.6)
            layers = self._layers(heading, causes[heading])
        return self._found(each, heading, causes, layers)

    # --- claims -------------------------------------------------------------------------------------------------------

    def _claims(self) -> None:
        everything = range(len(self.units))
        self.nothing = self.runs.without([everything])[0]
        asked = self._asked()
        falls = self._of_words(self.nothing.falls)
        self.claims = claims_of(self.response, falls, frozenset(asked))
        self.is_whole = not self.claims
        if self.is_whole:
            self.claims = [whole_response(self.response, sum(falls))]
        for number in range(len(self.claims)):
            self._add(number, self.nothing, "units", "none", everything)

    def _asked(self) -> tuple[str, ...]:
        """Content words of what is in no unit."""
        text = Response.of(self.model, self.prompt[:0], self.prompt)
        in_unit = self.own.any(dim=0)
        return content_words(word for word in text.words if not bool(in_unit[word.start : word.stop].any()))

    def _of_words(self, falls: Float[Tensor, " pos"]) -> list[float]:
        return [float(falls[word.start : word.stop].sum()) for word in self.response.words]

    def _heading(self, about: str | None) -> int:
        if about is None:
            return max(range(len(self.claims)), key=lambda i: self.claims[i].nats)
        wanted = about.casefold()
        for number, claim in enumerate(self.claims):
            if wanted in claim.text.casefold():
                return number
        return self._asked_about(about)

    def _asked_about(self, about: str) -> int:
        """A claim that the user names, of words of the response."""
        names = [word.text.casefold() for word in self.response.words]
        wanted = [word.casefold() for word in about.split()]
        for start in range(len(names)):
            stop = start + len(wanted)
            if names[start:stop] == wanted:
                words = self.response.words[start:stop]
                nats = float(self.nothing.falls[words[0].start : words[-1].stop].sum())
                self.claims.append(Claim(about, words[0].start, words[-1].stop, content_words(words), nats))
                self._add(len(self.claims) - 1, self.nothing, "units", "none", range(len(self.units)))
                return len(self.claims) - 1
        from kvlens.errors import nearest

        said = [word.text for word in self.response.words if word.is_word]
        raise KVLensError(
            f"about: the response has no {about!r}{nearest(about, said)}. It is: {self.response.text!r}"
        )

    # --- units --------------------------------------------------------------------------------------------------------

    def _each_unit(self) -> list[Outcome]:
        return self.runs.without([[unit] for unit in range(len(self.units))])

    def _cause(self, number: int, each: list[Outcome]) -> tuple[int, ...]:
        """The statements on a claim's units; returns the first set that loses it."""
        claim = self.claims[number]
        for unit, now in enumerate(each):
            self._add(number, now, "units", "each", [unit])
        order = sorted(range(len(each)), key=lambda unit: -self._fall(claim, each[unit]))
        single = [unit for unit in order if self._of(claim, each[unit]).name in GONE]
        breaking = [(unit,) for unit in single if self._closed(number, (unit,), each[unit])]
        if not breaking and self._of(claim, self.nothing).name in GONE:
            breaking = self._together(number, each)
        for parts in breaking[:1]:
            self._only(number, parts)
        return breaking[0] if breaking else ()

    def _closed(self, number: int, parts: tuple[int, ...], kept: Outcome) -> bool:
        """Whether a set that loses the claim with its gap kept does so with its gap closed."""
        now = self.runs.without([parts], "closed")[0]
        lost = self._lost(number, now)
        self._add(number, now, "units", "breaking" if lost else "each", parts, positions="closed")
        if lost:
            self._add(number, kept, "units", "breaking", parts)
        return lost

    def _lost(self, number: int, now: Outcome) -> bool:
        return self._of(self.claims[number], now).name in GONE

    def _said(self, number: int, now: Outcome) -> bool:
        return self._of(self.claims[number], now).name in SAID

    def _together(self, number: int, each: list[Outcome]) -> list[tuple[int, ...]]:
        """The strongest units together, then pairs of them; the smallest set that loses the claim."""
        n = len(self.units)
        alone = self.runs.without([set(range(n)) - {unit} for unit in range(n)])
        claim = self.claims[number]
        strength = [self._fall(claim, each[unit]) - self._fall(claim, alone[unit]) for unit in range(n)]
        order = sorted(range(n), key=lambda unit: -strength[unit])
        sets = [tuple(sorted(order[:size])) for size in range(2, min(MOST_TOGETHER, n - 1) + 1)]
        found = self._first_lost(number, sets)
        if found is None or len(found) > 2:
            pairs = [tuple(sorted(pair)) for pair in itertools.combinations(order[:MOST_PAIRED], 2)]
            found = self._first_lost(number, pairs) or found
        return [] if found is None else [found]

    def _first_lost(self, number: int, sets: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        outcomes = self.runs.without(sets)
        for parts, now in zip(sets, outcomes, strict=True):
            self._add(number, now, "units", "together", parts)
        for parts, now in zip(sets, outcomes, strict=True):
            if self._lost(number, now) and self._closed(number, parts, now):
                return parts
        return None

    def _only(self, number: int, parts: tuple[int, ...]) -> None:
        """Only the set is left of the units."""
        others = set(range(len(self.units))) - set(parts)
        if others:
            now = self.runs.without([others])[0]
            self._add(number, now, "units", "only", parts, others=True)

    # --- layers -------------------------------------------------------------------------------------------------------

    def _layers(self, number: int, cause: tuple[int, ...]) -> int:
        donor, n = self.runs.donor(cause), self.runs.bias.n_layers
        claim = self.claims[number]
        removed = SEPARATOR.join(map(str, cause))

        def run(role: str, sets: Sequence[tuple[int, ...]], others: bool = False, texts: bool = True) -> list[Outcome]:
            everything = set(range(n))
            exchanged = [everything - set(each) if others else each for each in sets]
            outcomes = self.runs.layers(donor, exchanged, lambda falls: texts and (others or fall_of(falls) > FIRM))
            for each, now in zip(sets, outcomes, strict=True):
                self._add(number, now, "layers", role, each, others=others, removed=removed)
            return outcomes

        def fall_of(falls: Tensor) -> float:
            return float(falls[claim.start : claim.stop].sum())

        def lost(role: str, sets: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
            outcomes = run(role, sets)
            return [each for each, now in zip(sets, outcomes, strict=True) if self._lost(number, now)]

        singles = [(layer,) for layer in range(n)]
        sorted_by_fall = sorted(zip(singles, run("each", singles), strict=True), key=lambda each: -fall_of(each[1].falls))
        order = [each[0] for each, _ in sorted_by_fall]
        breaking = [each for each, now in sorted_by_fall if self._lost(number, now)]
        pairs = [tuple(sorted(pair)) for pair in itertools.combinations(order[:MOST_PAIRED], 2)]
        breaking = breaking or lost("together", pairs)
        breaking = breaking or lost("together", [tuple(sorted(order[:size])) for size in range(3, min(MOST_LAYERS, n) + 1)])
        run("breaking", breaking if breaking and len(breaking[0]) == 1 else breaking[:1])
        keeping = [tuple(sorted(order[:size])) for size in range(1, min(MOST_LAYERS, n) + 1)]
        alone = run("only", keeping, others=True, texts=False)
        for each, now in zip(keeping, alone, strict=True):
            if fall_of(now.falls) <= FIRM and self._said(number, self.runs.layers(donor, [set(range(n)) - set(each)])[0]):
                run("keeping", [each], others=True)
                break
        return n

    # --- what was found -----------------------------------------------------------------------------------------------

    def _fall(self, claim: Claim, now: Outcome) -> float:
        return float(now.falls[claim.start : claim.stop].sum())

    def _of(self, claim: Claim, now: Outcome) -> Verdict:
        return verdict(claim, now.falls, now.differs, now.firm, now.words)

    def _add(self, number: int, now: Outcome, about: str, role: str, parts: Iterable[int], **named: Any) -> None:
        claim = self.claims[number]
        found, before = self._of(claim, now), float(self.log_p[claim.start : claim.stop].sum())
        self.rows.append(
            {
                "claim": number,
                "about": about,
                "role": role,
                "parts": SEPARATOR.join(map(str, parts)),
                "others": named.get("others", False),
                "positions": named.get("positions", "kept"),
                "removed": named.get("removed", ""),
                "verdict": found.name,
                "kept_words": " ".join(found.kept),
                "nats": found.fall,
                "p_before": math.exp(before),
                "p_after": math.exp(before - found.fall),
                "says": now.text,
            }
        )

    def _found(self, each: list[Outcome], heading: int, causes: list[tuple[int, ...]], n_layers: int) -> Explained:
        claims, units = self.claims, range(len(self.units))
        words = range(len(self.response.words))
        effects = [(unit, word, effect) for unit in units for word, effect in enumerate(self._of_words(each[unit].falls))]
        statements = pd.DataFrame(self.rows)
        behind = max((unit.stop for unit in self.units), default=0)
        return Explained(
            asked=Response.of(self.model, self.prompt[:behind], self.prompt[behind:]).text,
            response=self.response.text,
            claims=CLAIMS.frame(
                {
                    "claim": range(len(claims)),
                    "text": [claim.text for claim in claims],
                    "start": [claim.start for claim in claims],
                    "stop": [claim.stop for claim in claims],
                    "nats": [claim.nats for claim in claims],
                    "p": [float(self.log_p[claim.start : claim.stop].sum().exp()) for claim in claims],
                    "cause": [SEPARATOR.join(map(str, cause)) for cause in causes],
                }
            ),
            about=heading,
            is_whole=self.is_whole,
            units=UNITS.frame(
                {
                    "unit": units,
                    "name": [unit.name for unit in self.units],
                    "unit_text": [unit.text for unit in self.units],
                    "start": [unit.start for unit in self.units],
                    "stop": [unit.stop for unit in self.units],
                    "effect": [self._fall(claims[heading], each[unit]) for unit in units],
                    "response_effect": [float(each[unit].falls.sum()) for unit in units],
                    "verdict": [self._of(claims[heading], each[unit]).name for unit in units],
                    "is_cause": [unit in causes[heading] for unit in units],
                }
            ),
            effects=EFFECTS.frame(
                {
                    "unit": [unit for unit, _, _ in effects],
                    "word": [word for _, word, _ in effects],
                    "text": [self.response.words[word].text for _, word, _ in effects],
                    "effect": [effect for _, _, effect in effects],
                }
            ),
            cause=causes[heading],
            statements=STATEMENTS.frame({name: statements[name].tolist() for name in statements}),
            without=self.nothing.text,
            n_layers=n_layers,
            n_tokens=self.runs.n_tokens,
        )
