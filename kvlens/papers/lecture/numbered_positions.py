"""Regression whose positions are plain numbers, the two ideas that LECTURE sec. 3 mentions first and rejects.

    index      r_n = 1, 2, 3, ...                                  a longer prompt has numbers that training had not
    share      r_n = n / (L + 1), between 0 and 1                  L positions: in a longer prompt every number is another one

The number is one more value of the input at its position. A model's input map turns it into a vector r_n w, with w learned,
which is added to that of the input: the x_n + r_n of the notes. Such a model has no other positions.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvlens.tasks import Batch, RegressionTask

Numbers = Literal["index", "share"]
NUMBERS: tuple[Numbers, ...] = ("index", "share")


@dataclass(frozen=True)
class NumberedRegression(RegressionTask):
    """`RegressionTask` with the number of each position as the last value of its input.

    Attributes:
        numbers: "index" or "share", as above.
    """

    name: ClassVar[str] = "numbered regression"

    numbers: Numbers = "index"

    @property
    def d_input(self) -> int:
        return super().d_input + 1

    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        batch = super().sample(batch_size, generator, split)
        return batch._replace(inputs=numbered(batch.inputs, numbers_of(self.numbers, self.n_positions)))


def numbers_of(kind: Numbers, n_positions: int) -> Float[Tensor, " pos"]:
    """The number of every position."""
    index = torch.arange(1, n_positions + 1, dtype=torch.float32)
    return index if kind == "index" else index / (n_positions + 1)


def numbered(
    inputs: Float[Tensor, "batch pos d_input"], numbers: Float[Tensor, " pos"]
) -> Float[Tensor, "batch pos d_input_plus_1"]:
    """The inputs with these numbers of their positions."""
    return torch.cat([inputs, numbers[None, :, None].expand(len(inputs), -1, 1)], dim=-1)
