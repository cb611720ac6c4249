"""Repeated-token induction: a block of random tokens, again and again.

Each sequence draws a period p, uniform from ``length // 4`` to ``length // 2``, and p distinct tokens, and repeats them:

    x_i = block[i mod p]          the prediction after position i is scored where i >= p

There the token x_i stood at position i - p before, exactly once for each period that has passed, and what followed it then
follows it again: "... A B ... A" is answered by B, and the answer is never ambiguous because the tokens of a block differ.

What does not solve the task:

- *Bigram statistics*: every sequence draws its own block, so the token after A is, over sequences, any other token.
- *Position*: the answer stands p - 1 tokens back. Were p fixed, one plain layer could learn to look there. As it is drawn
  anew, a fixed place is right only for the few of the ``length // 4 + 1`` periods that divide its distance to the answer.
- *The bag of tokens seen*: it leaves p candidates. Counting shrinks it towards the end of a repetition (a token that has
  come twice is not next), which may lift a plain layer above chance, but says nothing of the order within the block.

So a token must be found by its predecessor: two plain layers, or one layer whose keys are shifted by one.

Source: KVSA sec. 3.1 and app. D (vocabulary 8,000, length 512).
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvlens.errors import KVLensError
from kvlens.tasks.batch import Batch, Task
from kvlens.tasks.checks import require_drawable, require_integers
from kvlens.tasks.drawing import draw_distinct


@dataclass(frozen=True)
class InductionTask(Task):
    """Predict a block of distinct random tokens as it comes round again.

    Attributes:
        vocab_size: tokens are drawn from this many; at least ``length // 2``.
        length: positions of a sequence.
    """

    name: ClassVar[str] = "induction"

    vocab_size: int = 8000
    length: int = 512

    def __post_init__(self):
        require_integers(self, vocab_size=4, length=8)
        if self.vocab_size < self.max_period:
            raise KVLensError(
                f"task 'induction': a block holds up to length // 2 = {self.max_period} distinct tokens, but vocab_size is "
                f"{self.vocab_size}; shorten length or enlarge vocab_size"
            )

    @property
    def min_period(self) -> int:
        """The shortest block."""
        return self.length // 4

    @property
    def max_period(self) -> int:
        """The longest block: at least half of the positions are scored."""
        return self.length // 2

    @property
    def n_positions(self) -> int:
        return self.length

    @property
    def d_input(self) -> int:
        return self.vocab_size

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        require_drawable(self, batch_size, generator, split)
        period = torch.randint(self.min_period, self.max_period + 1, (batch_size, 1), generator=generator)
        blocks = draw_distinct(self.vocab_size, batch_size, self.max_period, generator)
        positions = torch.arange(self.length + 1).expand(batch_size, -1)
        tokens = blocks.gather(1, positions % period)
        return Batch(tokens[:, :-1], tokens[:, 1:], positions[:, :-1] >= period)
