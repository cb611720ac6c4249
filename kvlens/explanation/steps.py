"""`explain`, which takes the eight steps of :mod:`kvlens.explanation`, and ``kvlens analyse explanation``, for many prompts."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvlens import KVLensError, KVModel
from kvlens.analyses.attribution.answers import BY
from kvlens.analyses.declaration import Option, analysis
from kvlens.analyses.sequences import PromptTokens, TextTokens
from kvlens.arguments import HOW_FAR, Depth, Positions
from kvlens.chat import Chat, as_prompt, one_sequence, prompt_layout
from kvlens.checks import Count, checked
from kvlens.errors import brief
from kvlens.explanation.by_unit import UnitSearch
from kvlens.explanation.citations import documents_of
from kvlens.explanation.claims import DEPENDS, is_content, normal, words_in
from kvlens.explanation.exchanges import MOST_LAYERS, exchange_layers, exchange_positions, places_of
from kvlens.explanation.explained import STATEMENT_COLUMNS, found_by
from kvlens.explanation.explaining import SEPARATOR, Explaining, ReadPrompt
from kvlens.explanation.heading import heading_claim
from kvlens.explanation.presentation import answered, listed, quoted
from kvlens.explanation.runs import MORE_TOKENS, PASS, Outcome
from kvlens.explanation.view import Explained
from kvlens.terminal import progress_bar
from kvlens.texts import Response
from kvlens.units import By, Layout, Unit, begins_with_bos, cut, pieces_of_tokens, units_of_names

LONGEST_ASKED = 100
"""How many characters of the question, or of a text, are quoted where it is said to be never removed."""
MOST_TOKENS = 64
"""How many tokens the model writes at most when it answers."""


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
    depth: Depth = "ranges",
    budget: Count | None = None,
    on_progress: Callable[[str, float], None] | None = None,
    on_found: Callable[[str], None] | None = None,
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
        about: words of the response; the claim that has them heads the explanation. None: what the question asks for
            (:mod:`kvlens.explanation.heading`).
        answer: the response that is explained, a string or tokens; None lets the model answer greedily, up to the token that
            ends its response, or `MOST_TOKENS` tokens, where it is cut off; behind a ``text``, which it continues, up to the
            end of a sentence.
        by: what a unit is, as :func:`kvlens.chat.prompt_units` takes it; at a level such as "sentence" also the name of a
            document that has a word of the response.
        depth: "units"; "ranges" exchanges layers, too: halves of them, and the halves of each range that loses the claim;
            "layers" each by itself in place of that; "heads" also the heads of the layers that lose the claim, "positions" in
            place of heads which positions of the prompt hold what the model reads there about the cause.
        budget: tokens that may be read; what is left out then is named in ``left_out``.
        on_progress: called with a description and the fraction done, in 0..1, about; None shows a bar on a terminal or in a
            notebook, if it takes long.
        on_found: called with a line of text as soon as something is known: the response, then each unit that was removed.

    Raises:
        KVLensError: a prompt without units, ``about`` that the response does not have, a budget that is too small to
            remove each unit once, tokens beyond the model's context.
    """
    if isinstance(answer, str) and not answer.strip():
        raise KVLensError(f"answer: expected at least one token, got {answer!r}")
    given = None if answer is None else one_sequence(model, "answer", answer)
    with progress_bar("explain", shown=on_progress is None) as bar:
        options = dict(depth=depth, budget=budget, tell=on_progress or bar, say=on_found or (lambda line: None))
        return Steps.reading(model, prompt, text, by, **options).explained(about, given)


@analysis(
    STATEMENT_COLUMNS,
    "which parts of the prompt and which layers the words of the answer rest on: interventions, and what is said under them",
    cost="the answer's tokens one by one; prompt and answer once without each unit that seems to matter, and an answer for "
    "each that changes it; the answer for some ranges of layers",
    options={"by": BY, "depth": Option("how far it goes", choices=HOW_FAR)},
)
def explanation(
    model: KVModel,
    prompt: PromptTokens,
    text: TextTokens,
    *,
    answer: str | None = None,
    by: str = "sentence",
    depth: Depth = "ranges",
) -> pd.DataFrame:
    """The statements of :func:`kvlens.explain`, for many prompts.

    Args:
        model, prompt, text, answer, by, depth: as :func:`kvlens.explain`.

    Returns:
        One row per intervention and claim:

        {columns}
    """
    return explain(model, prompt, text, answer=answer, by=by, depth=depth).statements


def _read_prompt(model: KVModel, prompt: Any, text: Any, by: By) -> ReadPrompt:
    """Read and cut a prompt, with the text that follows it."""
    layout = prompt_layout(model, prompt)
    units, tokens = cut(model, layout, by), layout.tokens
    if text is not None:
        tokens = torch.cat([tokens, one_sequence(model, "text", text)])
    if not units:
        raise KVLensError("prompt: it has only what is never removed, and no unit to remove; give documents or a text")
    if model.cfg.has_position_limit and len(tokens) >= model.cfg.n_ctx:
        raise KVLensError(
            f"prompt: its {len(tokens):,} tokens leave no room for an answer in n_ctx={model.cfg.n_ctx:,}; shorten it"
        )
    if max(unit.stop for unit in units) >= len(tokens):
        raise KVLensError(
            "text: the prompt's last token belongs to a unit; give what follows it, such as the question, as text="
        )
    follows = tokens[len(layout.tokens) :]
    names = units_of_names(model, layout) if isinstance(by, str) else []
    rest = tuple(_always_there(model, layout, isinstance(by, str), follows, len(names)))
    asked = [layout.text[piece.start : piece.stop] for piece in layout.asked]
    question = " ".join([*asked, *([Response.of(model, layout.tokens, follows).text] if len(follows) else [])])
    last = max(i for i, piece in enumerate(pieces_of_tokens(layout)) if piece is not None)
    n_prompt = min(last + 1, len(tokens) - 1)
    documents, unit_places = documents_of(layout, units, prompt)
    places = places_of(layout, len(tokens))
    return ReadPrompt(tokens, units, unit_places, documents, places, rest, question, n_prompt, layout, names)


def _with_names(model: KVModel, read: ReadPrompt, names: Sequence[Unit]) -> ReadPrompt:
    """A prompt with some documents' names as units, too."""
    units = sorted([*read.units, *names], key=lambda unit: unit.start)
    documents, places = documents_of(read.layout, units)
    follows = read.tokens[len(read.layout.tokens) :]
    rest = tuple(_always_there(model, read.layout, True, follows, len(read.names) - len(names)))
    return replace(read, units=units, unit_places=places, documents=documents, always_there=rest)


def _always_there(model: KVModel, layout: Layout, is_cut: bool, text: Tensor, n_names: int) -> Iterator[str]:
    """What is in no unit, in words.

    Args:
        layout: the prompt.
        is_cut: whether the whole of it was cut into units; otherwise these were given, and the rest is in none.
        text: what follows it.
        n_names: how many of its documents' names are in no unit.
    """
    is_chat = any(piece.name for piece in [*layout.pieces, *layout.asked])
    if not is_cut:
        yield "the rest of the prompt"
    else:
        for asked in layout.asked:
            yield f"the question ({quoted(layout.text[asked.start : asked.stop], LONGEST_ASKED)})"
        if n_names:
            which = "document's name" if n_names == 1 else "documents' names"
            yield f"the {'' if n_names == len(layout.names) else 'other '}{which}"
    if len(text):
        said = quoted(Response.of(model, layout.tokens, text).text, LONGEST_ASKED)
        yield f"{'the beginning of the answer' if is_chat else 'the text'} ({said})"
    if is_cut and is_chat:
        yield "what the chat template writes"
    elif is_cut and begins_with_bos(model, layout.tokens):
        yield "the begin-of-text token (BOS)"


@dataclass
class Steps(Explaining):
    """The steps of one explanation. When it is made (:meth:`explained`), further runs add statements: :meth:`without`,
    :meth:`about`."""

    tried: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runs.on_without = self._heard

    @classmethod
    @torch.no_grad()
    def reading(cls, model: KVModel, prompt: Any, text: Any = None, by: By = "sentence", **options: Any) -> "Steps":
        """Read and cut a prompt. ``options`` are the attributes from ``depth`` on, the others as of :func:`explain`."""
        continues = text is not None and not isinstance(as_prompt(prompt), Chat)
        return cls(model, _read_prompt(model, prompt, text, by), continues, **options)

    @torch.no_grad()
    def explained(self, about: str | None = None, answer: Tensor | None = None) -> Explained:
        """Take the steps, with ``about`` and ``answer`` as of :func:`explain`."""
        search, n, self.wanted = UnitSearch(self), len(self.prompt), about
        self.search, least = search, (search.n_first + 2) * n
        if self.budget is not None and self.budget < least:
            raise KVLensError(
                f"budget: removing each of the {search.n_first} units once reads up to {least:,} tokens, and "
                f"{self.budget:,} are allowed; give more, or larger units (by: paragraph)"
            )
        of_layers = 0 if self.depth == "units" else self._rows_of_layers
        later = (search.n_first + 3) * n // 2 + of_layers * 2 * MORE_TOKENS
        self.work.begin("the model answers", n + MOST_TOKENS * PASS / 2, later)
        tokens = self.runs.answer(MOST_TOKENS, self._said_so_far) if answer is None else answer
        response = self.response = Response.of(self.model, self.prompt, tokens)
        self.cut_after = len(tokens) if answer is None and not self.runs.ends(tokens) else None
        self.read = self._with_names_in(response)
        self.say(answered(response.text, self.cut_after))
        self.log_p = self.runs.begin(response, self.own[:, :-1])
        if bool(self.log_p.isnan().any()):
            raise KVLensError(
                "model: the answer's log-probabilities are NaN: weights hold NaN or infinity, or activations overflow; in half "
                "precision, try float32"
            )
        longest = len(tokens) + MORE_TOKENS
        self.work.begin("removing units", search.cost(), later=of_layers * longest)
        with self.runs.step("units"):
            self.nothing = search.begin()
            for number in range(len(self.claims)):
                self.add(number, self.nothing, "units", "none", range(len(self.units)))
            self.heading = heading_claim(self)
            self.causes = search.causes(self.heading)
        cause, self.positions = self.causes[self.heading], pd.DataFrame()
        if cause and self.depth != "units" and self.room("layers", self._cost_of_layers()):
            self._try_layers(self.heading)
        if cause and self.depth == "positions" and self.room("positions", 3 * n + 20 * longest):
            self.work.begin("exchanging positions", 3 * n + 20 * longest + 3 * longest * PASS)
            with self.runs.step("positions"):
                self.positions = exchange_positions(self, self.heading, cause, self.read.places)
        self.tell("done", 1.0)
        return self.found()

    def found(self) -> Explained:
        """The tables of what was found so far."""
        n_tried = self.tried.get(self.heading, 0)
        return found_by(Explained, self, self.search, self.heading, self.causes, n_tried, self.positions)

    def _try_layers(self, number: int, anew: bool = False) -> None:
        longest, n_rows = len(self.response.tokens) + MORE_TOKENS, len(self.rows)
        self.work.begin("exchanging layers", self._rows_of_layers * longest + 3 * longest * PASS, anew=anew)
        try:
            with self.runs.step("layers"):
                self.tried[number] = exchange_layers(self, number, self.causes[number])
        except BaseException:  # also where a caller stops the run
            del self.rows[n_rows:]
            raise

    # --- further runs -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def without(self, units: Iterable[int]) -> Explained:
        """What is said without some units, with their gap kept and closed: the explanation, and statements on every claim.

        Raises:
            KVLensError: no unit, or one that the prompt does not have.
        """
        members = sorted(set(units))
        if not members or not 0 <= members[0] <= members[-1] < len(self.units):
            raise KVLensError(f"units: expected some of 0 to {len(self.units) - 1}, got {brief(members)}")
        self.work.begin("without these parts", 2 * (len(self.prompt) + len(self.response.tokens) * PASS), anew=True)
        gaps: tuple[Positions, ...] = ("kept", "closed")
        with self.runs.step("switched"), self.runs.texts_together():
            self.runs.without_these([(members, gap) for gap in gaps])
        parts = SEPARATOR.join(map(str, members))
        if not any((row.role, row.parts) == ("switched", parts) for row in self.rows):
            for number, gap in itertools.product(range(len(self.claims)), gaps):
                self.add(number, self.runs.without([members], gap)[0], "units", "switched", members, gap=gap)
        return self.found()

    @torch.no_grad()
    def about(self, number: int) -> Explained:
        """The explanation with another claim at its head, and the layers in which the model reads what that rests on.

        Raises:
            KVLensError: there is no such claim.
        """
        if not 0 <= number < len(self.claims):
            raise KVLensError(f"claim: expected one of 0 to {len(self.claims) - 1}, got {brief(number)}")
        if number not in self.tried and self.causes[number]:
            self._try_layers(number, anew=True)
        self.heading = number
        return self.found()

    def _with_names_in(self, response: Response) -> ReadPrompt:
        """The prompt with a unit for each document's name that has a content word of the response and not of the question."""
        asked = words_in(self.read.question)
        said = {normal(word.text) for word in response.words if is_content(word)} - asked
        held = [word.start for word in self.prompt_words if normal(word.text) in said]
        names = [name for name in self.read.names if any(name.start <= start < name.stop for start in held)]
        return _with_names(self.model, self.read, names) if names else self.read

    def _said_so_far(self, tokens: list[int]) -> None:
        if self.hear is not None:
            self.hear(Response.of(self.model, self.prompt, torch.tensor(tokens, device=self.prompt.device)).text)

    def _heard(self, without: frozenset[int], now: Outcome) -> None:
        """Say what is known as soon as some units were removed, before the text that is said then is generated."""
        name = self.units[min(without)].name if len(without) == 1 else ""
        if name := "any of them" if len(without) == len(self.units) else name:
            falls = zip(self.response.words, self.of_words(now.falls), strict=True)
            fell = [f"{word.text!r} ({nats:.1f})" for word, nats in falls if word.is_word and nats > DEPENDS]
            said = f"these words fall by so many nats: {listed(fell[:6])}" if fell else f"no word falls by {DEPENDS:.0f} nats"
            self.say(f"Without {name}, {said}")

    @property
    def _rows_of_layers(self) -> int:
        """How many sets of layers are exchanged for a claim, about."""
        return 2 * MOST_LAYERS + (0 if self.depth in ("units", "ranges") else self.runs.bias.n_layers)

    def _cost_of_layers(self) -> int:
        return len(self.prompt) + self._rows_of_layers * (len(self.response.tokens) + MORE_TOKENS)
