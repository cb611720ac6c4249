"""What every task yields, and what every task must offer.

A task is a distribution of sequences together with the positions at which a prediction is judged. It holds no state: a batch
is a function of the generator that is passed in, so a training run can be taken up at any step, and two processes can draw the
same batch.

    logits of the model at position i  are judged against  targets[:, i]  where  scored[:, i]

For next-token tasks ``targets[:, i]`` is ``inputs[:, i + 1]``; for others (k-hop induction, regression) it is what it says.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvlens.errors import KVLensError, nearest

SPLITS = ("train", "heldout")


class Batch(NamedTuple):
    """A batch of sequences.

    Attributes:
        inputs: what the model reads: token ids Int[batch pos], or Float[batch pos d_input] for regression.
        targets: what is judged: token ids Int[batch pos], or Float[batch pos]; arbitrary (0) where not scored.
        scored: Bool[batch pos], at least one True in the batch.
    """

    inputs: Tensor
    targets: Tensor
    scored: Tensor


@dataclass(frozen=True)
class Task(ABC):
    """A distribution of sequences; subclasses are frozen dataclasses whose fields are their settings."""

    name: ClassVar[str]
    """As in ``make_task(name)`` and ``kvlens train NAME``."""
    predicts: ClassVar[str] = "tokens"
    """"tokens" (judged by cross-entropy and accuracy) or "numbers" (judged by squared error)."""

    @property
    @abstractmethod
    def n_positions(self) -> int:
        """Positions of a sequence, the longest one: what ``n_ctx`` must hold."""

    @property
    @abstractmethod
    def d_input(self) -> int:
        """Token ids are below this (``d_vocab``); for regression the numbers that make up one position."""

    @abstractmethod
    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw ``batch_size`` sequences, on the CPU, from ``generator`` alone.

        Args:
            batch_size: sequences, at least 1.
            generator: on the CPU; equal states give equal batches.
            split: "train" or "heldout". A task that generates its sequences draws both from one law, and the generators
                differ; a task that cuts them from a text cuts them from different parts.
        """

    def heldout(self, n_sequences: int, seed: int = 0) -> Batch:
        """``n_sequences`` held-out sequences: the same ones for the same seed."""
        return self.sample(n_sequences, torch.Generator().manual_seed(1_000_003 + seed), "heldout")

    def data_hash(self) -> str | None:
        """A hash of the data behind the settings, where the settings do not decide them (a text on disk); else None."""
        return None

    def settings(self) -> dict[str, Any]:
        """The settings, of JSON's types; ``make_task(name, **settings)`` makes the task again."""
        return asdict(self)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "Task":
        """From settings by name; an unknown one is refused."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise KVLensError(
                    f"task {cls.name!r} has no setting {name!r}{nearest(name, known)}; there are {', '.join(known) or 'none'}"
                )
        return cls(**settings)
