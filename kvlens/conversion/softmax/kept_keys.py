"""Methods that keep some of the prompt's keys unchanged, with their own values: eviction from a KV cache.

A method scores every key, and the keys with the highest scores are kept, per key-value head or over all heads. Weights are 1.
Those that score them by their positions or by the prompt's own attention are here: "streaming_llm", "h2o" and "snapkv".
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.checks import Within, checked
from kvlens.conversion.softmax.few_keys import FewKeys, assembled, with_own_values
from kvlens.conversion.softmax.prompt_pass import attention_parts
from kvlens.conversion.softmax.settings import MOST_ASKED
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.errors import KVLensError
from kvlens.kv_bias import KVBias
from kvlens.ops.key_scores import attention_received

KEEP = 1e30
"""Added to the score of a key that is always kept."""


@dataclass(frozen=True, kw_only=True)
class KeptKeys(FewKeys):
    """A method that scores each key.

    Attributes:
        heads_compete: whether the keys of all layers and heads of a prompt are ranked together; otherwise every head keeps the
            same number.
    """

    heads_compete: ClassVar[bool] = False

    @abstractmethod
    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        """The score of every key, layer by layer.

        Args:
            teacher: as passed to :meth:`~kvlens.conversion.Approximation.fit`.
            wanted: how many keys per key-value head each prompt keeps.
        """

    @torch.no_grad()
    def kept(self, teacher: Teacher) -> Bool[Tensor, "layer batch kv_head key"]:
        """Which keys are kept."""
        wanted = torch.tensor([self.keys_kept(int(n)) for n in teacher.lengths], device=teacher.exact.bias.b_D.device)
        scores = torch.stack([each.double() for each in self.scores(teacher, wanted)])
        real = real_keys(teacher)
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        if self.heads_compete:
            flat = scores.transpose(0, 1).flatten(1)
            rank = _ranks(flat).view(len(wanted), scores.shape[0], *scores.shape[2:]).transpose(0, 1)
            return (rank < (wanted * scores.shape[0] * scores.shape[2])[:, None, None]) & real[:, None]
        return (_ranks(scores) < wanted[:, None, None]) & real[:, None]

    @torch.no_grad()
    def fit(self, teacher: Teacher) -> KVBias:
        kept = self.kept(teacher)
        r = max(1, int(kept.sum(dim=-1).max()))
        layers = []
        for layer, some in enumerate(kept.flatten(1, 2)):
            active, index = some.int().sort(dim=-1, descending=True, stable=True)
            layers.append(with_own_values(teacher.keys(layer), index[:, :r], active[:, :r] > 0))
        return assembled(teacher.exact, layers)


def _ranks(scores: Tensor) -> Tensor:
    """0 for the highest score along the last axis, 1 for the next, ...; ties go to the earlier key."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.empty_like(order).scatter_(-1, order, torch.arange(scores.shape[-1], device=scores.device).expand_as(order))


def real_keys(teacher: Teacher) -> Bool[Tensor, "batch key"]:
    """True at positions of the prompt whose token is read."""
    return teacher.exact.bias.b_D[0, :, 0] != 0


def own_distance(teacher: Teacher) -> Int[Tensor, "batch key"]:
    """How many positions before the text each token lies; 1 for the last."""
    return teacher.keys(0).distance[:, 0]


def attention_of_prompt(teacher: Teacher, layer: int, counts: Float[Tensor, "batch key"]) -> Float[Tensor, "batch kv_head key"]:
    """The attention that each key gets from the prompt's own queries, weighted by ``counts`` and summed over a group's heads.

    It is the attention in the prompt's own pass, so the bias that the prompt continues is part of the normalizer.
    """
    exact, part = teacher.exact, attention_parts(teacher.model)[layer]
    assert exact.queries is not None
    features = teacher.whole.features
    keys, distance, weight = features.keys[layer], features.distance[layer], teacher.whole.b_D[layer]  # type: ignore[union-attr]
    q = exact.queries[layer].to(keys)
    sink = None if part.sinks is None else part.sinks.to(keys)
    near = own_distance(teacher)
    received = attention_received(q, near, counts.to(keys), keys, distance, weight, part.score_rule(), sink)
    own = received[..., -near.shape[1] :]  # keys of the old bias come first
    return own.unflatten(1, (teacher.n_kv_heads, -1)).sum(dim=2)


def first_keys(teacher: Teacher, n: int) -> Float[Tensor, "batch key"]:
    """1 at the first ``n`` tokens of each prompt that are read, else 0."""
    real = real_keys(teacher)
    return (real & (real.cumsum(dim=1) <= n)).to(torch.float64)


@checked
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(KeptKeys):
    """The prompt's first keys, which many heads use as attention sinks, and its last keys.

    Here the keys keep their positions; the paper renumbers them to be contiguous.

    Attributes:
        n_sink: number of first keys that are kept.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Xiao et al. 2023, arXiv 2309.17453.
    """

    name: ClassVar[str] = "streaming_llm"

    n_sink: Annotated[int, Within(0, MOST_ASKED)] = 4

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        recent = -own_distance(teacher).double() + KEEP * first_keys(teacher, self.n_sink)
        return [recent[:, None].expand(-1, teacher.n_kv_heads, -1)] * teacher.n_layers


@checked
@dataclass(frozen=True, kw_only=True)
class H2O(KeptKeys):
    """Heavy hitters: half of the keys are the prompt's last, half are those with the largest total attention from its queries.

    The total is over all of the prompt's queries at once. The paper evicts keys while reading, so that a query sees only the
    keys that are left after earlier steps.

    Attributes:
        recent: fraction of the keys that are the last ones.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Zhang et al. 2023, arXiv 2306.14048.
    """

    name: ClassVar[str] = "h2o"
    needs_queries: ClassVar[bool] = True

    recent: Annotated[float, Within(0, 1)] = 0.5

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        last = own_distance(teacher) <= (self.recent * wanted).long()[:, None]
        counts = real_keys(teacher).double()
        layers = range(teacher.n_layers)
        return [attention_of_prompt(teacher, layer, counts).double() + KEEP * last[:, None] for layer in layers]


@checked
@dataclass(frozen=True, kw_only=True)
class SnapKV(KeptKeys):
    """The last queries of the prompt vote for earlier keys; votes are averaged over neighboring keys.

    Attributes:
        window: number of last tokens that vote and are kept; at most half of the keys that are kept.
        kernel_size: number of neighboring keys over which votes are averaged; odd.
        n_keys, ratio: how many keys per key-value head; see :class:`Landmark`.
        reference, n_continuations, continuation_length, n_held_out, seed: see
            :class:`~kvlens.conversion.softmax.settings.TextOptions`; the text is used only to measure errors.

    Source: Li et al. 2024, arXiv 2404.14469; averages rather than maxima, and over the heads of a group, as in kvpress.
    """

    name: ClassVar[str] = "snapkv"
    needs_queries: ClassVar[bool] = True

    window: Annotated[int, Within(1, MOST_ASKED)] = 32
    kernel_size: Annotated[int, Within(1, MOST_ASKED)] = 5

    def __post_init__(self):
        super().__post_init__()
        if self.kernel_size % 2 == 0:
            raise KVLensError(f"SnapKV: kernel_size must be odd, got {self.kernel_size}")

    def scores(self, teacher: Teacher, wanted: Int[Tensor, " batch"]) -> list[Float[Tensor, "batch kv_head key"]]:
        window = (wanted // 2).clamp(min=1, max=self.window)
        last = (own_distance(teacher) <= window[:, None]) & real_keys(teacher)
        return [self._votes(teacher, layer, last) + KEEP * last[:, None] for layer in range(teacher.n_layers)]

    def _votes(self, teacher: Teacher, layer: int, last: Tensor) -> Tensor:
        votes = attention_of_prompt(teacher, layer, last.double()).double().masked_fill(last[:, None], 0.0)
        return torch.nn.functional.avg_pool1d(votes, self.kernel_size, stride=1, padding=self.kernel_size // 2)
