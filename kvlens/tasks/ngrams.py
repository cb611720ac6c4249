"""n-grams from a fixed table, which a model must learn in its weights rather than in context.

A random table f, drawn once from ``table_seed``, gives the token that follows every ``order - 1`` tokens:

    x_{i+1} = f(x_{i-order+2}, ..., x_i)                 with probability 1 - restart_rate, and then scored
    x_{i+1} uniform                                      otherwise, and then not scored

The restarts are needed: a deterministic walk falls into a cycle after about the square root of ``vocab_size ** (order - 1)``
steps, and in a cycle the next token could be copied from the context. Held-out sequences are new walks on the same table.

To look up the table a model must combine the last ``order - 1`` tokens at one position, which for order 3 a shift by one does
before any attention, and store ``vocab_size ** (order - 1)`` answers.

Source: KVSA sec. 3.3 (3-grams).
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvlens.checks import Seed, Within
from kvlens.errors import KVLensError
from kvlens.tasks.batch import Batch, Task
from kvlens.tasks.checks import require_drawable
from kvlens.tasks.drawing import draw_until_scored

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
        if self.length < self.order - 1:
            raise KVLensError(f"task 'ngrams': length must be at least order - 1 = {self.order - 1}, got {self.length}")

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
        require_drawable(self, batch_size, generator, split)
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
