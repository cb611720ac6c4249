"""What is explained: the log-probability of an answer behind a text, or how far it lies above a rival's."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import Counterfactuals, KVBias, KVLensError, KVModel, counterfactuals, logits_after
from kvlens.arguments import UNITS, Positions, Span
from kvlens.chat import prompt_layout
from kvlens.units import By, Layout, Unit, always_there, cut

from ..declaration import Option
from ..predictions import text_logits
from ..segments import progress
from ..sequences import PromptTokens, TextTokens, one_sequence


@dataclass
class Account:
    """How many tokens were read."""

    n_tokens: int = 0
    on_tokens: Callable[[int], None] | None = None

    def count(self, n_tokens: int) -> None:
        """Add tokens that went through the model, and tell ``on_tokens`` how many there are by now."""
        self.n_tokens += n_tokens
        if self.on_tokens is not None:
            self.on_tokens(self.n_tokens)

    @contextmanager
    def bar(self, what: str, expected: int) -> Iterator[None]:
        """Inside, a bar follows how many of about ``expected`` tokens were read."""
        with progress(what) as tell:
            self.on_tokens = lambda n: tell(min(1.0, n / expected))
            yield
            tell(1.0)


Answer = str | int | list[int] | Int[Tensor, " answer_pos"] | None
Rival = str | int | list[int] | Int[Tensor, " rival_pos"] | None
BY = Option("the units", choices=UNITS)
"""How a batch chooses the units that an attribution is about; :mod:`kvlens.units` cuts prompts."""
Spans = Sequence[Span] | Sequence[str]
"""Units that are given: token ranges, or strings that occur in the prompt."""
LogitsAfter = Callable[[Tensor, int], Float[Tensor, "row n_last d_vocab"]]
"""read(text, n): the logits at the last n tokens of a text, for each of several rows."""


@dataclass(frozen=True)
class Question:
    """A prompt, a text, and the answer whose log-probability is explained.

    Attributes:
        model: that is asked, with whatever is attached to it in front of the prompt.
        layout: the prompt's tokens, and which of them are units.
        text: what follows it, [pos], without the answer.
        answer: token ids, at least one.
        rival: token ids of another answer, or None.
        positions: "kept" or "closed", see :mod:`kvlens.conversion.prompt`.
        account: of what was read.
    """

    model: KVModel
    layout: Layout = field(compare=False)
    text: Int[Tensor, " text_pos"]
    answer: Int[Tensor, " answer_pos"]
    rival: Int[Tensor, " rival_pos"] | None
    positions: Positions
    account: Account = field(compare=False)

    @classmethod
    def of(
        cls,
        model: KVModel,
        prompt: PromptTokens,
        text: TextTokens | None,
        answer: Answer = None,
        rival: Rival = None,
        positions: Positions = "kept",
    ) -> "Question":
        """Read from strings or tokens; without an answer the most probable next token is explained.

        Raises:
            KVLensError: tokens that do not fit, no text behind a prompt that is no chat, an answer of no tokens, a rival that
                is the answer.
        """
        layout = prompt_layout(model, prompt)
        if text is not None:
            read_text = one_sequence(model, "text", text)
        elif isinstance(prompt, str | Tensor):
            raise KVLensError("text: expected what follows the prompt, up to where the answer begins; only a chat needs none")
        else:  # a chat ends with what begins the answer, which belongs to no unit
            layout, read_text = layout.first(len(layout.tokens) - 1), layout.tokens[-1:]
        if answer is None:
            answer = int(text_logits(model, layout.tokens, read_text)[-1].argmax())
        return cls(model, layout, read_text, *answer_and_rival(model, answer, rival), positions, Account())

    @property
    def prompt(self) -> Int[Tensor, " prompt_pos"]:
        """The prompt's tokens."""
        return self.layout.tokens

    @property
    def always_there(self) -> Bool[Tensor, " prompt_pos"]:
        """True at tokens that are part of the baseline and of no unit: BOS, and the marks and the question of a chat."""
        return always_there(self.layout)

    @property
    def n_read(self) -> int:
        """So many tokens a bias is read with, for its score."""
        longer = [len(tokens) for tokens in (self.answer, self.rival) if tokens is not None and len(tokens) > 1]
        one_token = len(longer) < (1 if self.rival is None else 2)
        return len(self.text) * one_token + sum(len(self.text) + n - 1 for n in longer)

    def units(self, by: By) -> list[Unit]:
        """The prompt cut into units, as :func:`kvlens.chat.prompt_units`."""
        return cut(self.model, self.layout, by)

    def rows(
        self,
        without: Sequence[Sequence[Span]] | Bool[Tensor, "row pos"],
        replacements: Sequence[Mapping[Span, str | Tensor | Sequence[int]]] | None = None,
    ) -> Counterfactuals:
        """Counterfactual prompts of this one."""
        return counterfactuals(self.model, self.prompt, without, replacements, positions=self.positions)

    def baseline(self) -> Counterfactuals:
        """The prompt of which only what is always there is left, in one row."""
        return self.rows(~self.always_there[None])

    def scores(self, prompts: Counterfactuals) -> Float[Tensor, " row"]:
        """log p(answer), less log p(rival), after each counterfactual prompt, in nats, everything recomputed."""
        return self._score(self.reads_after(prompts))

    def token_scores(self, prompts: Counterfactuals) -> Float[Tensor, "row answer_pos"]:
        """What the scores are sums of: log p of each of the answer's tokens, given those before it."""
        return self._by_token(self.reads_after(prompts), self.answer)

    def reads_after(self, prompts: Counterfactuals) -> LogitsAfter:
        """Reads a text after each counterfactual prompt, everything recomputed."""
        return lambda text, n: logits_after(self.model, prompts, text, n, on_tokens=self.account.count)

    def scores_under(self, biases: KVBias) -> Float[Tensor, " row"]:
        """The same with each bias of a batch in the prompt's place: the text alone is read."""
        return self._score(self.reads_under(biases))

    def reads_under(self, biases: KVBias) -> LogitsAfter:
        """Reads a text under each bias of a batch."""
        n_rows = biases.n_rows

        def read(text: Tensor, n_last: int) -> Tensor:
            self.account.count(n_rows * len(text))
            with self.model.kv_bias(biases):
                return self.model.logits_on(text.expand(n_rows, -1), n_last)

        return read

    def _score(self, read: LogitsAfter) -> Float[Tensor, " row"]:
        found = self.log_p(read, [self.answer] if self.rival is None else [self.answer, self.rival])
        return found[:, 0] if self.rival is None else found[:, 0] - found[:, 1]

    def log_p(self, read: LogitsAfter, answers: Sequence[Int[Tensor, " _"]]) -> Float[Tensor, "row answer"]:
        """The log-probability of each of several answers behind the text, in nats; those of one token share a reading."""
        shared = read(self.text, 1) if any(len(tokens) == 1 for tokens in answers) else torch.empty(0)
        found = []
        for tokens in answers:
            by_token = _log_p(shared, tokens) if len(tokens) == 1 else self._by_token(read, tokens)
            found.append(by_token.sum(dim=1))
        return torch.stack(found, dim=1)

    def _by_token(self, read: LogitsAfter, tokens: Int[Tensor, " n_last"]) -> Float[Tensor, "row n_last"]:
        return _log_p(read(torch.cat([self.text, tokens[:-1]]), len(tokens)), tokens)


def _log_p(logits: Float[Tensor, "row n_last d_vocab"], tokens: Int[Tensor, " n_last"]) -> Float[Tensor, "row n_last"]:
    log_p = logits.double().log_softmax(dim=-1).cpu()
    return log_p.gather(-1, tokens.cpu()[None, :, None].expand(len(log_p), -1, -1))[..., 0]


def answer_and_rival(
    model: KVModel, answer: object, rival: object, n: int | None = None
) -> tuple[Int[Tensor, " answer_pos"], Int[Tensor, " rival_pos"] | None]:
    """The tokens of both, or their first ``n``; KVLensError where they are the same: their difference would be zero."""
    own = answer_tokens(model, "answer", answer)[:n]
    other = None if rival is None else answer_tokens(model, "rival", rival)[:n]
    if other is not None and torch.equal(own, other):
        raise KVLensError(f"rival: it is the answer itself{', as far as it is read' if n else ''}; name another one, or none")
    return own, other


def answer_tokens(model: KVModel, what: str, given: object) -> Int[Tensor, " answer_pos"]:
    """An answer as token ids; a string is tokenized as it is, blanks in front included."""
    numbers = [given] if isinstance(given, int) else given  # a line of a batch has a list
    if isinstance(numbers, list) and all(type(number) is int for number in numbers):
        given = torch.tensor(numbers, dtype=torch.long)
    if isinstance(given, str) and not given.strip():
        raise KVLensError(f"{what}: expected at least one token, got {given!r}")
    return one_sequence(model, what, given)
