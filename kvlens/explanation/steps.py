"""`explain`: the claims of a response, the units of the prompt they rest on, and the layers that read those."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.analyses.attribution.units import positions_of
from kvlens.chat import Chat, as_prompt, one_sequence, prompt_tokens, prompt_units
from kvlens.checks import Count, checked
from kvlens.errors import nearest
from kvlens.explanation.by_layer import MOST_LAYERS, exchange_layers
from kvlens.explanation.claims import Claim, claims_of, content_words, whole_response
from kvlens.explanation.explained import CLAIMS, EFFECTS, SEPARATOR, STATEMENTS, UNITS, WORDS, Explained
from kvlens.explanation.runs import MORE_TOKENS, Outcome, Runs
from kvlens.explanation.verdicts import GONE, SAID, Verdict, verdict
from kvlens.texts import Response
from kvlens.units import By, Unit

MOST_TOGETHER, MOST_PAIRED = 5, 5
"""Sets of the strongest units up to so many, and pairs of so many."""
MOST_TOKENS = 64
"""Of a response that the model writes."""
Depth = Literal["units", "layers", "heads"]


@checked
@torch.no_grad()
def explain(
    model: KVModel,
    prompt: Any,
    text: str | Tensor | None = None,
    *,
    about: str | None = None,
    answer: str | Tensor | None = None,
    by: By = "sentence",
    depth: Depth = "layers",
    budget: Count | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> Explained:
    """Why did the model say that: what it answers, which words depend on the prompt, on which units, read in which layers.

    >>> import kvlens
    >>> model = kvlens.load("facts-gpt2")
    >>> story = "Mira keeps a goat. Pavel has a parrot. At night Kaya feeds a donkey."
    >>> found = kvlens.explain(model, story, " Which animal does Kaya keep? Kaya keeps a")
    >>> found.claim, found.units["name"][found.cause[0]]
    ('donkey', 'sentence 3')

    Args:
        model: with a tokenizer, of either front end.
        prompt: a :class:`kvlens.Chat`, a list of messages, a string, or tokens [pos].
        text: what follows the prompt, up to where the answer begins (behind a chat, the beginning of the answer); it is always
            there.
        about: words of the response; the claim that has them heads the explanation. None: the claim that depends most on the
            prompt.
        answer: the response that is explained, a string or tokens; None lets the model answer greedily, up to the token that
            ends its response, or `MOST_TOKENS` tokens; behind a ``text``, which it continues, up to the end of a sentence.
        by: what a unit is, as :func:`kvlens.chat.prompt_units` takes it.
        depth: "units"; "layers" exchanges layers, too; "heads" also the heads of the layers that lose the claim.
        budget: tokens that may be read; what is left out then is named in ``left_out``.
        on_progress: called with a description and the fraction done, in 0..1.

    Raises:
        KVLensError: a prompt without units, ``about`` that the response does not have, a budget that is too small to
            remove each unit once, tokens beyond the model's context.
    """
    if isinstance(answer, str) and not answer.strip():
        raise KVLensError(f"answer: expected at least one token, got {answer!r}")
    tokens, units = _prompt_and_units(model, prompt, text, by)
    given = None if answer is None else one_sequence(model, "answer", answer)
    tell = on_progress or (lambda what, done: None)
    continues = text is not None and not isinstance(as_prompt(prompt), Chat)
    explaining = _Explaining(model, tokens, units, depth, budget, tell, continues)
    return explaining.explained(about, given)


def _prompt_and_units(model: KVModel, prompt: Any, text: Any, by: By) -> tuple[Tensor, list[Unit]]:
    tokens, units = prompt_tokens(model, prompt), prompt_units(model, prompt, by)
    if text is not None:
        tokens = torch.cat([tokens, one_sequence(model, "text", text)])
    if not units:
        raise KVLensError("prompt: it has nothing but what is always there, and no unit to remove; give documents or a text")
    if model.cfg.has_position_limit and len(tokens) >= model.cfg.n_ctx:
        raise KVLensError(
            f"prompt: its {len(tokens):,} tokens leave no room for an answer in n_ctx={model.cfg.n_ctx:,}; shorten it"
        )
    if max(unit.stop for unit in units) >= len(tokens):
        raise KVLensError(
            "text: the prompt's last token belongs to a unit; give what follows it, such as the question, as text="
        )
    return tokens, units


@dataclass
class _Explaining:
    """The steps of one explanation, and the statements so far."""

    model: KVModel
    prompt: Tensor
    units: list[Unit]
    depth: str
    budget: int | None
    tell: Callable[[str, float], None]
    is_continuation: bool = False
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.own = positions_of(self.units, len(self.prompt))
        self.runs = Runs(self.model, self.prompt[:-1], self.prompt[-1:], self.own[:, :-1], self.is_continuation)

    def explained(self, about: str | None, answer: Tensor | None) -> Explained:
        least = (len(self.units) + 2) * len(self.prompt)
        if self.budget is not None and self.budget < least:
            raise KVLensError(
                f"budget: removing each of the {len(self.units)} units once reads up to {least:,} tokens, and {self.budget:,} "
                "are allowed; give more, or larger units (by='paragraph')"
            )
        self.tell("the model answers", 0.0)
        tokens = self.runs.answer(MOST_TOKENS) if answer is None else answer
        response = self.response = Response.of(self.model, self.prompt, tokens)
        self.log_p = self.runs.begin(response)
        self.tell("removing units", 0.1)
        units = range(len(self.units))
        self.nothing, *each = self.runs.without([units, *([unit] for unit in units)])
        self._claims()
        heading = self._heading(about)
        causes = self._causes(each)
        n_layers = 0
        if causes[heading] and self.depth != "units" and self._room("layers", self._cost_of_layers()):
            self.tell("exchanging layers", 0.6)
            n_layers = exchange_layers(self, heading, causes[heading])
        self.tell("done", 1.0)
        return self._found(each, heading, causes, n_layers)

    def _room(self, what: str, n_tokens: int) -> bool:
        """Whether the budget has room for a step; what it has none for is left out."""
        if self.budget is None or self.runs.n_tokens + n_tokens <= self.budget:
            return True
        self.left_out.append(what)
        return False

    def _cost_of_layers(self) -> int:
        n = self.runs.bias.n_layers
        return len(self.prompt) + (n + MOST_LAYERS) * (len(self.response.tokens) + MORE_TOKENS)

    # --- claims -------------------------------------------------------------------------------------------------------

    def _claims(self) -> None:
        everything, falls = range(len(self.units)), self._of_words(self.nothing.falls)
        self.claims = claims_of(self.response, falls, frozenset(self._asked()))
        self.is_whole = not self.claims
        if self.is_whole:
            self.claims = [whole_response(self.response, sum(falls))]
        for number in range(len(self.claims)):
            self.add(number, self.nothing, "units", "none", everything)

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
                self.add(len(self.claims) - 1, self.nothing, "units", "none", range(len(self.units)))
                return len(self.claims) - 1
        said = [word.text for word in self.response.words if word.is_word]
        raise KVLensError(f"about: the response has no {about!r}{nearest(about, said)}. It is: {self.response.text!r}")

    # --- units --------------------------------------------------------------------------------------------------------

    def _causes(self, each: list[Outcome]) -> list[tuple[int, ...]]:
        """The statements on units; of each claim the first set that loses it."""
        single = [self._losing(number, each) for number in range(len(self.claims))]
        units = set(range(len(self.units)))
        lost = dict.fromkeys(unit for of_claim in single for unit in of_claim)
        strongest = dict.fromkeys(of_claim[0] for of_claim in single if of_claim and len(units) > 1)
        self.runs.without_these(  # all in one batch
            [*(([unit], "closed") for unit in lost), *((units - {unit}, "kept") for unit in strongest)]
        )
        return [self._cause(number, each, units) for number, units in enumerate(single)]

    def _losing(self, number: int, each: list[Outcome]) -> list[int]:
        """The units that lose a claim with their gap kept, the strongest first."""
        claim = self.claims[number]
        for unit, now in enumerate(each):
            self.add(number, now, "units", "each", [unit])
        order = sorted(range(len(each)), key=lambda unit: -self.fall(claim, each[unit]))
        return [unit for unit in order if self.lost(number, each[unit])]

    def _cause(self, number: int, each: list[Outcome], single: list[int]) -> tuple[int, ...]:
        breaking: list[tuple[int, ...]] = [(unit,) for unit in single if self._closed(number, (unit,), each[unit])]
        several = len(self.units) > 1 and self.lost(number, self.nothing)
        if not breaking and several and self._room("sets of units", 2 * len(self.units) * len(self.prompt)):
            breaking = self._together(number, each)
        for parts in breaking[:1]:
            self._only(number, parts)
        return breaking[0] if breaking else ()

    def _closed(self, number: int, parts: tuple[int, ...], kept: Outcome) -> bool:
        """Whether a set that loses the claim with its gap kept does so with its gap closed."""
        now = self.runs.without([parts], "closed")[0]
        lost = self.lost(number, now)
        self.add(number, now, "units", "breaking" if lost else "each", parts, positions="closed")
        if lost:
            self.add(number, kept, "units", "breaking", parts)
        return lost

    def lost(self, number: int, now: Outcome) -> bool:
        return self._of(self.claims[number], now).name in GONE

    def said(self, number: int, now: Outcome) -> bool:
        return self._of(self.claims[number], now).name in SAID

    def _together(self, number: int, each: list[Outcome]) -> list[tuple[int, ...]]:
        """The strongest units together, then pairs of them; the smallest set that loses the claim."""
        n = len(self.units)
        alone = self.runs.without([set(range(n)) - {unit} for unit in range(n)])
        claim = self.claims[number]
        strength = [self.fall(claim, each[unit]) - self.fall(claim, alone[unit]) for unit in range(n)]
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
            self.add(number, now, "units", "together", parts)
        for parts, now in zip(sets, outcomes, strict=True):
            if self.lost(number, now) and self._closed(number, parts, now):
                return parts
        return None

    def _only(self, number: int, parts: tuple[int, ...]) -> None:
        """Only the set is left of the units."""
        others = set(range(len(self.units))) - set(parts)
        if others:
            now = self.runs.without([others])[0]
            self.add(number, now, "units", "only", parts, others=True)

    # --- what was found -----------------------------------------------------------------------------------------------

    def fall(self, claim: Claim, now: Outcome) -> float:
        return float(now.falls[claim.start : claim.stop].sum())

    def _of(self, claim: Claim, now: Outcome) -> Verdict:
        return verdict(claim, now.falls, now.differs, now.firm, now.words)

    def add(self, number: int, now: Outcome, about: str, role: str, parts: Iterable[object], **named: Any) -> None:
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
            response_tokens=self.response.tokens,
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
                    "effect": [self.fall(claims[heading], each[unit]) for unit in units],
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
            words=WORDS.frame(
                {
                    "word": words,
                    "text": [word.text for word in self.response.words],
                    "nats": self._of_words(self.nothing.falls),
                    "claim": [
                        next((i for i, c in enumerate(claims) if c.start <= word.start < c.stop), -1)
                        for word in self.response.words
                    ],
                }
            ),
            cause=causes[heading],
            statements=STATEMENTS.frame({name: statements[name].tolist() for name in statements}),
            without=self.nothing.text,
            n_layers=n_layers,
            n_tokens=self.runs.n_tokens,
            left_out=tuple(self.left_out),
        )
