"""Induction, and its step repeated k times.

**Induction**: a token that occurred earlier is followed by the token that followed it then. Two distributions, and a mixture.

``first_repeat`` is the one of KVSA: random tokens, scored once, at the first repeat. ``repeated_block``, the default, repeats a
block of random tokens and scores at least half of the positions. ``both`` draws every sequence from one of the two, with equal
probability.

A sequence of ``repeated_block`` draws a period p, uniform from ``length // 4`` to ``length // 2``, and p distinct tokens, and
repeats them:

    x_i = block[i mod p]          the prediction after position i is scored where i >= p

There the token x_i occurred at position i - p, exactly once in each earlier period, and is followed by the same token again:
"... A B ... A" is answered by B, and the answer is unambiguous because the tokens of a block are distinct.

What does not solve the task:

- *Bigram statistics*: every sequence draws its own block, so across sequences the token after A may be any other token.
- *Position*: the answer is p - 1 tokens back. If p were fixed, one plain layer could learn to look there. Since p is random,
  a fixed position is right only for the few of the ``length // 4 + 1`` periods that divide its distance to the answer.
- *The bag of tokens seen*: it leaves p candidates. Counting reduces their number towards the end of a repetition (a token that
  has occurred twice is not next), which may lift a plain layer above chance, but says nothing about the order in the block.

So a token must be found by its predecessor: two plain layers, or one layer whose keys are shifted by one. ``first_repeat``
requires the same, with few tokens to search (1.25 sqrt(length) on average); the shortest text is "A B A".

A sequence of ``first_repeat`` first draws a pool of ``length`` distinct tokens from the vocabulary, then its tokens one by one,
uniform over the pool except for the token just drawn. Nothing repeats for a while (the birthday problem). The one scored
prediction is at the first token that occurred before: it is followed by the token that followed it then. The text continues by
the same rule, every repeated token being followed by its last follower, but a causal model is scored before that.

Two faults of the paper's script are corrected here. After the scored position, a token that was followed only by a token seen
before is followed by -1 in the script. And a sequence without a repeat is drawn again (in the script the lines that would do so
come after its ``return``).

Source: KVSA sec. 3.1 and app. D (vocabulary 8,000, length 512; the script draws its 512 tokens from 7,989).

**k hops**: follow the induction step k times. One hop goes from a token to the token after its previous occurrence:

    find^1(i) = max { j <= i : x_{j-1} = x_i }         find^k(i) = find^1(find^{k-1}(i))         target_i = x_{find^k(i)}

With k = 1 the target is the answer of induction; for larger k the step is repeated from that answer. A position is scored if
all k hops exist; the paper gives the other positions a null token, here they are not scored. The target is a function of
x_0 ... x_i and in general not the next token.

Tokens are uniform, except that no token occurs twice in a row: find^1(i) would be i there, and the hops would not move.

``mixed`` trains one model for all numbers of hops up to k: each sequence draws its own, and a token before the text says it
(``vocab_size + hops - 1``), as in the models of the source.

Source: Sanford, Hsu, Telgarsky 2024, Transformers, Parallel Computation, and Logarithmic Depth (their hop_k; depth about
log2 k is needed); KVSA app. H.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.checks import Within
from kvlens.errors import KVLensError
from kvlens.tasks.task import Batch, Task, draw_distinct, draw_until_scored, previous_occurrence

BLOCK, FIRST, BOTH = "repeated_block", "first_repeat", "both"


@dataclass(frozen=True)
class InductionTask(Task):
    """Predict the token after a token that occurred earlier.

    Attributes:
        vocab_size: number of token ids; at least ``length // 2`` for blocks, ``length`` for first repeats.
        length: positions of a sequence, at least 8 for blocks; three are "A B A" for first repeats.
        law: which tokens are predicted: in repeated blocks, at first repeats, or both.
    """

    name: ClassVar[str] = "induction"

    vocab_size: Annotated[int, Within(4)] = 8000
    length: Annotated[int, Within(3)] = 512
    law: Literal["repeated_block", "first_repeat", "both"] = "repeated_block"

    def __post_init__(self):
        super().__post_init__()
        words, most = f"a block holds up to length // 2 = {self.max_period}", self.max_period
        if self.law != BLOCK:
            words, most = f"a sequence of law {self.law!r} draws from up to length = {self.length}", self.length
        if self.vocab_size < most:
            raise KVLensError(
                f"task 'induction': {words} distinct tokens, but vocab_size is {self.vocab_size}; shorten length or enlarge "
                "vocab_size"
            )

    @property
    def min_period(self) -> int:
        """The shortest block."""
        return self.length // 4

    @property
    def max_period(self) -> int:
        """The longest block: at least half of the positions of a repeated block are scored."""
        return self.length // 2

    @property
    def n_positions(self) -> int:
        return self.length

    @property
    def d_input(self) -> int:
        return self.vocab_size

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - 1)  # no token follows itself

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)
        if self.law == FIRST:
            return self._draw_first_repeats(batch_size, generator)
        blocks = self._draw_blocks(batch_size, generator)
        if self.law == BLOCK:
            return blocks
        repeats = self._draw_first_repeats(batch_size, generator)
        is_block = torch.rand(batch_size, 1, generator=generator) < 0.5
        return Batch(*(torch.where(is_block, ours, theirs) for ours, theirs in zip(blocks, repeats, strict=True)))

    def _draw_blocks(self, batch_size: int, generator: torch.Generator) -> Batch:
        period = torch.randint(self.min_period, self.max_period + 1, (batch_size, 1), generator=generator)
        blocks = draw_distinct(self.vocab_size, batch_size, self.max_period, generator)
        positions = torch.arange(self.length + 1).expand(batch_size, -1)
        tokens = blocks.gather(1, positions % period)
        return Batch(tokens[:, :-1], tokens[:, 1:], positions[:, :-1] >= period)

    def _draw_first_repeats(self, batch_size: int, generator: torch.Generator) -> Batch:
        indices, is_first = _walk(batch_size, self.length, generator)
        while not bool(is_first.any(dim=1).all()):
            missing = ~is_first.any(dim=1)
            indices[missing], is_first[missing] = _walk(int(missing.sum()), self.length, generator)
        tokens = draw_distinct(self.vocab_size, batch_size, self.length, generator).gather(1, indices)
        return Batch(tokens[:, :-1], tokens[:, 1:], is_first)


def _walk(
    batch_size: int, length: int, generator: torch.Generator
) -> tuple[Int[Tensor, "batch pos_plus_1"], Bool[Tensor, "batch pos"]]:
    """Draw indices into the pool, all rows at once, one position after another, since each token depends on all before it."""
    drawn = torch.randint(length - 1, (batch_size, length + 1), generator=generator)
    rows = torch.arange(batch_size)
    follower = torch.full((batch_size, length), -1)  # the last follower of each pool index; -1 if there is none
    last = torch.full((batch_size,), length)  # before the text: an index outside the pool
    forced = torch.full((batch_size,), -1)  # the follower of a repeated token
    columns, repeats = [], []
    for column in drawn.unbind(1):
        column = column + (column >= last).long()  # any index but the last; pools are shuffled, so the first is uniform
        index = torch.where(forced >= 0, forced, column)
        follows = follower[rows, index]
        is_repeat = (forced < 0) & (follows >= 0)
        forced = torch.where(is_repeat, follows, -1)
        has_last = last < length
        follower[rows[has_last], last[has_last]] = index[has_last]
        columns.append(index)
        repeats.append(is_repeat)
        last = index
    repeat = torch.stack(repeats[:-1], dim=1)
    return torch.stack(columns, dim=1), repeat & (repeat.cumsum(dim=1) == 1)


@dataclass(frozen=True)
class HopsTask(Task):
    """Predict the token that k hops of induction lead to.

    Attributes:
        k: number of hops; the largest one if ``mixed``.
        mixed: whether each sequence has a number of hops of its own, uniform from 1 to k, which its first token says.
        vocab_size: number of token ids; a hop goes back by about as many positions.
        length: positions of a sequence, more than k; a first token that says the number of hops is one more.
    """

    name: ClassVar[str] = "hops"

    k: Annotated[int, Within(1)] = 4
    vocab_size: Annotated[int, Within(3)] = 16
    length: Annotated[int, Within(3)] = 256
    mixed: bool = False

    @property
    def n_positions(self) -> int:
        return self.length + self.mixed

    @property
    def d_input(self) -> int:
        return self.vocab_size + self.k * self.mixed

    @property
    def chance(self) -> float:
        return 1 / (self.vocab_size - (self.k == 1))  # one hop never leads to the token itself, several may

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        self.check_drawable(batch_size, generator, split)

        def draw() -> Batch:
            tokens = self._draw_tokens(batch_size, generator)
            hops = torch.randint(self.k, (batch_size, 1), generator=generator) + 1 if self.mixed else None
            found = self._find(tokens, hops)
            scored = found >= 0
            targets = torch.where(scored, tokens.gather(1, found.clamp(min=0)), 0)
            if hops is None:
                return Batch(tokens, targets, scored)
            # before the text there is nothing to predict
            return Batch(torch.cat([self.vocab_size + hops - 1, tokens], dim=1), F.pad(targets, (1, 0)), F.pad(scored, (1, 0)))

        return draw_until_scored(self, draw)

    def _draw_tokens(self, batch_size: int, generator: torch.Generator) -> Int[Tensor, "batch pos"]:
        """Add up steps of 1 to vocab_size - 1 modulo vocab_size, so that each token differs from the one before."""
        steps = torch.randint(1, self.vocab_size, (batch_size, self.length), generator=generator)
        steps[:, 0] = torch.randint(self.vocab_size, (batch_size,), generator=generator)
        return steps.cumsum(dim=1) % self.vocab_size

    def _find(self, tokens: Int[Tensor, "batch pos"], hops: Int[Tensor, "batch 1"] | None) -> Int[Tensor, "batch pos"]:
        """find^k of every position, or find^hops of every sequence; -1 if a hop does not exist."""
        previous = previous_occurrence(tokens)
        one_hop = torch.where(previous >= 0, previous + 1, -1)
        found = one_hop
        for made in range(1, self.k):
            further = torch.where(found >= 0, one_hop.gather(1, found.clamp(min=0)), -1)
            found = further if hops is None else torch.where(hops > made, further, found)
        return found
