"""Methods that keep some of the prompt's keys unchanged, with their own values: eviction from a KV cache.

A method scores every key, and the keys with the highest scores are kept, per key-value head or over all heads. Weights are 1.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvlens.conversion.softmax.few_keys import FewKeys, assembled, with_own_values
from kvlens.conversion.softmax.prompt_pass import attention_parts
from kvlens.conversion.softmax.teacher import Teacher
from kvlens.kv_bias import KVBias
from kvlens.ops.key_scores.attention import attention_received

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
    def fit(self, teacher: Teacher) -> KVBias:
        wanted = torch.tensor([self.keys_kept(int(n)) for n in teacher.lengths], device=teacher.exact.bias.b_D.device)
        prompts = [teacher.keys(layer) for layer in range(teacher.n_layers)]
        scores = torch.stack([each.double() for each in self.scores(teacher, wanted)])
        real = real_keys(teacher)
        scores = scores.masked_fill(~real[:, None], -torch.inf)
        batch = len(wanted)
        if self.heads_compete:
            flat = scores.transpose(0, 1).flatten(1)
            rank = _ranks(flat).view(batch, scores.shape[0], *scores.shape[2:]).transpose(0, 1)
            kept = rank < (wanted * scores.shape[0] * scores.shape[2])[:, None, None]
        else:
            kept = _ranks(scores) < wanted[:, None, None]
        kept &= real[:, None]
        r = max(1, int(kept.sum(dim=-1).max()))
        layers = []
        for prompt, some in zip(prompts, kept.flatten(1, 2), strict=True):
            active, index = some.int().sort(dim=-1, descending=True, stable=True)
            layers.append(with_own_values(prompt, index[:, :r], active[:, :r] > 0))
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
