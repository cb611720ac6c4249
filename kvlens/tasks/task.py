"""`Batch`, which every task yields, and `Task`, the interface of every task.

A task is a distribution of sequences together with the positions at which a prediction is scored. It holds no state: a batch
is a function of the generator that is passed in, so a training run can be resumed at any step, and two processes can draw the
same batch.

    logits of the model at position i  are compared with  targets[:, i]  where  scored[:, i]

A task also builds a model that fits it (`Task.new_model`), refuses models that do not fit (`Task.check_fit`), and adds
measurements that only make sense for this task (`Task.measure_more`). Below are draws that several tasks share, and the look-up
of the previous occurrence, which all tasks like induction need.

For next-token tasks ``targets[:, i]`` is ``inputs[:, i + 1]``; other tasks (k-hop induction, regression) define their own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, ClassVar, NamedTuple, get_type_hints

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvlens.checks import Seed, Within, checked, ensure, one_of
from kvlens.errors import KVLensError
from kvlens.model import HookedKVRegressor, HookedKVTransformer, HookedKVTransformerConfig
from kvlens.model.storage import build_with_ready_tokenizer

SPLITS = ("train", "heldout")
Model = HookedKVTransformer | HookedKVRegressor
MOST_PLACES = 2**31
"""The most positions of a batch: 16 GB of token ids alone."""
MAX_TRIES = 100


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

    @property
    def chance(self) -> float:
        """The accuracy of guessing: one over the number of tokens that may be the answer, by default all."""
        return 1 / self.d_input

    def data_hash(self) -> str | None:
        """A hash of the data if the settings do not determine them (a text on disk); else None."""
        return None

    @property
    def built_tokenizer(self) -> PreTrainedTokenizerBase | None:
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

    def describe_data(self) -> dict[str, object]:
        """The source of the data and their licences, for a model's card."""
        return {"source": f"generated by kvlens' task {self.name!r}", "licences": {}}

    def measure_more(self, model: Model, n_sequences: int, loss: float) -> Mapping[str, object]:
        """Measure on a trained model what its card reports in addition to loss and accuracy.

        Args:
            model: a model in eval mode.
            n_sequences: number of sequences on which loss and accuracy were measured.
            loss: the held-out loss.
        """
        return {}

    def check_batch(self, what: str, n_sequences: int) -> None:
        """Raise KVLensError unless ``n_sequences``, the argument ``what``, is at least 1 and so many fit into memory."""
        kind = Annotated[int, Within(1, max(1, MOST_PLACES // self.n_positions))]
        ensure(f"task {self.name!r}: {what}", kind, n_sequences)

    def check_drawable(self, batch_size: int, generator: torch.Generator, split: str) -> None:
        """Raise KVLensError for arguments of `sample` that are an empty batch, no generator, or an unknown split."""
        self.check_batch("batch_size", batch_size)
        ensure(f"task {self.name!r}: generator", torch.Generator, generator)
        ensure(f"task {self.name!r}: split", one_of(SPLITS), split)

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

    def settings(self) -> dict[str, object]:
        """The settings as JSON values; ``make_task(name, **settings)`` makes the same task."""
        return asdict(self)


def draw_distinct(n: int, batch_size: int, n_draws: int, generator: torch.Generator) -> Int[Tensor, "{batch_size} {n_draws}"]:
    """Return rows of distinct numbers below ``n`` in random order, a draw without replacement in each row.

    The indices of the largest of n independent numbers, in descending order, are such a draw.
    """
    return torch.rand(batch_size, n, generator=generator).topk(n_draws, dim=1).indices


def draw_until_scored(task: Task, draw: Callable[[], Batch]) -> Batch:
    """Draw batches until one has a scored position, so that the mean over scored positions exists.

    Args:
        task: named in the message.
        draw: draws one batch; successive calls use the same generator.

    Raises:
        KVLensError: many batches in a row have no scored position, so these settings leave almost nothing to predict.
    """
    for _ in range(MAX_TRIES):
        batch = draw()
        if bool(batch.scored.any()):
            return batch
    raise KVLensError(
        f"task {task.name!r}: {MAX_TRIES} batches in a row held no position to score; with {task.settings()} sequences are too "
        "short for what is to be predicted: make them longer, or the batch larger"
    )


def previous_occurrence(tokens: Int[Tensor, "batch pos"]) -> Int[Tensor, "batch pos"]:
    """Return for each position the last earlier position with the same token, or -1.

    A stable sort puts equal tokens next to each other in the order of their positions, so the left neighbor is the previous
    occurrence: O(length log(length)) work, and no length x length table.

    Args:
        tokens: token ids, of any range.
    """
    order = tokens.argsort(dim=1, stable=True)
    in_order = tokens.gather(1, order)
    repeats = in_order[:, 1:] == in_order[:, :-1]
    return torch.full_like(tokens, -1).scatter_(1, order[:, 1:], torch.where(repeats, order[:, :-1], -1))
