"""Bigrams that hold in one sequence, and n-grams that hold in all.

**Bigrams** with trigger tokens: what follows a trigger at its first use follows it from then on.

The alphabet is a-z, A-Z; its first letters (a-e) are triggers. A sequence is a stream of two kinds of blocks:

    with probability 1 - trigger_rate   one letter, uniform among the letters that are not triggers
    with probability trigger_rate       a trigger t, uniform among the triggers, and its follower f(t)

Each sequence draws its own f(t), uniform among the letters that are not triggers, so a trigger never follows a trigger. Reading
left to right, t *commits* on its first use to the letter that follows it there. A prediction is scored at each *committed*
trigger: at position i if x_i is a trigger that also occurred at an earlier position. Everything else is noise.

That is ``blocks``, the default distribution. ``markov`` is the one of ICLCA, a Markov chain: the letter after a letter that is
not a trigger is uniform over the *whole* alphabet, so triggers are rarer (five of 52 letters). Followers are drawn as above;
the paper leaves open whether a trigger may follow a trigger; if it may, loops such as "aaa" account for most scored positions.

Other sequences carry no information about f; without having seen the first use, the best guess is right once in
``n_letters - n_triggers`` times. The task thus tests what a converted prompt carries: `BigramTask.sample_with_prompt` scores
only predictions that the prompt determines.

Source: ICLCA sec. 6.2 (52 letters, five triggers).

**n-grams** from a fixed table, which a model must learn in its weights rather than in context.

A random table f, drawn once from ``table_seed``, gives the token that follows every ``order - 1`` tokens:

    x_{i+1} = f(x_{i-order+2}, ..., x_i)                 with probability 1 - restart_rate, and then scored
    x_{i+1} uniform                                      otherwise, and then not scored

The restarts are needed: a deterministic walk falls into a cycle after about the square root of ``vocab_size ** (order - 1)``
steps, and in a cycle the next token could be copied from the context. Held-out sequences are new walks on the same table.

To look up the table a model must combine the last ``order - 1`` tokens at one position, which for order 3 a shift by one does
before any attention, and store ``vocab_size ** (order - 1)`` answers.

Source: KVSA sec. 3.3 (3-grams).
"""

import string
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.checks import Seed, Within, checked
from kvlens.errors import KVLensError
from kvlens.tasks.task import Batch, Task, draw_until_scored, previous_occurrence

ALPHABET = string.ascii_letters
BLOCKS, MARKOV = "blocks", "markov"


@dataclass(frozen=True)
class BigramTask(Task):
    """Predict the letter that follows a trigger that was used before.

    Attributes:
        n_letters: token ids are below this; letter i is the i-th of a-z, A-Z.
        n_triggers: letters 0 to n_triggers - 1 are triggers.
        length: positions of a sequence.
        trigger_rate: probability that a letter that does not follow a trigger is a trigger, so that a share
            ``trigger_rate / (1 + trigger_rate)`` of all letters are triggers. Not used by ``markov``.
        law: "blocks" or "markov".
    """

    name: ClassVar[str] = "bigrams"

    n_letters: Annotated[int, Within(3)] = 52
    n_triggers: Annotated[int, Within(1)] = 5
    length: Annotated[int, Within(4)] = 128
    trigger_rate: Annotated[float, Within(0.01, 1.0)] = 0.25
    law: Literal["blocks", "markov"] = "blocks"

    def __post_init__(self):
        super().__post_init__()
        if self.n_letters > len(ALPHABET):
            raise KVLensError(f"task 'bigrams': there are {len(ALPHABET)} letters (a-z, A-Z), got n_letters={self.n_letters}")
        if self.n_triggers > self.n_letters - 2:
            raise KVLensError(
                f"task 'bigrams': of {self.n_letters} letters at least 2 must not be triggers, got n_triggers={self.n_triggers}"
            )

    @property
    def n_positions(self) -> int:
        return self.length

    @property
    def d_input(self) -> int:
        return self.n_letters

    @property
    def chance(self) -> float:
        return 1 / (self.n_letters - self.n_triggers)  # followers are no triggers

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)

        def draw() -> Batch:
            letters = (self._draw_chain if self.law == MARKOV else self._draw_letters)(batch_size, generator)
            inputs = letters[:, :-1]
            committed = previous_occurrence(inputs) >= 0
            return Batch(inputs, letters[:, 1:], committed & (inputs < self.n_triggers))

        return draw_until_scored(self, draw)

    @checked
    def sample_with_prompt(self, batch_size: int, generator: torch.Generator, prompt_length: int) -> Batch:
        """Draw sequences in which the prompt determines every scored prediction.

        Cut all three tensors at ``prompt_length``: the columns before it are the prompt, the rest the continuation. A position
        of the continuation is scored if its trigger was used in the prompt together with its follower. (A trigger that is the
        last letter of the prompt has not committed there, since its follower is the first letter of the continuation.)

        Args:
            batch_size: sequences.
            generator: on the CPU.
            prompt_length: letters of the prompt, from 2 to ``length - 1``.

        Raises:
            KVLensError: the prompt leaves no continuation, or nothing is scored.
        """
        if not 2 <= prompt_length < self.length:
            raise KVLensError(
                f"task 'bigrams': prompt_length must be from 2 to length - 1 = {self.length - 1}, got {prompt_length}"
            )

        def draw() -> Batch:
            batch = self.sample(batch_size, generator, "heldout")
            return batch._replace(scored=self._settled_by_prompt(batch.inputs, prompt_length))

        return draw_until_scored(self, draw)

    @checked
    def tokens_as_text(self, tokens: Int[Tensor, " pos"]) -> str:
        """Return the letters of one sequence."""
        return "".join(ALPHABET[token] for token in tokens.tolist())

    def _draw_letters(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, "batch pos_plus_1"]:
        """Draw sequences one letter longer than the inputs, for the last target."""
        shape = (batch_size, self.length + 1)
        is_pair = torch.rand(shape, generator=generator) < self.trigger_rate
        widths = 1 + is_pair.long()
        starts = widths.cumsum(1) - widths  # of each block; together the blocks fill the sequence and extend past its end
        is_trigger = torch.zeros(batch_size, 2 * shape[1], dtype=torch.bool).scatter_(1, starts, is_pair)[:, : shape[1]]

        triggers = torch.randint(self.n_triggers, shape, generator=generator)
        others = torch.randint(self.n_triggers, self.n_letters, shape, generator=generator)
        followers = torch.randint(self.n_triggers, self.n_letters, (batch_size, self.n_triggers), generator=generator)
        letters = torch.where(is_trigger, triggers, others)
        letters[:, 1:] = torch.where(is_trigger[:, :-1], followers.gather(1, triggers[:, :-1]), letters[:, 1:])
        return letters

    def _draw_chain(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, "batch pos_plus_1"]:
        """Draw one Markov chain per sequence: each letter depends on the one before."""
        drawn = torch.randint(self.n_letters, (batch_size, self.length + 1), generator=generator)
        followers = torch.randint(self.n_triggers, self.n_letters, (batch_size, self.n_triggers), generator=generator)
        columns = [drawn[:, 0]]
        for column in drawn[:, 1:].unbind(1):
            before = columns[-1]
            follower = followers.gather(1, before.clamp(max=self.n_triggers - 1)[:, None])[:, 0]
            columns.append(torch.where(before < self.n_triggers, follower, column))
        return torch.stack(columns, dim=1)

    def _settled_by_prompt(self, letters: Int[Tensor, "batch pos"], prompt_length: int) -> Bool[Tensor, "batch pos"]:
        """Positions at which the continuation uses a trigger whose follower is in the prompt."""
        is_use = letters[:, :, None] == torch.arange(self.n_triggers)
        shown = is_use[:, : prompt_length - 1].any(dim=1)
        settled = is_use[:, prompt_length:] & shown[:, None]
        return torch.cat([torch.zeros_like(letters[:, :prompt_length], dtype=torch.bool), settled.any(dim=2)], dim=1)


MAX_TABLE = 2**24


@dataclass(frozen=True)
class NgramTask(Task):
    """Predict the token that a fixed random table gives for the last ``order - 1`` tokens.

    Attributes:
        order: tokens of an n-gram, including the predicted one.
        vocab_size: number of token ids.
        length: positions of a sequence.
        table_seed: tasks with the same order, vocabulary and seed have the same table.
        restart_rate: probability that a token is random instead of from the table.
    """

    name: ClassVar[str] = "ngrams"

    order: Annotated[int, Within(2)] = 3
    vocab_size: Annotated[int, Within(2)] = 64
    length: Annotated[int, Within(2)] = 64
    table_seed: Seed = 0
    restart_rate: Annotated[float, Within(0.0, 0.9)] = 0.1

    def __post_init__(self):
        super().__post_init__()
        # an order above the table's number of bits is too large already, and its power need not be computed
        if self.order > MAX_TABLE.bit_length() or self.vocab_size ** (self.order - 1) > MAX_TABLE:
            raise KVLensError(
                f"task 'ngrams': the table has vocab_size ** (order - 1) entries, at most {MAX_TABLE}; got vocab_size="
                f"{self.vocab_size}, order={self.order}"
            )

    @property
    def n_positions(self) -> int:
        return self.length

    @property
    def d_input(self) -> int:
        return self.vocab_size

    def table(self) -> Int[Tensor, " context"]:
        """Return the token after each context, a number in base ``vocab_size`` whose last digit is the context's last token."""
        return _random_table(self.vocab_size ** (self.order - 1), self.vocab_size, self.table_seed)

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)
        return draw_until_scored(self, lambda: self._draw(batch_size, generator))

    def _draw(self, batch_size: int, generator: torch.Generator) -> Batch:
        n_given = self.order - 1
        shape = (batch_size, self.length + 1)
        from_table = torch.rand(shape, generator=generator) >= self.restart_rate
        from_table[:, :n_given] = False
        random_tokens = torch.randint(self.vocab_size, shape, generator=generator)

        columns = list(random_tokens[:, :n_given].unbind(1))
        context = torch.zeros(batch_size, dtype=torch.long)
        for column in columns:
            context = context * self.vocab_size + column
        table = self.table()
        for i in range(n_given, self.length + 1):  # each token depends on the ones before: the one loop over positions
            column = torch.where(from_table[:, i], table[context], random_tokens[:, i])
            columns.append(column)
            context = (context * self.vocab_size + column) % len(table)
        tokens = torch.stack(columns, dim=1)
        return Batch(tokens[:, :-1], tokens[:, 1:], from_table[:, 1:])


@lru_cache(maxsize=4)
def _random_table(n_contexts: int, vocab_size: int, seed: int) -> Tensor:
    return torch.randint(vocab_size, (n_contexts,), generator=torch.Generator().manual_seed(seed))
