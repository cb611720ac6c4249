"""`Batch`, which every task yields, and `Task`, the interface of every task.

A task is a distribution of sequences together with the positions at which a prediction is scored. It holds no state: a batch
is a function of the generator that is passed in, so a training run can be resumed at any step, and two processes can draw the
same batch.

    logits of the model at position i  are compared with  targets[:, i]  where  scored[:, i]

A task also builds a model that fits it (`Task.new_model`), refuses models that do not fit (`Task.check_fit`), and adds
measurements that only make sense for this task (`Task.measure_more`).

For next-token tasks ``targets[:, i]`` is ``inputs[:, i + 1]``; other tasks (k-hop induction, regression) define their own.
"""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple, get_type_hints

import torch
from torch import Tensor

from kvlens.checks import Seed, checked, ensure
from kvlens.errors import KVLensError, nearest
from kvlens.model import HookedKVRegressor, HookedKVTransformer, HookedKVTransformerConfig
from kvlens.model.storage import build_with_ready_tokenizer

SPLITS = ("train", "heldout")
Model = HookedKVTransformer | HookedKVRegressor


class Batch(NamedTuple):
    """A batch of sequences.

    Attributes:
        inputs: the model's inputs: token ids Int[batch pos], or Float[batch pos d_input] for regression.
        targets: the correct predictions: token ids Int[batch pos], or Float[batch pos]; arbitrary (0) where not scored.
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
    """"tokens" (scored by cross-entropy and accuracy) or "numbers" (scored by squared error)."""

    def __post_init__(self) -> None:
        """Check every setting against the type of its field; numpy's integers become Python's.

        Raises:
            KVLensError: a setting has another type, or is out of range.
        """
        kinds = get_type_hints(type(self), include_extras=True)  # postponed annotations are strings in a field
        for field in fields(self):
            value = ensure(f"task {self.name!r}: {field.name}", kinds[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, value)

    @property
    @abstractmethod
    def n_positions(self) -> int:
        """Positions of the longest sequence, the least ``n_ctx`` that fits."""

    @property
    @abstractmethod
    def d_input(self) -> int:
        """Number of token ids (``d_vocab``); for regression the number of features per position."""

    @abstractmethod
    def sample(self, batch_size: int, generator: torch.Generator, split: str = "train") -> Batch:
        """Draw ``batch_size`` sequences on the CPU; ``generator`` is the only source of randomness.

        Args:
            batch_size: sequences, at least 1.
            generator: on the CPU; equal states give equal batches.
            split: "train" or "heldout". A task that generates its sequences draws both from the same distribution, with
                different generators; a task that cuts them from a text takes them from different parts.
        """

    def heldout(self, n_sequences: int, seed: int = 0) -> Batch:
        """Draw ``n_sequences`` held-out sequences, the same ones for the same seed."""
        ensure(f"task {self.name!r}: seed", Seed, seed)
        return self.sample(n_sequences, torch.Generator().manual_seed(1_000_003 + seed), "heldout")

    def data_hash(self) -> str | None:
        """A hash of the data if the settings do not determine them (a text on disk); else None."""
        return None

    @property
    def built_tokenizer(self) -> Any:
        """The tokenizer of this task's texts; None if it draws tokens directly."""
        return None

    @property
    def d_vocab(self) -> int:
        """The vocabulary of a model for this task."""
        return self.d_input

    @checked
    def new_model(self, cfg: HookedKVTransformerConfig) -> Model:
        """Build a model of this configuration, with newly initialized weights, for the inputs and targets of this task."""
        return build_with_ready_tokenizer(HookedKVTransformer, cfg, self.built_tokenizer)

    def check_fit(self, model: Model) -> None:
        """Raise KVLensError unless ``model`` can read this task's inputs and predict its targets."""
        self._check_kind(model, HookedKVTransformer)
        if model.cfg.d_vocab < self.d_input:
            raise self._misfit(f"uses {self.d_input} token ids (d_vocab), the model has {model.cfg.d_vocab}; make them fit")
        self._check_length(model)

    def describe_data(self) -> dict[str, Any]:
        """The source of the data and their licences, for a model's card."""
        return {"source": f"generated by kvlens' task {self.name!r}", "licences": {}}

    def measure_more(self, model: Model, n_sequences: int, loss: float) -> dict[str, Any]:
        """Measure on a trained model what its card reports in addition to loss and accuracy.

        Args:
            model: a model in eval mode.
            n_sequences: number of sequences on which loss and accuracy were measured.
            loss: the held-out loss.
        """
        return {}

    def _check_kind(self, model: Model, kind: type) -> None:
        if not isinstance(model, kind):
            raise self._misfit(f"predicts {self.predicts}, which needs a {kind.__name__}")

    def _check_length(self, model: Model) -> None:
        if model.cfg.has_position_limit and model.cfg.n_ctx < self.n_positions:
            raise KVLensError(
                f"train: sequences of task {self.name!r} have {self.n_positions} positions, but the model has only "
                f"n_ctx={model.cfg.n_ctx}; build it with a larger n_ctx, or shorten the task"
            )

    def _misfit(self, words: str) -> KVLensError:
        return KVLensError(f"train: task {self.name!r} {words}")

    def settings(self) -> dict[str, Any]:
        """The settings as JSON values; ``make_task(name, **settings)`` makes the same task."""
        return asdict(self)

    @classmethod
    def from_settings(cls, settings: dict[str, Any]) -> "Task":
        """Make a task from settings by name; unknown names are refused."""
        known = [f.name for f in fields(cls)]
        for name in settings:
            if name not in known:
                raise KVLensError(
                    f"task {cls.name!r} has no setting {name!r}{nearest(name, known)}; there are {', '.join(known) or 'none'}"
                )
        return cls(**settings)
