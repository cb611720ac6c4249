"""Step 2, and the runs of all others: how a response is made, and what the model says under an intervention, each run once.

A response is made token by token, greedily, up to one that ends it. Everything up to the prompt's last token is a bias; the
last token and the response are the text that reads it. An intervention is the bias of a prompt without some units (steps 3 to
6), or a mixture of two biases (step 7): in some parts what the whole prompt leaves there, in the others what the prompt without
the cause leaves. Exchanging a set and keeping its complement are the same run.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens import KVBias, KVModel, convert_prompt, counterfactuals
from kvlens.analyses.attribution.terms import hidden_from_text
from kvlens.analyses.bias.exchange import Exchange, shifts
from kvlens.arguments import Positions
from kvlens.conversion import Counterfactuals, converted_rows
from kvlens.explanation.claims import walk
from kvlens.memory import NUMBERS_PER_PASS
from kvlens.model import asks_for_positions_alone
from kvlens.texts import Response, Word

Key = tuple[object, ...]
IndexSet = tuple[int, ...]
"""A set of units, or of layers, by number."""
PASS = 40
"""The overhead of a pass in tokens, for estimates of progress (SmolLM2, one thread of a busy machine, 1 to 8 rows: 40 to 62
behind 300 tokens, 31 to 41 behind 2,000)."""
GUESSED, LOOKED_UP = 3, 3
"""How many tokens of a text are guessed at most, and by how many of its last ones. (SmolLM2, texts of four questions, by what a
pass of so many tokens takes: with 1 to 6 guesses 0.67 to 0.70 of the time without.)"""
MORE_TOKENS, MOST_MORE_TOKENS = 16, 32
"""A text that is said instead is at least 16 tokens longer than the response and then ends with its sentence; it is at most 32
tokens longer."""
ENDS = (".", "!", "?", "\n", "\u3002")


def stop_tokens(model: KVModel) -> frozenset[int]:
    """The tokens that end a response: the tokenizer's end of text, and those of the model's generation settings."""
    found: set[int] = set()
    original = getattr(model, "original_model", None)
    for source in (model.tokenizer, getattr(original, "generation_config", None)):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [] if ids is None else [ids])
    return frozenset(found)


def is_end(model: KVModel, ends: Sequence[str] = ()) -> Callable[[list[int]], bool]:
    """Whether a response ends with its last token: a stop token, or one whose text ends so."""
    stops, tokenizer = stop_tokens(model), model.tokenizer

    def ended(text: list[int]) -> bool:
        return text[-1] in stops or (tokenizer is not None and str(tokenizer.decode(text[-1:])).endswith(tuple(ends)))

    return ended


class Guesses:
    """What followed the last tokens of a text elsewhere: in other texts, or in itself.

    Args:
        texts: that are looked up.
    """

    def __init__(self, texts: Iterable[list[int]]):
        self._behind: dict[tuple[int, ...], tuple[list[int], int]] = {}
        for text in texts:
            self.learn(text, 1)

    def learn(self, text: list[int], start: int) -> None:
        """Remember what a text has from a place on; it may grow later."""
        for at, n in itertools.product(range(max(start, 1), len(text)), range(1, LOOKED_UP + 1)):
            self._behind[tuple(text[max(0, at - n) : at])] = text, at

    def after(self, text: list[int], n_most: int) -> list[int]:
        """What may follow a text: what stands where most of its last tokens stand."""
        known = (self._behind.get(tuple(text[-n:])) for n in range(LOOKED_UP, 0, -1))
        other, at = next(filter(None, known), ([], 0))
        return other[at : at + max(0, min(n_most, GUESSED))]


@dataclass
class _Row:
    """A text that is generated: its tokens, those that are still to be read, and what may follow these."""

    text: list[int]
    unread: list[int]
    guessed: list[int] = field(default_factory=list)
    ended: bool = False

    def go_on(self, said: list[int], n_most: int, stops: Callable[[list[int]], bool]) -> int:
        """Add what is said behind what was read, and behind each guess that is right; returns how many guesses are not."""
        n_left = len(self.guessed) + 1
        for guess, token in itertools.zip_longest(self.guessed, said):
            self.text.append(token)
            n_left -= 1
            self.ended = len(self.text) >= n_most or stops(self.text)
            if self.ended or guess != token:
                break
        self.unread = self.text[-1:]
        return n_left


@torch.no_grad()
def greedy(
    model: KVModel,
    biases: KVBias,
    first: Int[Tensor, "*row first_pos"],
    forced: Int[Tensor, "row n_forced"],
    n_forced: Int[Tensor, " row"],
    n_most: int,
    stops: Callable[[list[int]], bool],
    on_tokens: Callable[[int], None] = lambda n: None,
    alike: Iterable[list[int]] = (),
) -> list[list[int]]:
    """Greedy texts under each bias of a batch, whose first tokens are given.

    All rows are read together, token by token: a row whose first tokens are given is fed with these until they end. Where
    hidden tokens may stand between others, a pass reads more: all that is given, and behind it what may follow
    (:class:`Guesses`), which is hidden again from where the model says something else; and rows that have ended are left out.

    Args:
        biases: of what comes before, a batch, or one for all rows.
        first: tokens between that and the texts, which are read and are no part of these; of all rows, or of each.
        forced: how the texts begin; of row i only the first ``n_forced[i]``.
        n_most: tokens of a text.
        stops: ``stops(tokens)`` says whether a text ends there.
        on_tokens: called with the number of tokens that each pass read for texts that had not ended.
        alike: texts that they may be like in parts.

    Returns:
        Row by row the tokens, the forced ones first.
    """
    texts = [row[:n] for row, n in zip(forced.tolist(), n_forced.tolist(), strict=True)]
    every = [_Row(text, [*before, *text]) for before, text in zip(first.expand(len(texts), -1).tolist(), texts, strict=True)]
    ahead, rows = asks_for_positions_alone(model) and not model.cfg.needs_own_cache, every
    cache: Any = None
    guesses = Guesses([*alike, *texts]) if ahead else None
    while rows:
        with model.holding(biases):
            while sum(not row.ended for row in rows) > (len(rows) // 2 if ahead else 0):
                cache = _read(model, rows, cache, n_most, stops, on_tokens, guesses)
        going = torch.tensor([i for i, row in enumerate(rows) if not row.ended], dtype=torch.long)
        rows = [row for row in rows if not row.ended]
        if rows:
            biases = biases if biases.batch_size is None else biases.select_prompts(going)
            cache.entries = [type(of)(of.past_keys[going], of.past_values[going]) for of in cache.entries]
            cache.previous_attention_mask = cache.previous_attention_mask[going]
    return [row.text for row in every]


def _read(
    model: Any, rows: list[_Row], cache: Any, n_most: int, stops: Any, on_tokens: Callable[[int], None], guesses: Guesses | None
) -> Any:
    """One pass over what is to be read of each row, and over guesses, if there may be any; returns the cache."""
    if guesses is None:
        shared = min(len(row.unread) for row in rows)
        fed = [row.unread[:shared] for row in rows]
    else:
        for row in rows:
            row.guessed = [] if row.ended else guesses.after(row.text, n_most - 1 - len(row.text))
        fed = [[] if row.ended else row.unread + row.guessed for row in rows]
    on_tokens(sum(len(read) for row, read in zip(rows, fed, strict=True) if not row.ended))
    said, cache = _most_probable(model, fed, cache, None if guesses is None else 1 + max(len(row.guessed) for row in rows))
    for i, (row, read) in enumerate(zip(rows, fed, strict=True)):
        if row.ended or len(read) < len(row.unread):
            row.unread = row.unread[len(read) :] or row.unread
            continue
        n_before = len(row.text)
        n_wrong = row.go_on(said[i][-1 - len(row.guessed) :], n_most, stops)
        if guesses is not None:
            guesses.learn(row.text, n_before)
            cache.previous_attention_mask[i, cache.previous_attention_mask.shape[1] - n_wrong :] = 0
    return cache


def _most_probable(model: Any, fed: list[list[int]], cache: Any, n_last: int | None) -> tuple[list[list[int]], Any]:
    """The most probable token behind each of the last ``n_last`` tokens of every row; None: rows are equally long, and only the
    last counts. And the cache."""
    n, device = max(map(len, fed)), model.cfg.device
    tokens = torch.tensor([[0] * (n - len(read)) + read for read in fed], device=device)
    if n_last is None:
        logits, cache = model.next_logits(tokens, cache)
        return logits[:, None].argmax(dim=-1).tolist(), cache
    cache = model.empty_cache(len(fed)) if cache is None else cache
    mask = torch.tensor([[0] * (n - len(read)) + [1] * len(read) for read in fed], device=device)
    return model.logits_ahead(tokens, mask, cache, n_last).argmax(dim=-1).tolist(), cache


def responses(model: KVModel, prompts: Sequence[Int[Tensor, " _"]], n_most: int, ends: Sequence[str] = ()) -> list[list[int]]:
    """The greedy responses to prompts, which are read together, with the token that ends each.

    Args:
        prompts: of at least two tokens each.
        n_most: tokens of a response.
        ends: a response also ends with a token that ends so.
    """
    biases = KVBias.batch([convert_prompt(model, prompt[:-1]) for prompt in prompts])
    last = torch.stack([prompt[-1:] for prompt in prompts])
    nothing, none = last.new_zeros(len(prompts), 0), torch.zeros(len(prompts), dtype=torch.long)
    return greedy(model, biases, last, nothing, none, n_most, is_end(model, ends))


def without_last(bias: KVBias, n: int) -> KVBias:
    """The bias of a prompt without its last ``n`` tokens, from that of the whole: of softmax attention without a shift."""
    cut = (layer.of_attention(lambda keys: keys.with_keys(lambda x: x[:, :, :-n]).further(-n)) for layer in bias.layers)
    n_tokens, offset = bias.n_prompt_tokens - n, bias.position_offset - n
    return replace(bias, layers=tuple(cut), n_prompt_tokens=n_tokens, position_offset=offset, record=bias.fit)


@dataclass(frozen=True)
class Outcome:
    """What the model says under one intervention.

    Attributes:
        falls: of each token of the response, in nats: its log-probability with the whole prompt minus that under it.
        differs: how many tokens it would say another for.
        firm: position of the firm difference; None where there is none.
        text: what it says then; None where there is no firm difference, or where nobody asked.
        words: of that text.
    """

    falls: Float[Tensor, " pos"]
    differs: int
    firm: int | None
    text: str | None = None
    words: tuple[Word, ...] | None = None


@dataclass
class ExplanationProgress:
    """How far an explanation is, by the tokens that were read and `PASS` more for each pass.

    Attributes:
        tell: called with a description of the step and the fraction of everything that is done, about.
    """

    tell: Callable[[str, float], None]
    _what: str = ""
    _done: float = 0.0
    _began: float = 0.0
    _cost: float = 1.0
    _from: float = 0.0
    _to: float = 0.0

    def begin(self, what: str, cost: float | int, later: float | int = 0.0, anew: bool = False) -> None:
        """Begin a step that costs about so much, as do the steps behind it; anew: nothing counts that was done before."""
        self._from = 0.0 if anew else self._now()
        self._to = self._from + (0.99 - self._from) * cost / (cost + later)
        self._what, self._began, self._cost = what, self._done, cost
        self.tell(what, self._from)

    def count(self, n_tokens: int) -> None:
        """Count a pass that read so many tokens."""
        self._done += n_tokens + PASS
        if self._what:
            self.tell(self._what, self._now())

    def _now(self) -> float:
        return self._from + (self._to - self._from) * min(1.0, (self._done - self._began) / self._cost)


@dataclass
class Runs:
    """Interventions on one prompt, by what is exchanged.

    Attributes:
        model: that is asked.
        prompt: [pos], without its last token.
        last: the last token, [1].
        asked: True at those of the question, [pos].
        one_sentence: whether a response ends with a sentence, and what is said instead ends there, too.
        on_tokens: called with the number of tokens that a pass read.
        on_without: called with units and what came of the response's tokens without them, their gap kept, before the text that
            is said then is generated.
        spent: how many passes were made and how many tokens they read, by step.
    """

    model: KVModel
    prompt: Int[Tensor, " pos"]
    last: Int[Tensor, " 1"]
    asked: Bool[Tensor, " pos"]
    one_sentence: bool = False
    on_tokens: Callable[[int], None] = lambda n: None
    on_without: Callable[[frozenset[int], Outcome], None] = lambda units, now: None
    spent: dict[str, tuple[int, int]] = field(default_factory=dict)
    _step: str = "answer"
    _found: dict[Key, Outcome] = field(default_factory=dict)
    _waiting: list[tuple[list[Key], KVBias]] = field(default_factory=list)
    _prefixes: dict[int, KVBias] = field(default_factory=dict)
    _read: list[tuple[list[Key], KVBias]] = field(default_factory=list)
    _texts_wait: bool = False
    _said: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.bias = convert_prompt(self.model, self.prompt)
        self._stops, self._ends_sentence = is_end(self.model), is_end(self.model, ENDS)
        self._ends = self._ends_sentence if self.one_sentence else self._stops
        n_before, limited = len(self.prompt) + len(self.last), self.model.cfg.has_position_limit
        self._room = self.model.cfg.n_ctx - n_before + 1 if limited else 2**20
        self.count(len(self.prompt))

    def answer(self, n_most: int, on_text: Callable[[list[int]], None] = lambda tokens: None) -> Int[Tensor, " pos"]:
        """The greedy response, with the token that ends it, of at most so many tokens, or up to the end of a sentence.

        Args:
            n_most: so many.
            on_text: called with the tokens so far.
        """

        def ends(text: list[int]) -> bool:
            on_text(text)
            return self._ends(text)

        tokens = greedy(
            self.model,
            self.bias.repeat(1),
            self.last,
            self.last.new_zeros(1, 0),
            torch.zeros(1, dtype=torch.long),
            min(n_most, self._room),
            ends,
            self.count,
            [self.prompt.tolist()],
        )[0]
        return torch.tensor(tokens, device=self.last.device)

    def ends(self, response: Int[Tensor, " pos"]) -> bool:
        """Whether a response ends with its last token, or goes on."""
        return self._ends(response.tolist())

    def begin(self, response: Response, own: Bool[Tensor, "unit pos"]) -> Float[Tensor, " pos"]:
        """Choose the response that all runs are about; returns its tokens' log-probabilities with the whole prompt.

        Args:
            response: what the model says.
            own: True at the positions of each unit.
        """
        self.response, self.own = response, own
        self._said = [self.prompt.tolist(), response.tokens.tolist()]
        self._reading = torch.cat([self.last, response.tokens[:-1]])
        self.log_p = self._log_p(self.bias.repeat(1))[0]
        return self.log_p.gather(-1, response.tokens.cpu()[:, None])[:, 0]

    def replies(self, texts: Sequence[Int[Tensor, " _"]]) -> list[float]:
        """The log-probability of each text right behind the prompt."""
        n = max(map(len, texts))
        rows = torch.stack([torch.cat([self.last, text[:-1], text.new_zeros(n - len(text))]) for text in texts])
        self.count(sum(map(len, texts)))
        with self.model.holding(self.bias.repeat(len(texts))):
            log_p = self.model.logits_on(rows, n).double().log_softmax(dim=-1)
        return [float(row[range(len(text)), text].sum()) for row, text in zip(log_p, texts, strict=True)]

    def without(
        self,
        sets: Iterable[Iterable[int]],
        gap: Positions = "kept",
        wants_text: Callable[[Outcome], bool] = lambda now: True,
    ) -> list[Outcome]:
        """What the model says without each set of units, with what it says in their place where that is worth generating."""
        return self.without_these([(units, gap) for units in sets], wants_text)

    def without_these(
        self, sets: Iterable[tuple[Iterable[int], Positions]], wants_text: Callable[[Outcome], bool] = lambda now: True
    ) -> list[Outcome]:
        """Do the same for sets whose gaps are kept or closed; the texts of all are generated together."""
        keys = [(gap, frozenset(units)) for units, gap in sets]
        found = self._found
        new = [key for key in dict.fromkeys(keys) if key not in found or self._lacks_text(key, wants_text)]
        self._under(self._without(new), wants_text)
        return [found[key] for key in keys]

    @contextlib.contextmanager
    def texts_together(self) -> Iterator[None]:
        """Give outcomes inside no text yet; the texts of all are generated together at the end, and have to be asked for again.

        A pass for one token takes about as long for eight texts as for one.
        """
        self._texts_wait = True
        try:
            yield
        finally:
            self._texts_wait = False
        self._say()

    def hidden(self, sets: Iterable[Iterable[int]]) -> list[Outcome]:
        """What becomes of the response, without texts, when it does not read the positions of units; others have read them."""
        if any(layer.attention is None or layer.state is not None for layer in self.bias.layers) or self.bias.kind is None:
            self.count(len(self.prompt))  # is read again
        gone = self._positions_of(sets)
        return [now for biases in hidden_from_text(self.model, self.prompt, gone, self.bias) for now in self._walked(biases)]

    def _positions_of(self, sets: Iterable[Iterable[int]]) -> Bool[Tensor, "set pos"]:
        """True at the positions of each set of units."""
        return torch.stack([self.own[sorted(units)].any(dim=0) for units in sets])

    def _without(self, keys: list[tuple[Positions, frozenset[int]]]) -> Iterator[tuple[list[Key], KVBias]]:
        for gap in ("kept", "closed"):
            some = [key for key in keys if key[0] == gap]
            if some:
                rows = self._rows([units for _, units in some], gap)
                for which, biases in converted_rows(self.model, rows, on_tokens=self.count, prefixes=self._prefixes):
                    yield [some[i] for i in which.tolist()], biases

    def _rows(self, sets: Iterable[Iterable[int]], gap: Positions) -> Counterfactuals:
        """The prompt without each set of units. What stands in front of a gap is not read again where the keys of the whole
        prompt are those of its beginnings."""
        rows = counterfactuals(self.model, self.prompt, self._positions_of(sets), positions=gap)
        if asks_for_positions_alone(self.model) and not shifts(self.bias):
            starts = set(rows.first_changes().tolist()) - set(self._prefixes)
            self._prefixes |= {start: without_last(self.bias, len(self.prompt) - start) for start in starts if start}
        return rows

    def donor(self, units: Sequence[int]) -> KVBias:
        """The bias of the prompt without units, their gap kept, with as many keys as that of the whole prompt."""
        key: tuple[Positions, frozenset[int]] = "kept", frozenset(units)
        known = [biases.select_prompt(keys.index(key)) for keys, biases in self._read if key in keys]
        bias = (known or [biases.select_prompt(0) for _, biases in self._without([key])])[0]
        if bias.kind != "virtual_keys":
            return bias
        return bias.map_layers(lambda layer: layer.of_attention(lambda part: part.widened(self.bias.d_phi)))

    def exchanged(
        self, exchange: Exchange, sets: Iterable[Iterable[int]], wants_text: Callable[[Outcome], bool] = lambda now: True
    ) -> list[Outcome]:
        """What the model says with each set of parts exchanged for the other prompt's.

        Args:
            exchange: of the whole prompt's bias.
            sets: of its parts, by number.
            wants_text: whether the text that is said instead is worth generating.
        """
        keys = [(exchange, frozenset(parts)) for parts in sets]
        new = [key for key in dict.fromkeys(keys) if key not in self._found or self._lacks_text(key, wants_text)]
        chosen, at_once = exchange.rows([parts for _, parts in new]), min(exchange.at_once, self._rows_at_once())
        passes = (slice(start, start + at_once) for start in range(0, len(new), at_once))
        self._under(((list[Key](new[some]), exchange.biases(chosen[some])) for some in passes), wants_text)
        return [self._found[key] for key in keys]

    def _lacks_text(self, key: Key, wants_text: Callable[[Outcome], bool]) -> bool:
        """Whether a text is wanted, and neither generated nor waiting."""
        now = self._found[key]
        lacks = now.firm is not None and now.text is None and wants_text(now)
        return lacks and not any(key in keys for keys, _ in self._waiting)

    def _rows_at_once(self) -> int:
        return max(1, NUMBERS_PER_PASS // max(1, self.bias.num_parameters))

    def count(self, n_tokens: int) -> None:
        """Count a pass that read so many tokens."""
        passes, tokens = self.spent.get(self._step, (0, 0))
        self.spent[self._step] = passes + 1, tokens + n_tokens
        self.on_tokens(n_tokens)

    @property
    def n_tokens(self) -> int:
        """How many tokens were read so far."""
        return sum(tokens for _, tokens in self.spent.values())

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Count what is read inside as a step of this name."""
        before, self._step = self._step, name
        try:
            yield
        finally:
            self._step = before

    def _log_p(self, biases: KVBias) -> Float[Tensor, "row pos d_vocab"]:
        assert biases.batch_size is not None
        self.count(biases.batch_size * len(self._reading))
        with self.model.holding(biases):
            logits = self.model.logits_on(self._reading.expand(biases.batch_size, -1), len(self._reading))
        return logits.double().log_softmax(dim=-1).cpu()

    def _under(
        self, readings: Iterable[tuple[list[Key], KVBias]], wants_text: Callable[[Outcome], bool] = lambda now: True
    ) -> None:
        """Find what the model says under each bias; texts are generated together, as many as there is room for."""
        for keys, biases in readings:
            known = [self._found[key] for key in keys if key in self._found]
            here = known if len(known) == len(keys) else self._walked(biases)
            self._found.update(zip(keys, here, strict=True))
            for key, now in zip(keys, here, strict=True):
                if key[0] == "kept":
                    self.on_without(key[1], now)  # type: ignore[arg-type]
            said = [i for i, now in enumerate(here) if now.firm is not None and wants_text(now)]
            if said:
                of_these = biases if len(said) == len(here) else biases.select_prompts(torch.tensor(said))
                if sum(len(keys) for keys, _ in self._waiting) + len(said) > 2 * self._rows_at_once():
                    self._say()
                self._waiting.append(([keys[i] for i in said], of_these))
        if not self._texts_wait:
            self._say()

    def _walked(self, biases: KVBias) -> list[Outcome]:
        walked, n = walk(self.log_p, self._log_p(biases), self.response.tokens.cpu()), len(self.response.tokens)
        return [
            Outcome(falls, int(differs), int(firm) if firm < n else None)
            for falls, differs, firm in zip(walked.falls, walked.differs, walked.firm, strict=True)
        ]

    def _say(self) -> None:
        """Add the texts that are said from the firm difference on, what stands before it given."""
        if not self._waiting:
            return
        keys, n = [key for some, _ in self._waiting for key in some], len(self.response.tokens)
        enough = n if self.one_sentence else n + MORE_TOKENS
        prompt = torch.cat([self.prompt, self.last])

        def ends(text: list[int]) -> bool:
            return self._stops(text) or (len(text) >= enough and self._ends_sentence(text))

        firm = torch.tensor([self._found[key].firm for key in keys])
        forced = self.response.tokens.expand(len(keys), -1)
        biases = KVBias.batch([biases for _, biases in self._waiting])
        self._waiting = []
        self._read.append((keys, biases))  # for :meth:`donor`, the newest that hold no more than a pass may
        while sum(len(some) for some, _ in self._read) > self._rows_at_once():
            del self._read[0]
        most = min(n + MOST_MORE_TOKENS, self._room)
        self._said += greedy(self.model, biases, self.last, forced, firm, most, ends, self.count, self._said)
        texts = self._said[-len(keys) :]
        for key, text in zip(keys, texts, strict=True):
            said = Response.of(self.model, prompt, torch.tensor(text, device=prompt.device))
            self._found[key] = replace(self._found[key], text=said.text, words=said.words)
