"""Induction: a token that occurred earlier is followed by the token that followed it then. Two distributions, and a mixture.

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
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvlens.checks import Within
from kvlens.errors import KVLensError
from kvlens.tasks.batch import Batch, Task
from kvlens.tasks.checks import require_drawable
from kvlens.tasks.drawing import draw_distinct

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
        if self.law != FIRST and self.length < 8:
            raise KVLensError(f"task 'induction': repeated blocks need a length of at least 8, got {self.length}")
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

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        require_drawable(self, batch_size, generator, split)
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
